"""Bound plans by all that several boundaries send over the one line between two sites.

If stages j and j + 1 are at different sites, the line carries each micro-batch once in one
direction and its gradient in the other. With x_j the seconds that the line needs for all
micro-batches across that boundary, it is busy in both directions for

    (1)  X = sum of x_j over all boundaries between the sites.

Nothing crosses before the first micro-batch has passed the stages in front of the first such
boundary, forward: f. In the direction of this boundary, the last to cross is a gradient at the
second such boundary or, if there is only one, an activation. It arrives one latency l later. Then
follow the backwards of the stages in front of the second boundary (or of the first), and at each of
them its exchange and update, at the latest behind that of the first stage:

    (2)  T >= f + X + l + r_j,     r_i = b_i + max(w_i + tail_i, hop + r_(i-1)),     r_0 = 0

with j the stage in front of the second boundary. If the last stage is known to be at the other
site, one more boundary follows, which costs no less than the least x of the cuts that are left; if
it is the first or the second one, j is the present stage at least.

(2) has the line busy without a pause. But a stage in front of such a boundary does only n_q
forwards before the first gradient is back, and the line may have nothing to carry until then. The
recurrence of the fixed stages (``solve.search.prefix``) has, for every transfer k in one direction,
a moment h_k before which it does not begin. Whatever is sent in whichever order and at the same
time, the line is done with all of them no earlier than if it carried one after the other by h_k:

    (3)  T >= e_K + l + r,     e_k = max(e_(k-1), h_k) + x_k / M

Behind every transfer in the direction of the first boundary comes a backward of the stage in front
of the second one, and behind every other transfer one of the stage in front of the first: r is r_j
of that stage. A boundary that is certain, but whose place is not known, is at the last fixed stage
or behind it: its transfers begin no earlier than the forwards that the last fixed stage sends on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from argosy.solve.search.kinds import PlanKind
from argosy.solve.search.menu import Menu
from argosy.solve.search.prefix import Fixed, PrefixTimes
from argosy.space.price import FloatArray


class Crossed(NamedTuple):
    """The state of (2) behind some fixed stages."""

    site: int = -1
    """Site of the last of them; -1 if there is none, or if it is at both."""
    forward: float = 0.0
    """Seconds of the first micro-batch through all of them, one way."""
    backward: float = 0.0
    """r of the last of them, in seconds."""
    number: int = 0
    """Number of boundaries between the sites."""
    begins: float = 0.0
    """f, in seconds."""
    busy: float = 0.0
    """X, in seconds."""
    returns: float = 0.0
    """r_j, in seconds."""
    boundaries: tuple[float | None, ...] = ()
    """x_j of every boundary between them, in seconds; None if it is not between the sites."""


# The state before any stage is fixed.
NO_STAGES = Crossed()


@dataclass(frozen=True)
class NextStages:
    """The stages that may follow, one each place of the arrays."""

    vector: NDArray[np.intp]
    end: NDArray[np.intp]
    hop: FloatArray
    """Seconds of the transfer from the stage before."""
    forward: FloatArray
    backward: FloatArray
    tail: FloatArray
    """Seconds of what follows the last gradient that is sent back: w + tail."""


class LineLoad:
    """The seconds that the line between two sites needs, by cut and by the sites of vectors."""

    def __init__(self, menu: Menu, in_site: NDArray[np.bool_]) -> None:
        """Prepare the bound; ``in_site`` is [site, vector]."""
        self.sites = np.where(in_site.sum(axis=0) == 1, in_site.argmax(axis=0), -1)
        """For each vector, its site; -1 if it is at both."""
        self.last_site = menu.last_site if (self.sites >= 0).all() else None
        shape, cuts = menu.shape, menu.grid.cuts
        ways = [way for pool in menu.prices.pools for way in pool.far if np.isfinite(way[0])]
        rate, self.latency = max(rate for rate, _ in ways), min(latency for _, latency in ways)
        samples = shape.num_micro_batches * shape.micro_batch_size
        self.count = shape.num_micro_batches
        self.seconds = samples * menu.prices.outputs[cuts] / rate
        """For each cut, x of a boundary there."""
        inner = np.append(self.seconds[1:-1], np.inf)
        least = np.minimum.accumulate(inner[::-1])[::-1]
        self.least = np.concatenate((least[:1], least))
        """For each cut, the least x of the boundaries from there on; infinite at the end."""

    def after(self, node: Crossed, cut: int, rows: NextStages) -> list[FloatArray]:
        """Return every field of ``Crossed`` but the last with each of the stages that may
        follow."""
        site = self.sites[rows.vector]
        crosses = (site >= 0) & (node.site >= 0) & (site != node.site)
        hop = rows.hop if node.forward else np.zeros(len(site))
        number = node.number + crosses
        return [
            site,
            node.forward + hop + rows.forward,
            rows.backward + np.maximum(rows.tail, hop + node.backward),
            number,
            np.where(crosses & (node.number == 0), node.forward, node.begins),
            node.busy + crosses * self.seconds[cut],
            np.where(crosses & (number <= 2), node.backward, node.returns),
        ]

    def bound(self, node: Crossed, cut: int, rows: NextStages) -> FloatArray:
        """Return the lower bound (2) in seconds with each of the stages that may follow."""
        site, forward, backward, number, begins, busy, returns = self.after(node, cut, rows)
        if self.last_site is not None:
            is_ahead = (site != self.last_site) & (rows.end < len(self.seconds) - 1)
            busy = busy + np.where(is_ahead, self.least[rows.end], 0.0)
            begins = np.where(is_ahead & (number == 0), forward, begins)
            returns = np.where(is_ahead & (number <= 1), backward, returns)
        seconds = begins + busy + self.latency + returns
        return np.where(busy > 0, seconds, 0.0)

    def child(self, node: Crossed, cut: int, rows: NextStages) -> Crossed:
        """Return the state with the only stage of ``rows``."""
        site, forward, backward, number, begins, busy, returns = (
            values[0].item() for values in self.after(node, cut, rows)
        )
        crossed = float(self.seconds[cut]) if number > node.number else None
        boundaries = (*node.boundaries, crossed) if node != NO_STAGES else ()
        return Crossed(site, forward, backward, number, begins, busy, returns, boundaries)

    def queued(
        self, node: Crossed, cut: int, left: int, stages: Sequence[Fixed], times: PrefixTimes
    ) -> float:
        """Return the lower bound (3) in seconds of plans that begin with some stages, with ``left``
        others behind cut ``cut``; 0 if they cross the line less than twice for certain."""
        crossed = [
            (at, seconds) for at, seconds in enumerate(node.boundaries) if seconds is not None
        ]
        is_ahead = self.last_site is not None and node.site != self.last_site
        is_ahead &= cut < len(self.seconds) - 1
        if is_ahead:
            crossed.append((len(stages) - 1, float(self.least[cut])))
        if len(crossed) < 2 or not times.sent:
            return 0.0
        first, second = crossed[0][0], crossed[1][0]
        returns = _returns(stages[: second + 1])
        ends = []
        for direction, tail in enumerate((returns[second], returns[first])):
            transfers: list[tuple[float, float]] = []
            for number, (at, seconds) in enumerate(crossed):
                is_gradient = number % 2 != direction
                # The gradient crosses before it is back if stages are between.
                is_known = not is_ahead or left == 1 or at < len(stages) - 1
                begins = times.returned[at] if is_gradient and is_known else times.sent[at]
                transfers += [(begin, seconds / self.count) for begin in begins]
            ends.append(carried(transfers) + self.latency + tail)
        return max(ends)


def _returns(stages: Sequence[Fixed]) -> list[float]:
    """Return r of (2) for every stage."""
    returns: list[float] = []
    for at, (_, backward, late, _, _, tail, _) in enumerate(stages):
        behind = stages[at - 1][4] + returns[-1] if at else 0.0
        returns.append(backward + max(late + tail, behind))
    return returns


def carried(transfers: Sequence[tuple[float, float]]) -> float:
    """Return when a line has carried transfers that begin no earlier than some moments."""
    end = 0.0
    for begin, seconds in sorted(transfers):
        end = max(end, begin) + seconds
    return end


def line_load(menu: Menu, in_site: NDArray[np.bool_]) -> LineLoad | None:
    """Return the bound of a menu; None if there are not two sites with one line that is as wide in
    both directions, or if stages may be on several kinds of devices."""
    ground, prices = menu.ground, menu.prices
    is_counted = menu.has_lines and ground.has_single_lines and ground.is_duplex
    has_two_sites = len(in_site) == 2 and menu.kind is not PlanKind.MIXED
    if not (is_counted and has_two_sites and prices.returned is prices.outputs):
        return None
    return LineLoad(menu, in_site)
