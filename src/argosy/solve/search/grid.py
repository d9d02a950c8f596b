"""Choose the cuts of a chain that a search considers, and bound plans with any cuts by a coarse
choice.

Tables over all ranges of L layers take L^2 / 2 numbers per option, and the programmes of
``solve.search.bounds`` as many steps. So a quick search of a long chain combines runs of layers
into *bundles* of g layers each:

    (1)  cuts c_0 = 0 < c_1 < ... < c_K = L; the layers of bundle j, c_{j-1} to c_j - 1, cost the
         same, or at least have outputs and gradients of outputs of the same size, none of them has
         tied weights or is the last of the chain; or there is only one

A plan found this way has its cuts on the grid, and moving single layers makes it exact
(``Incumbents.settle``). No bound may depend on that: a plan with cuts anywhere is bounded by one on
the grid that does less. Let each of its cuts x move to the next c_j >= x. A stage of layers x to y
- 1 that goes from c_i to c_j then has

    (2)  layers c_i to c_{j-1} of its own, if i < j
    (3)  at least a single layer of bundle j, if i = j; if its layers differ, it is unknown which
         one, and nothing counts

and sends on what crosses at c_j. A plan whose stages run these layers only, on the same devices in
the same order, takes no longer and needs no more memory, so the minimum over all such plans
(*loose*) bounds all plans. A stage loses at most g - 1 layers. Layers whose costs and outputs
differ stay bundles of their own, in any number.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from argosy.space.price import Prices

# Longer chains are combined into bundles of several layers if that is allowed.
_MOST_BUNDLES = 100

_Indices = NDArray[np.intp]


@dataclass(frozen=True, kw_only=True, eq=False)
class CutGrid:
    """A set of cuts that defines the layers of a stage between two of them, for tables [cut,
    cut]."""

    cuts: _Indices
    first: _Indices
    """[i, j]: the first layer of a stage from cut i to cut j."""
    end: _Indices
    """[i, j]: one past its last layer."""
    bundle: int = 1
    """Number of layers of the largest bundle."""
    fewest: int = 1
    """Least number of bundles of a stage."""
    single: _Indices | None = None
    """Cuts at which no stage without bundles can be, if there are such stages."""
    loose: CutGrid | None = None
    """The same cuts with (2) and (3); None if that changes nothing."""

    @property
    def size(self) -> int:
        """Return the number of bundles."""
        return len(self.cuts) - 1

    def layers(self, start: _Indices, stop: _Indices) -> tuple[_Indices, _Indices]:
        """Return the first layers and the ends of stages from cut to cut."""
        return self.first[start, stop], self.end[start, stop]


def all_cuts(prices: Prices) -> CutGrid:
    """Return a grid on which every layer is a bundle."""
    return _grid(np.arange(prices.num_layers + 1))


def coarse_cuts(prices: Prices, most: int = _MOST_BUNDLES) -> CutGrid:
    """Return the grid (1) with the smallest g that makes at most ``most`` bundles, of equal layers
    if possible."""
    alone = {
        prices.num_layers - 1,
        *(at for index, partner, _ in prices.tied for at in (index, partner)),
    }
    crossing = list(zip(prices.outputs[1:].tolist(), prices.returned[1:].tolist(), strict=True))
    for certain, kinds in ((1, prices.shapes), (0, crossing)):
        keys = [(kind, at if at in alone else -1) for at, kind in enumerate(kinds)]
        runs = [len(list(run)) for _, run in itertools.groupby(keys)]
        sizes = (
            size for size in range(1, max(runs) + 1) if sum(-(-run // size) for run in runs) <= most
        )
        bundle = next(sizes, 1)
        if bundle > 1:
            starts = itertools.accumulate(runs, initial=0)
            ends = [
                at + min(n + bundle, run)
                for at, run in zip(starts, runs, strict=False)
                for n in range(0, run, bundle)
            ]
            return _coarse(np.array([0, *ends], dtype=np.intp), bundle, certain)
    return all_cuts(prices)


def _grid(cuts: _Indices, bundle: int = 1, loose: CutGrid | None = None) -> CutGrid:
    first, end = np.meshgrid(cuts, cuts, indexing="ij", copy=False)
    return CutGrid(cuts=cuts, first=first, end=end, bundle=bundle, loose=loose)


def _coarse(cuts: _Indices, bundle: int, certain: int) -> CutGrid:
    """Return a grid with (2) and (3); ``certain`` layers of a bundle are known to be in a stage
    within it."""
    size = len(cuts)
    first = np.broadcast_to(cuts[:, None], (size, size)).copy()
    end = np.broadcast_to(np.concatenate(([0], cuts[:-1] + 1)), (size, size)).copy()
    at = np.arange(size)
    first[at, at], end[at, at] = cuts - certain, cuts
    single = np.nonzero(np.diff(cuts, prepend=-1) == 1)[0]
    loose = CutGrid(cuts=cuts, first=first, end=end, bundle=bundle, fewest=0, single=single)
    return _grid(cuts, bundle, loose)
