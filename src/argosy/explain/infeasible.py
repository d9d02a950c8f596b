"""Explain why no plan fits: the plan that comes closest, its limits, and changes that would help.

(1)  over(plan)   = max over devices of (bytes it needs / bytes it may use)
(2)  closest plan = the one of least over(plan), to 1 %: the first that fits when all memories grow
     together
(3)  if measured times are missing, a plan that fits and lacks them (``solve.unmeasured``)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.cost.memory import USABLE
from argosy.explain.lighter import Reload, lighter_changes, offload_changes
from argosy.explain.remedy import Change, RemedyTrial, hardware_changes
from argosy.plan.plan import Plan
from argosy.planner import Settings
from argosy.schedule.generate import group_size, usual_depth
from argosy.solve.feasible import FittingPlan
from argosy.solve.finalists.candidate import Candidate
from argosy.solve.finalists.verdict import placed, why_infeasible
from argosy.solve.search.pipeline import Choice
from argosy.solve.unmeasured import why_untimed
from argosy.space.price import Prices
from argosy.units import SIZE
from argosy.workload.chain import Chain


@dataclass(frozen=True, kw_only=True)
class Need:
    """The bytes that each device of a part of a stage needs."""

    stage: int
    kind: str
    devices: int
    state: float
    activations: float
    buffers: float
    room: float
    """The bytes of a device's memory that a plan may use."""

    @property
    def total(self) -> float:
        """Return the bytes needed in total."""
        return self.state + self.activations + self.buffers

    @property
    def over(self) -> float:
        """Return the bytes needed over the bytes that may be used (1)."""
        return self.total / self.room


@dataclass(frozen=True, kw_only=True)
class Infeasibility:
    """The reasons why no plan fits, and the changes that would help."""

    reason: str
    plan: Plan | None
    """The closest plan (2), or a plan that lacks measured times (3); None if neither exists."""
    needs: tuple[Need, ...]
    changes: tuple[Change, ...]


def diagnose(
    chain: Chain,
    cluster: Cluster,
    *,
    global_batch: int,
    settings: Settings | None = None,
    model: ComputeModel | None = None,
    reload: Reload | None = None,
) -> Infeasibility:
    """Explain an input for which ``find_plan`` finds no plan."""
    trial = RemedyTrial(
        chain, cluster, global_batch, settings or Settings(), model or ComputeModel()
    )
    changes = tuple(nearest_changes(trial, reload))
    if not trial.pools:
        kinds = ", ".join(sorted({device.kind.name for device in cluster.devices}))
        return Infeasibility(
            reason=f"none of {kinds} has {chain.dtype}", plan=None, needs=(), changes=changes
        )
    if (untimed := trial.untimed) is not None:
        return Infeasibility(
            reason=why_untimed(untimed, trial.prices, cluster),
            plan=_placed(untimed.fit, untimed.prices, cluster),
            needs=tuple(_needs(untimed.fit, 1.0)),
            changes=changes,
        )
    plan, needs = _closest(trial)
    reason = why_infeasible(trial.prices, cluster, trial.settings.offload)
    if needs:
        reason = f"{reason}; {_binding(max(needs, key=lambda need: need.over))}"
    return Infeasibility(reason=reason, plan=plan, needs=needs, changes=changes)


def nearest_changes(trial: RemedyTrial, reload: Reload | None) -> Iterator[Change]:
    """Yield the smallest change of each kind with which a plan fits.

    Changes that need only an option come first.
    """
    yield from offload_changes(trial)
    if reload is not None:
        yield from lighter_changes(trial, reload)
    yield from hardware_changes(trial)


def _closest(trial: RemedyTrial) -> tuple[Plan | None, tuple[Need, ...]]:
    """Return the closest plan and the memory that its stages need (2)."""
    low, high = -1.0, 0.0
    fit = None
    while fit is None and high < 12:
        low, high = high, high + 1
        fit = replace(trial, factor=2.0**high).fit()
    if fit is None:
        return None, ()
    while high - low > 0.01:
        middle = (low + high) / 2
        smaller_fit = replace(trial, factor=2.0**middle).fit()
        low, high, fit = (middle, high, fit) if smaller_fit is None else (low, middle, smaller_fit)
    return _placed(fit, trial.prices, trial.cluster), tuple(_needs(fit, 2.0**high))


def _placed(fit: FittingPlan, prices: Prices, cluster: Cluster) -> Plan:
    """Return a fitting plan with its devices."""
    candidate = Candidate(
        seconds=0.0, number=0, shape=fit.shape, schedule=fit.schedule, plan=fit.plan, units=()
    )
    return placed(candidate, prices, cluster)


def _needs(fit: FittingPlan, factor: float) -> Iterator[Need]:
    """Yield the memory of each part of each stage; ``factor`` is the growth of the devices'
    memory."""
    for index, choice in enumerate(fit.plan):
        depth = usual_depth(fit.schedule, len(fit.plan) - index, fit.shape.num_micro_batches)
        group = group_size(fit.schedule, fit.shape.num_micro_batches)
        yield from _stage_needs(index, choice, depth, group, factor)


def _stage_needs(
    index: int, choice: Choice, depth: int, group: int, factor: float
) -> Iterator[Need]:
    """Yield the memory of each part of one stage."""
    option, first, end = choice.option, choice.first, choice.end
    prices = option.prices
    kept = float(option.kept_ranges[first, end])
    passing = float(option.transient[first, end])
    arriving = (2 * group + 1) * prices.largest_output + prices.exchange_buffers(
        option.context, option.expert
    )
    for part, pool in zip(option.parts, option.pools, strict=True):
        yield Need(
            stage=index,
            kind=pool.name,
            devices=part.devices,
            state=option.state_range(first, end) / part.width,
            activations=part.most * depth * kept / part.width,
            buffers=(part.most * (passing + arriving) + option.whole_bytes(first, end))
            / part.width,
            room=USABLE * pool.device.kind.memory / factor,
        )


def _binding(need: Need) -> str:
    """State how far the closest plan exceeds the memory of its fullest devices."""
    parts = {
        "weights, gradients and optimizer state": need.state,
        "activations": need.activations,
        "buffers": need.buffers,
    }
    most = max(parts, key=lambda name: parts[name])
    sizes = [SIZE.short(size) for size in (need.total, need.room, parts[most])]
    return (
        f"closest comes a plan whose stage {need.stage} needs {sizes[0]} on each {need.kind} "
        f"({sizes[2]} of that for {most}) and may use {sizes[1]}"
    )
