"""Compute Peano-Hilbert keys: positions on a curve that keeps near particles near.

Every cube of the octree, and every half and quarter of one along the curve, is one run of
consecutive keys. So a tree over sorted keys needs no pointers to particles, and a domain that is a
run of the curve is compact. Keys have 21 bits per dimension. The transformation is Skilling's
(2004): Gray code, then the rotations of each level undone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from argosy.nbody.compiled import compiled

# Bits of a key per dimension.
BITS = 21
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
    cells = np.int64(1) << BITS
    place = np.zeros(3, np.int64)
    for i in range(positions.shape[0]):
        for d in range(3):
            place[d] = min(np.int64(positions[i, d] / box * cells), cells - 1)
        bit = cells >> 1
        while bit > 1:
            below = bit - 1
            for d in range(3):
                if place[d] & bit:
                    place[0] ^= below
                else:
                    swap = (place[0] ^ place[d]) & below
                    place[0] ^= swap
                    place[d] ^= swap
            bit >>= 1
        place[1] ^= place[0]
        place[2] ^= place[1]
        turn = np.int64(0)
        bit = cells >> 1
        while bit > 1:
            if place[2] & bit:
                turn ^= bit - 1
            bit >>= 1
        key = np.int64(0)
        for b in range(BITS - 1, -1, -1):
            for d in range(3):
                key = (key << 1) | (((place[d] ^ turn) >> b) & 1)
        keys[i] = key
