"""Draw a slice through the box, with every particle as a disc as wide as its neighbourhood is
empty.

The picture shows the surface density of the slice on a logarithmic scale, through a map of colours
from dark blue to light yellow, as a PNG that needs only zlib.
"""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass

import numpy as np
import scipy.spatial
from numpy.typing import NDArray

from argosy.errors import bad_input
from argosy.nbody.compiled import compiled
from argosy.nbody.particles import Floats

# An image, or indices of colours.
Bytes = NDArray[np.uint8]

_COLOURS = np.array(
    [
        (0.00, 4, 4, 14),
        (0.20, 22, 18, 58),
        (0.40, 76, 24, 98),
        (0.58, 158, 48, 92),
        (0.74, 226, 98, 56),
        (0.88, 252, 182, 72),
        (1.00, 255, 250, 224),
    ]
)
"""The colour map: position on the scale, then red, green, blue."""
# The neighbour whose distance is the radius of a particle's disc.
_NEIGHBOURS = 24


@dataclass(frozen=True, kw_only=True)
class Slice:
    """The slice that is shown; lengths are shares of the box."""

    axis: int = 2
    """The axis along which to look."""
    begin: float = 0.0
    depth: float = 0.25


def density_picture(
    positions: Floats, box: float, *, pixels: int = 800, part: Slice | None = None
) -> Bytes:
    """Return an image as rows of red, green and blue."""
    level = density_levels(positions, box, pixels=pixels, part=part)
    return colours()[shades(level, colour_range(level))]


def density_levels(
    positions: Floats, box: float, *, pixels: int, part: Slice | None = None
) -> Floats:
    """Return the logarithm of the surface density over its mean, top row first."""
    part = part or Slice()
    if not 16 <= pixels <= 8192:
        raise bad_input("16 to 8192 pixels", pixels, "pixels")
    if not math.isfinite(part.begin):
        raise bad_input("a part of the box", part.begin, "begin")
    if not 0 < part.depth <= 1:
        raise bad_input("a part of the box between 0 and 1", part.depth, "depth")
    tree = scipy.spatial.cKDTree(positions, boxsize=box)
    radius = tree.query(positions, k=[min(_NEIGHBOURS, len(positions))])[0][:, 0]
    along = np.mod(positions[:, part.axis] / box - part.begin, 1.0)
    shown = along < part.depth
    across = [axis for axis in range(3) if axis != part.axis]
    image = np.zeros((pixels, pixels))
    scale = pixels / box
    _splat(
        positions[shown][:, across] * scale, np.clip(radius[shown] * scale, 1.0, pixels / 4), image
    )
    relative = image / max(image.mean(), 1e-300)  # zero everywhere if the slice is empty
    return np.log10(np.maximum(relative, 1e-3))[::-1]


def colour_range(level: Floats) -> tuple[float, float]:
    """Return the levels of the darkest and of the brightest colour."""
    low, high = np.percentile(level, (1, 99.9))
    return float(low), float(high)


def shades(level: Floats, limits: tuple[float, float]) -> Bytes:
    """Return indices of the colour table."""
    low, high = limits
    return np.rint(255 * np.clip((level - low) / max(high - low, 1e-9), 0, 1)).astype(np.uint8)


@compiled
def _splat(places: Floats, radii: Floats, image: Floats) -> None:
    """Add to the image a disc of mass 1 per particle, brightest in its middle."""
    pixels = image.shape[0]
    for p in range(places.shape[0]):
        x, y, r = places[p, 0], places[p, 1], radii[p]
        i0 = int(np.floor(y - r))
        i1 = int(np.ceil(y + r))
        j0 = int(np.floor(x - r))
        j1 = int(np.ceil(x + r))
        total = 0.0
        for turn in range(2):  # measure the disc on the pixels, then lay it down with mass 1
            for i in range(i0, i1 + 1):
                for j in range(j0, j1 + 1):
                    away = ((i + 0.5 - y) ** 2 + (j + 0.5 - x) ** 2) / (r * r)
                    if away < 1.0:
                        weight = (1.0 - away) ** 2
                        if turn == 0:
                            total += weight
                        else:
                            image[i % pixels, j % pixels] += weight / total
            if total == 0.0:
                image[int(y) % pixels, int(x) % pixels] += 1.0
                break


def colours() -> Bytes:
    """Return 256 rows of red, green and blue."""
    scale = np.linspace(0, 1, 256)
    channels = [np.interp(scale, _COLOURS[:, 0], _COLOURS[:, channel]) for channel in (1, 2, 3)]
    return np.stack(channels, axis=-1).astype(np.uint8)


def png(image: Bytes) -> bytes:
    """Return rows of red, green and blue as a PNG file."""
    height, width, _ = image.shape
    header = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)
    return (
        SIGNATURE
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", packed(image.reshape(height, -1)))
        + chunk(b"IEND", b"")
    )


# The first bytes of every PNG file.
SIGNATURE = b"\x89PNG\r\n\x1a\n"


def packed(rows: Bytes) -> bytes:
    """Return rows of pixels as a PNG stores them, each after the number of its filter (none)."""
    return zlib.compress(
        np.concatenate([np.zeros((len(rows), 1), np.uint8), rows], axis=1).tobytes(), 9
    )


def chunk(kind: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG file."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
