"""Compute Peano-Hilbert keys: positions on a curve that keeps near particles near.

Every cube of the octree, and every half and quarter of one along the curve, is one run of
consecutive keys. So a tree over sorted keys needs no pointers to particles, and a domain that is a
run of the curve is compact. Keys have 21 bits per dimension. The transformation is Skilling's
(2004): Gray code, then the rotations of each level undone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from argosy.nbody.compiled import compiled, inlined

# Bits of a key per dimension.
BITS = 21
# Particles whose keys are computed together.
_BLOCK = 128
# Bits of a key.
KEY_BITS = 3 * BITS

# Keys along the curve.
Keys = NDArray[np.int64]
Positions = NDArray[np.float64]
"""One row of three coordinates per particle, each at least 0 and less than the box."""


def hilbert_keys(positions: Positions, box: float) -> Keys:
    """Return the key of each particle on the curve."""
    keys = np.empty(len(positions), np.int64)
    _fill_keys(positions, box, keys)
    return keys


@compiled
def _fill_keys(positions: Positions, box: float, keys: Keys) -> None:
    """Fill in the keys, a block of particles at a time.

    The same operations on all particles of a block use vector registers; branches would follow
    random bits.
    """
    cells = np.int64(1) << BITS
    place = np.empty((3, _BLOCK), np.int64)
    for begin in range(0, len(keys), _BLOCK):
        count = min(_BLOCK, len(keys) - begin)
        for d in range(3):
            for i in range(count):
                place[d, i] = min(np.int64(positions[begin + i, d] / box * cells), cells - 1)
        for bit in range(BITS - 1, 0, -1):
            below = (np.int64(1) << bit) - 1
            # A set bit mirrors x below it; else x and the other are exchanged there.
            for i in range(_BLOCK):
                x, y, z = place[0, i], place[1, i], place[2, i]
                x ^= below & -(x >> bit & 1)
                mirror = -(y >> bit & 1)
                swap = (x ^ y) & below & ~mirror
                x ^= (below & mirror) | swap
                y ^= swap
                mirror = -(z >> bit & 1)
                swap = (x ^ z) & below & ~mirror
                place[0, i], place[1, i] = x ^ ((below & mirror) | swap), y
                place[2, i] = z ^ swap
        for i in range(count):
            x = place[0, i]
            y = place[1, i] ^ x
            z = place[2, i] ^ y
            # Bit b of the turn is the parity of the bits of z above b.
            turn = z >> 1
            for shift in (1, 2, 4, 8, 16):
                turn ^= turn >> shift
            key = _spread(x ^ turn) << 2 | _spread(y ^ turn) << 1
            keys[begin + i] = key | _spread(z ^ turn)


@inlined
def _spread(value: int) -> int:
    """Return a number whose bit 3 b is bit b of ``value``, for the first 21 bits."""
    value = (value | value << 32) & 0x1F00000000FFFF
    value = (value | value << 16) & 0x1F0000FF0000FF
    value = (value | value << 8) & 0x100F00F00F00F00F
    value = (value | value << 4) & 0x10C30C30C30C30C3
    return (value | value << 2) & 0x1249249249249249
