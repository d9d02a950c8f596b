"""Choose where to cut the curve from measured work and speed, only if it pays, without oscillation.

Leaves along the curve are the items of ``solve.search.chain``. Work is counted in units that do not
depend on the ranks, such as pairs. A rank d that computed work W_d in t_d seconds has

    (1)  speed s_d = W_d / t_d, averaged:  s_d <- s_d^(1 - 1/n) (W_d / t_d)^(1/n)
    (2)  cut: least T with W_d(cut) / s_d + m_d <= T for all d, within every rank's memory,

where m_d are its seconds of mesh with the planes of the next step, by its average speed on the
mesh. n counts measurements since the speed last changed, up to a memory. Two measurements in a row
that differ from the average by more than a factor in the same direction are a change, and begin a
new average; a single one is noise, and is left out. The first force of a process also loads and
compiles, so it only counts until the second.

``cut_chain`` has no m_d; replacing s_d by s_d (1 - m_d / T) and repeating with the T found gives
(2) in a few rounds. A new cut is used if it is better by more than the
hysteresis, and if its gain over a horizon exceeds the cost of moving the particles, both by (2):

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
    """The work per leaf, in any unit."""
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

    memory: int = 8
    """The largest number of measurements that an average of (1) covers in effect."""
    change: float = 1.5
    """The factor by which measurements have to differ from the average to begin a new one."""
    hysteresis: float = 0.03
    """The smallest share of a step that a move must gain."""
    horizon: int = 10
    """The number of steps for which a gain counts."""
    bandwidth: float = 1e9
    """Bytes/s at which particles move between ranks."""


@dataclass
class _Speeds:
    """An average of each rank's speed that follows (1)."""

    rules: Rules
    average: Floats | None = None
    seen: Floats = field(default_factory=lambda: np.zeros(0))
    """The measurements that an average covers; less than 1 until the second one."""
    astray: Floats = field(default_factory=lambda: np.zeros(0))
    """The direction in which the last measurement differed from the average; 0 if it did not."""

    def after(self, work: Floats, seconds: Floats) -> Floats:
        """Return the averages after a measurement.

        A rank without work keeps its speed, or gets the slowest known one.
        """
        busy = (work > 0) & (seconds > 0)
        measured = np.where(busy, work / np.where(busy, seconds, 1.0), np.nan)
        if self.average is None:
            self.average = np.where(busy, measured, np.nanmin(measured))
        if not len(self.seen):
            self.seen, self.astray = np.full(len(work), -1.0), np.zeros(len(work))
        ratio = np.where(busy, measured / self.average, 1.0)
        far = np.abs(np.log(ratio)) > math.log(self.rules.change)
        direction = np.where(far, np.sign(np.log(ratio)), 0.0)
        fresh = self.seen < 1
        changed = far & ~fresh & (direction == self.astray)
        used = busy & (~far | fresh | changed)
        count = np.where(changed | fresh, 1.0, np.minimum(self.seen + 1, self.rules.memory))
        self.average = np.where(used, self.average * ratio ** (1 / count), self.average)
        self.seen = np.where(used, np.where(fresh, self.seen + 1, count), self.seen)
        self.astray = np.where(busy & ~fresh & ~changed, direction, 0.0)
        return self.average


@dataclass(kw_only=True)
class Balancer:
    """A controller that keeps speeds between decisions; equal input gives equal decisions on every
    rank."""

    capacity: tuple[float, ...]
    """Bytes per rank, for particles and planes; ``math.inf`` for a rank without a limit."""
    plane_bytes: float = 0.0
    rules: Rules = field(default_factory=Rules)
    speeds: Floats | None = None
    """Work of tree and pairs per second of each rank, if it is known before it is measured."""
    moves: int = 0
    _tree: _Speeds = field(init=False)
    _mesh: _Speeds = field(init=False)

    def __post_init__(self) -> None:
        self._tree, self._mesh = _Speeds(self.rules, self.speeds), _Speeds(self.rules)

    def decide(self, look: BalanceSample, planes: tuple[int, ...] = ()) -> Ends | None:
        """Return new ends; None to keep the present ones.

        ``planes`` are those that the next step has; by default they stay.
        """
        work = run_totals(look.leaves.work, look.ends)
        self.speeds = self._tree.after(work, look.tree_seconds)
        fixed = self._mesh_then(look, planes)
        now = float((work / self.speeds + fixed).max())
        ends, then = self.best(look.leaves, fixed, planes or look.planes)
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
        speeds = self._mesh.after(counts.astype(np.float64), look.mesh_seconds)[holds]
        room = np.array(self.capacity) - run_totals(look.leaves.bytes, look.ends)
        ones = np.ones(look.planes[-1])
        try:
            cut = cut_chain(ones, speeds, memory=ones * self.plane_bytes, capacity=room[holds])
        except InfeasibleError:
            return look.planes
        if cut.seconds > (counts[holds] / speeds).max() * (1 - self.rules.hysteresis):
            return look.planes
        sizes = np.zeros(len(counts), np.int64)
        sizes[holds] = np.diff((0, *cut.ends))
        return (0, *np.cumsum(sizes).tolist())

    def best(
        self, leaves: Leaves, fixed: Floats, planes: tuple[int, ...] = ()
    ) -> tuple[Ends, float]:
        """Return the best ends and the seconds of the slowest rank (2).

        ``fixed`` are each rank's seconds besides its leaves.
        """
        assert self.speeds is not None
        speeds, slowest = self.speeds, math.inf
        capacity = np.array(self.capacity) - (np.diff(planes) * self.plane_bytes if planes else 0.0)
        for _ in range(_ROUNDS):
            share = 1 - fixed / slowest if slowest < math.inf else np.ones(len(speeds))
            cut = cut_chain(
                leaves.work,
                speeds * np.maximum(share, 1e-3),
                memory=leaves.bytes,
                capacity=capacity,
            )
            ends = cut.ends
            slowest = float((run_totals(leaves.work, ends) / speeds + fixed).max())
        return ends, slowest

    def _mesh_then(self, look: BalanceSample, planes: tuple[int, ...]) -> Floats:
        """Return every rank's seconds of mesh with the planes of the next step."""
        if not planes or self._mesh.average is None:
            return look.mesh_seconds
        return np.where(look.mesh_seconds > 0, np.diff(planes) / self._mesh.average, 0.0)


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
