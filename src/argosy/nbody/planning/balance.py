"""Choose where to cut the curve from measured work and speed, only if it pays, without oscillation.

Leaves along the curve are the items of ``solve.search.chain``. A rank d that computed reference
work W_d (seconds of an average rank) in t_d seconds, besides m_d seconds of mesh, has

    (1)  speed s_d = W_d / t_d, smoothed:  s_d <- s_d^(1 - r) (W_d / t_d)^r   with relaxation r
    (2)  cut: least T with W_d(cut) / s_d + m_d <= T for all d, within every rank's memory.

``cut_chain`` has no m_d; replacing s_d by s_d (1 - m_d / T) and repeating with the T found gives
(2) in a few rounds. A new cut is used if it is better by more than the hysteresis, and if its gain
over a horizon exceeds the cost of moving the particles:

    (3)  (T_now - T_new) x steps of the horizon > bytes that change rank / bandwidth.

The same rule is used in a run, where t_d is measured, and in the simulator, where it is simulated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from argosy.errors import InfeasibleError
from argosy.nbody.particles import Floats
from argosy.solve.search.chain import cut_chain

Ends = tuple[int, ...]
"""Per rank, one past its last leaf."""

# How often the cut is repeated to find (2).
_ROUNDS = 4


@dataclass(frozen=True, kw_only=True)
class Leaves:
    """The work, the memory and the bytes to send that each leaf along the curve has."""

    work: Floats
    """Reference seconds per leaf."""
    bytes: Floats
    """Bytes of memory per leaf."""
    sent: Floats
    """Bytes that are sent if a leaf changes rank, per leaf."""


@dataclass(frozen=True, kw_only=True)
class BalanceSample:
    """The times that ranks measured since the last decision."""

    leaves: Leaves
    ends: Ends
    tree_seconds: Floats
    """Seconds of tree and pairs per rank."""
    mesh_seconds: Floats
    """Seconds of the mesh per rank, as far as it is not overlapped."""
    planes: tuple[int, ...] = ()
    """The first plane of each rank's slab of the mesh, and the end; empty if planes take no
    memory."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules by which the controller decides whether particles are moved."""

    relaxation: float = 0.8
    hysteresis: float = 0.03
    """The smallest share of a step that a move must gain."""
    horizon: int = 10
    """The number of steps for which a gain counts."""
    bandwidth: float = 1e9
    """Bytes/s at which particles move between ranks."""


@dataclass(kw_only=True)
class Balancer:
    """A controller that keeps speeds between decisions; equal input gives equal decisions on every
    rank."""

    capacity: tuple[float, ...]
    """Bytes per rank, for particles and planes; ``math.inf`` for a rank without a limit."""
    plane_bytes: float = 0.0
    rules: Rules = field(default_factory=Rules)
    speeds: Floats | None = None
    moves: int = 0

    def decide(self, look: BalanceSample) -> Ends | None:
        """Return new ends; None to keep the present ones."""
        self._learn(look)
        now = float((look.tree_seconds + look.mesh_seconds).max())
        ends, then = self.best(look.leaves, look.mesh_seconds, look.planes)
        moved = _moved_bytes(look.leaves, look.ends, ends)
        gain = (now - then) * self.rules.horizon
        if (
            ends == look.ends
            or then > now * (1 - self.rules.hysteresis)
            or gain <= moved / self.rules.bandwidth
        ):
            return None
        self.moves += 1
        return ends

    def slabs(self, look: BalanceSample) -> tuple[int, ...]:
        """Return the first planes of better slabs.

        A rank without planes gets none, because its speed is not known.
        """
        counts = np.diff(look.planes)
        holds = (counts > 0) & (look.mesh_seconds > 0)
        if holds.sum() < 2:
            return look.planes
        speeds = counts[holds] / look.mesh_seconds[holds]
        room = np.array(self.capacity) - run_totals(look.leaves.bytes, look.ends)
        ones = np.ones(look.planes[-1])
        try:
            cut = cut_chain(ones, speeds, memory=ones * self.plane_bytes, capacity=room[holds])
        except InfeasibleError:
            return look.planes
        if cut.seconds > look.mesh_seconds.max() * (1 - self.rules.hysteresis):
            return look.planes
        sizes = np.zeros(len(counts), np.int64)
        sizes[holds] = np.diff((0, *cut.ends))
        return (0, *np.cumsum(sizes).tolist())

    def best(
        self, leaves: Leaves, mesh_seconds: Floats, planes: tuple[int, ...] = ()
    ) -> tuple[Ends, float]:
        """Return the best ends and the seconds of the slowest rank (2)."""
        assert self.speeds is not None
        speeds, slowest = self.speeds, math.inf
        capacity = np.array(self.capacity) - (np.diff(planes) * self.plane_bytes if planes else 0.0)
        for _ in range(_ROUNDS):
            share = 1 - mesh_seconds / slowest if slowest < math.inf else np.ones(len(speeds))
            cut = cut_chain(
                leaves.work,
                speeds * np.maximum(share, 1e-3),
                memory=leaves.bytes,
                capacity=capacity,
            )
            ends = cut.ends
            slowest = float((run_totals(leaves.work, ends) / speeds + mesh_seconds).max())
        return ends, slowest

    def _learn(self, look: BalanceSample) -> None:
        """Update the speeds (1); a rank without work keeps its speed, or gets the slowest known
        one."""
        work = run_totals(look.leaves.work, look.ends)
        busy = (work > 0) & (look.tree_seconds > 0)
        measured = np.where(busy, work / np.where(busy, look.tree_seconds, 1.0), np.nan)
        if self.speeds is None:
            self.speeds = np.where(busy, measured, np.nanmin(measured))
            return
        r = self.rules.relaxation
        self.speeds = np.where(
            busy, self.speeds ** (1 - r) * np.where(busy, measured, 1.0) ** r, self.speeds
        )


def takes_part(ends: Ends) -> NDArray[np.bool_]:
    """Return which ranks hold a part of the curve.

    A plan left the others out for a reason, and their speed is not measured.
    """
    return np.diff((0, *ends)) > 0


def run_totals(values: Floats, ends: Ends) -> Floats:
    """Return the sum of the values of each rank's leaves."""
    prefix = np.concatenate(([0.0], np.cumsum(values)))
    return np.diff(prefix[np.array((0, *ends))])


def _moved_bytes(leaves: Leaves, before: Ends, after: Ends) -> float:
    """Return the bytes that change rank between two cuts."""
    prefix = np.concatenate(([0.0], np.cumsum(leaves.sent)))
    stays = 0.0
    for i in range(len(before)):
        begin = max((0, *before)[i], (0, *after)[i])
        end = min(before[i], after[i])
        stays += max(prefix[end] - prefix[begin], 0.0) if end > begin else 0.0
    return float(prefix[-1] - stays)
