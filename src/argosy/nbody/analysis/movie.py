"""Create a movie of a run from a few of its snapshots, as an animated PNG, which browsers play.

Between two snapshots at the expansion factors a and b, a particle follows the cubic that has its
positions and its velocities at both ends, as functions of the growing mode D. All frames share one
scale of colours, that of the last.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import numpy as np

from argosy.errors import bad_input
from argosy.nbody.analysis.picture import (
    SIGNATURE,
    Bytes,
    Slice,
    chunk,
    colour_range,
    colours,
    density_levels,
    packed,
    shades,
)
from argosy.nbody.particles import Box, Floats, wrapped

# The largest number of frames.
_MOST_FRAMES = 1000


def movie(
    snapshots: Sequence[Box],
    *,
    frames: int = 48,
    pixels: int = 400,
    seconds: float = 6.0,
    part: Slice | None = None,
) -> bytes:
    """Return an animated PNG from the earliest snapshot to the last, uniform in the growing
    mode."""
    if not 2 <= frames <= _MOST_FRAMES:
        raise bad_input(f"2 to {_MOST_FRAMES} frames", frames, "frames")
    if not 0 < seconds < 1e4:
        raise bad_input("a time above 0 and below 10,000 s", seconds, "seconds")
    levels = [
        density_levels(positions, snapshots[0].size, pixels=pixels, part=part)
        for positions in positions_between(_in_order(snapshots), frames)
    ]
    limits = colour_range(levels[-1])
    return animated_png([shades(level, limits) for level in levels], seconds / frames)


def _in_order(snapshots: Sequence[Box]) -> list[Box]:
    """Sort snapshots by time and their particles by id.

    Raises ``InputError`` if they are not moments of one run.
    """
    ordered = sorted(snapshots, key=lambda box: box.expansion)
    if len(ordered) < 2 or len({box.expansion for box in ordered}) < len(ordered):
        raise bad_input(
            "snapshots of two or more moments", f"{len(ordered)} snapshots", "snapshots"
        )
    sorted_boxes: list[Box] = []
    for box in ordered:
        order = np.argsort(box.particles.ids)
        particles = box.particles.taken(order)
        first = sorted_boxes[0] if sorted_boxes else None
        if first is not None and (
            box.size != first.size or not np.array_equal(particles.ids, first.particles.ids)
        ):
            raise bad_input(
                "snapshots of one run", f"other particles at z = {box.redshift:.4g}", "snapshots"
            )
        sorted_boxes.append(
            Box(
                size=box.size, expansion=box.expansion, cosmology=box.cosmology, particles=particles
            )
        )
    return sorted_boxes


def positions_between(snapshots: Sequence[Box], frames: int) -> Iterator[Floats]:
    """Yield positions at moments evenly spaced in the growing mode."""
    cosmology, size = snapshots[0].cosmology, snapshots[0].size
    growth = np.array([cosmology.growth(box.expansion) for box in snapshots])
    for moment in np.linspace(growth[0], growth[-1], frames):
        at = int(np.clip(np.searchsorted(growth, moment, side="right") - 1, 0, len(growth) - 2))
        before, after = snapshots[at], snapshots[at + 1]
        step = growth[at + 1] - growth[at]
        t = (moment - growth[at]) / step
        moved = after.particles.positions - before.particles.positions
        moved -= size * np.rint(moved / size)
        slopes = [
            box.particles.momenta * (step / cosmology.growing_momentum(box.expansion))
            for box in (before, after)
        ]
        curve = (3 - 2 * t) * t * t * moved
        curve += t * (1 - t) * ((1 - t) * slopes[0] - t * slopes[1])
        yield wrapped(before.particles.positions + curve, size)


def animated_png(frames: Sequence[Bytes], seconds: float) -> bytes:
    """Return an animated PNG of frames of palette indices, each shown for ``seconds``, that
    repeats."""
    height, width = frames[0].shape
    parts = [
        chunk(b"IHDR", struct.pack(">2I5B", width, height, 8, 3, 0, 0, 0)),
        chunk(b"PLTE", colours().tobytes()),
        chunk(b"acTL", struct.pack(">2I", len(frames), 0)),
    ]
    number = 0
    for place, frame in enumerate(frames):
        control = struct.pack(
            ">5I2H2B", number, width, height, 0, 0, max(round(1000 * seconds), 1), 1000, 0, 0
        )
        parts.append(chunk(b"fcTL", control))
        number += 1
        if place == 0:
            parts.append(chunk(b"IDAT", packed(frame)))
            continue
        parts.append(chunk(b"fdAT", struct.pack(">I", number) + packed(frame)))
        number += 1
    return SIGNATURE + b"".join(parts) + chunk(b"IEND", b"")
