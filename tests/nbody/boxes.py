"""Boxes of particles for tests: random, clustered, and the shared ones that GADGET-4 made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

Array = NDArray[np.float64]

ANCHOR = Path(__file__).parents[3] / "shared" / "data" / "nbody" / "anchor_l50n32.npz"
needs_anchor = pytest.mark.skipif(
    not ANCHOR.exists(), reason=f"no {ANCHOR.name}: the shared data are not here"
)


def anchor() -> dict[str, Array]:
    """The shared box, as float64, positions inside it."""
    with np.load(ANCHOR) as file:
        content = {name: file[name].astype(np.float64) for name in file.files}
    for name in ("z63_pos", "z2_pos", "z0_pos"):
        content[name] = np.mod(content[name], content["box"])
    return content


def clustered(count: int, box: float, seed: int) -> Array:
    """A third spread evenly, the rest in four clumps of very different size, one across the edge of
    the box."""
    random = np.random.default_rng(seed)
    spread = random.uniform(0, box, (count // 3, 3))
    middles = random.uniform(0, box, (4, 3))
    middles[0] = 0.0
    clump = random.integers(0, 4, count - len(spread))
    scale = box * np.array([0.05, 0.02, 0.005, 0.001])[clump, None]
    positions = np.concatenate(
        [spread, middles[clump] + scale * random.standard_normal((len(clump), 3))]
    )
    positions = np.mod(positions, box)
    return np.where(positions >= box, 0.0, positions)


def relative_errors(found: Array, exact: Array) -> Array:
    errors: Array = np.linalg.norm(found - exact, axis=1) / np.linalg.norm(exact, axis=1)
    return errors
