"""Rank hundreds of prepared plans in microseconds when the bandwidth of an edge changes.

Let x be the seconds per byte of an edge. For every plan the time of an iteration is convex and
piecewise linear in x (``steady`` (3)):

    (1)  T(x) = max over lines of (a + c x)

The lines are computed in advance: T and its line at some x, then at every x where two neighbouring
lines meet, until no new line appears. Ranking after a change is one vector expression over all
plans. It is exact between the least and the greatest x that were prepared, if everything else is as
in the cluster; beyond that, and if links are shared, it is a lower bound.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from argosy.choose.steady import SteadyGraph, SteadyNetwork
from argosy.cluster.topology import Cluster
from argosy.cluster.trace import FloatArray
from argosy.cost.compute import ComputeModel
from argosy.errors import bad_input, closest
from argosy.plan.plan import Plan
from argosy.sim.tasks.compile import compile_plan
from argosy.workload.chain import Chain

# Number of bandwidths at which the first lines are computed.
_SAMPLES = 16
# The search for further lines stops after this many rounds; the result is then a lower bound.
_ROUNDS = 12


@dataclass(frozen=True, kw_only=True)
class KeptPlans:
    """A set of plans that are prepared for changes of one edge: their lines (1) as arrays (plans,
    lines)."""

    plans: tuple[Plan, ...]
    edge: str
    low: float
    """Bytes/s; between ``low`` and ``high`` the ranking is exact."""
    high: float
    intercepts: FloatArray
    slopes: FloatArray

    def seconds(self, bandwidth: float) -> FloatArray:
        """Return the seconds of an iteration of every plan at a bandwidth in bytes/s (1)."""
        return (self.intercepts + self.slopes / bandwidth).max(axis=1)

    def ranking(self, bandwidth: float) -> list[int]:
        """Return the indices of the plans, fastest first; on a tie the earlier one first."""
        return np.argsort(self.seconds(bandwidth), kind="stable").tolist()


def keep(
    plans: Sequence[Plan],
    chain: Chain,
    cluster: Cluster,
    edge: str,
    *,
    model: ComputeModel | None = None,
    between: tuple[float, float] | None = None,
) -> KeptPlans:
    """Prepare plans for changes of an edge ``between`` two bandwidths, by default a hundredth of
    its bandwidth at time 0 and four times it."""
    if edge not in cluster.edges:
        suggestion = closest(edge, sorted(cluster.edges))
        raise bad_input(f"an edge of {cluster.name}", edge, "edge", suggestion=suggestion)
    links = frozenset(cluster.edges[edge])
    now = max(cluster.links[link].bandwidth.at(0) for link in links)
    if not now and between is None:
        raise bad_input("an edge that is not down at time 0, or its bandwidths", edge, "edge")
    low, high = between or (now / 100, 4 * now)
    model = model or ComputeModel()
    lines = [
        edge_lines(
            SteadyGraph(compile_plan(plan, chain, cluster, model), cluster), links, low, high
        )
        for plan in plans
    ]
    most = max(len(plan_lines) for plan_lines in lines)
    padded = np.array(
        [[*plan_lines, *[plan_lines[0]] * (most - len(plan_lines))] for plan_lines in lines]
    )
    return KeptPlans(
        plans=tuple(plans),
        edge=edge,
        low=low,
        high=high,
        intercepts=padded[:, :, 0],
        slopes=padded[:, :, 1],
    )


def edge_lines(
    steady: SteadyGraph, links: frozenset[int], low: float, high: float
) -> list[tuple[float, float]]:
    """Return (a, c) of every line that is the maximum somewhere between two bandwidths, flattest
    first."""
    network = steady.at([0.0])
    lines: dict[tuple[float, float], tuple[float, float]] = {}
    points = np.geomspace(1 / high, 1 / low, _SAMPLES)
    for _ in range(_ROUNDS):
        seconds, slopes = steady.lines(_with_edge(network, links, points), links)
        before = len(lines)
        for x, time, slope in zip(points.tolist(), seconds.tolist(), slopes.tolist(), strict=True):
            if np.isfinite(time):
                lines.setdefault(
                    (round(slope), float(f"{time - slope * x:.9e}")), (time - slope * x, slope)
                )
        if len(lines) == before or not lines:
            break
        points = _crossings(_envelope(list(lines.values())), 1 / high, 1 / low)
        if not len(points):
            break
    return _envelope(list(lines.values())) or [(float("inf"), 0.0)]


def _with_edge(network: SteadyNetwork, links: frozenset[int], inverse: FloatArray) -> SteadyNetwork:
    """Return one state for each value, in which the links have that value and everything else is
    unchanged."""
    width = len(inverse)
    rows = np.repeat(network.inverse, width, axis=1)
    rows[sorted(links)] = inverse
    return SteadyNetwork(rows, np.repeat(network.slow, width, axis=1))


def _envelope(lines: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the lines that are above all others somewhere, by slope."""
    top: list[tuple[float, float]] = []
    for line in sorted(lines, key=lambda candidate: (candidate[1], candidate[0])):
        if top and top[-1][1] == line[1]:
            top.pop()
        while len(top) > 1 and _cross(top[-2], line) <= _cross(top[-2], top[-1]):
            top.pop()
        top.append(line)
    return top


def _cross(first: tuple[float, float], second: tuple[float, float]) -> float:
    """Return the x at which two lines of different slope meet."""
    return (first[0] - second[0]) / (second[1] - first[1])


def _crossings(top: list[tuple[float, float]], low: float, high: float) -> FloatArray:
    meets = [_cross(first, second) for first, second in itertools.pairwise(top)]
    return np.array([x for x in meets if low < x < high])
