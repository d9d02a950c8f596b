"""Find halos by friends of friends: particles closer than a linking length belong to one halo.

Particles are sorted into cells at least one linking length wide; neighbours within a cell and its
13 cells ahead are joined in a forest whose roots are the halos.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from argosy.errors import bad_input
from argosy.nbody.compiled import compiled, inlined
from argosy.nbody.particles import Floats, Names, wrapped

# The largest number of cells per dimension.
_MOST_CELLS = 256


@dataclass(frozen=True, kw_only=True)
class Halos:
    """The halos that were found, the largest first."""

    sizes: Names
    """Particles per halo."""
    centres: Floats
    """Centres of mass in the box."""
    member_of: Names
    """Per particle, its halo; -1 for none."""

    def __len__(self) -> int:
        return len(self.sizes)


def find_halos(positions: Floats, box: float, *, linking: float = 0.2, least: int = 32) -> Halos:
    """Return groups of at least ``least`` particles, linked within ``linking`` mean separations."""
    if not 0 < linking < 1:
        raise bad_input("a part of the mean separation, between 0 and 1", linking, "linking")
    length = linking * box / len(positions) ** (1 / 3)
    cells = max(3, min(int(box / length), _MOST_CELLS))
    place = np.minimum((positions * (cells / box)).astype(np.int64), cells - 1)
    cell = (place[:, 0] * cells + place[:, 1]) * cells + place[:, 2]
    order = np.argsort(cell, kind="stable")
    starts = np.searchsorted(cell[order], np.arange(cells**3 + 1))
    root = np.arange(len(positions))
    _join(positions, order, starts, cells, box, length, root)
    roots, member, counts = np.unique(root, return_inverse=True, return_counts=True)
    ranking = np.argsort(-counts, kind="stable")
    kept = ranking[counts[ranking] >= least]
    number = np.full(len(roots), -1, np.int64)
    number[kept] = np.arange(len(kept))
    member_of = number[member]
    centres = _centres(positions, member_of, positions[roots[kept]], box)
    return Halos(sizes=counts[kept].astype(np.int64), centres=centres, member_of=member_of)


def _centres(positions: Floats, member_of: Names, anchors: Floats, box: float) -> Floats:
    """Return the centres of mass, from the images nearest to each halo's first particle."""
    inside = member_of >= 0
    halo = member_of[inside]
    away = positions[inside] - anchors[halo]
    away -= box * np.rint(away / box)
    total = np.zeros_like(anchors)
    np.add.at(total, halo, away)
    return wrapped(
        anchors + total / np.maximum(np.bincount(halo, minlength=len(anchors)), 1)[:, None], box
    )


@inlined
def _find(root: Names, i: int) -> int:
    while root[i] != i:
        root[i] = root[root[i]]
        i = root[i]
    return i


@compiled
def _join(
    positions: Floats,
    order: Names,
    starts: Names,
    cells: int,
    box: float,
    length: float,
    root: NDArray[np.int64],
) -> None:
    """Set ``root`` of every particle to the smallest number in its group."""
    for here in range(cells**3):
        if starts[here] == starts[here + 1]:
            continue
        ci, cj, ck = here // (cells * cells), here // cells % cells, here % cells
        for step in range(13, 27):  # itself and the 13 neighbours after it
            i = (ci + step // 9 - 1) % cells
            j = (cj + step // 3 % 3 - 1) % cells
            k = (ck + step % 3 - 1) % cells
            there = (i * cells + j) * cells + k
            for s in range(starts[here], starts[here + 1]):
                p = order[s]
                for t in range(s + 1 if step == 13 else starts[there], starts[there + 1]):
                    q = order[t]
                    r2 = 0.0
                    for d in range(3):
                        away = positions[p, d] - positions[q, d]
                        away -= box * np.rint(away / box)
                        r2 += away * away
                    if r2 <= length * length:
                        root_p, root_q = _find(root, p), _find(root, q)
                        if root_p != root_q:
                            root[max(root_p, root_q)] = min(root_p, root_q)
    for p in range(root.shape[0]):
        root[p] = _find(root, p)
