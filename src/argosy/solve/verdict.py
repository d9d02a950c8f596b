"""From the best candidates to a plan: placed on devices, played by the exact engine, with its certificate and its
reasons."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial

from argosy.cluster.device import Device
from argosy.cluster.topology import Cluster
from argosy.cost.memory import USABLE
from argosy.plan.plan import Certificate, LeftOut, Plan, Predicted, RunnerUp
from argosy.sim.simulate import iteration_seconds
from argosy.solve.candidate import Candidate, lightened
from argosy.solve.devices import on_devices
from argosy.solve.reasons import why_left_out, why_slower
from argosy.space.enumerate import Scope
from argosy.space.price import Prices
from argosy.units import SIZE
from argosy.workload.chain import Chain

_SMALL = 512
"""Devices times micro-batches of a plan that is played whole."""
_MOST_RUNNER_UPS = 3


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The candidate that won, on devices, and those that did not."""

    winner: Candidate
    plan: Plan
    runner_ups: tuple[RunnerUp, ...]


class Trial:
    """The exact engine as the last judge; it plays nothing twice."""

    def __init__(
        self, prices: Prices, cluster: Cluster, calm: Cluster, scope: Scope, executor: Executor | None = None
    ) -> None:
        self.prices = prices
        self.cluster = cluster
        self.calm = calm
        self.scope = scope
        self.executor = executor
        """Plays side by side, to the same result."""
        self.plans: dict[object, Plan] = {}
        self.times: dict[tuple[object, bool], float] = {}
        """Of plans folded or whole."""

    def decide(self, candidates: Sequence[Candidate]) -> Verdict:
        """The candidate that is fastest on ``calm``, and how the others fared. The first is also tried with the least
        recomputation and ZeRO of the scope that fit."""
        entries = [*candidates]
        lighter = lightened(candidates[0], self.scope)
        if lighter != candidates[0].plan:
            entries.append(replace(candidates[0], plan=lighter))
        times = self._play(entries)
        order = sorted(range(len(entries)), key=lambda index: (times[index], entries[index].effort, index))
        first, best = order[0], self._placed(entries[order[0]])
        seconds = times[first]
        if len(best.devices) * best.num_micro_batches <= _SMALL:
            (seconds,) = self._play([entries[first]], whole=True)
        predicted = Predicted(
            iteration_seconds=seconds,
            samples_per_second=best.global_batch / seconds,
            peak_memory_bytes=(),
            bottleneck="",
        )
        played = [(entries[index], times[index]) for index in order]
        return Verdict(
            winner=entries[first],
            plan=replace(best, predicted=predicted),
            runner_ups=tuple(_runner_ups(played, seconds)),
        )

    def _play(self, entries: Sequence[Candidate], *, whole: bool = False) -> list[float]:
        fresh = {one.key: one for one in entries if (one.key, whole) not in self.times}
        chain, model = self.prices.chain, self.prices.model
        play = partial(iteration_seconds, chain=chain, cluster=self.calm, model=model, whole=whole)
        plans = [self._placed(one) for one in fresh.values()]
        times = self.executor.map(play, plans) if self.executor is not None else map(play, plans)
        self.times.update(((key, whole), seconds) for key, seconds in zip(fresh, times, strict=True))
        return [self.times[one.key, whole] for one in entries]

    def _placed(self, candidate: Candidate) -> Plan:
        if candidate.key not in self.plans:
            self.plans[candidate.key] = placed(candidate, self.prices, self.cluster)
        return self.plans[candidate.key]


def _runner_ups(played: Sequence[tuple[Candidate, float]], seconds: float) -> Iterator[RunnerUp]:
    """The first few that look different from the winner and from each other, with why they lost."""
    winner, best = played[0]
    told = {repr(winner)}
    for loser, time in played[1:]:
        description = repr(loser)
        if description in told or time == math.inf:
            continue
        told.add(description)
        yield RunnerUp(
            description=description,
            iteration_seconds=max(seconds, time * seconds / best),
            reason=why_slower(loser, time, winner, best),
        )
        if len(told) > _MOST_RUNNER_UPS:
            return


def certify(
    verdict: Verdict,
    others: Sequence[Candidate],
    bounds: tuple[float, float],
    prices: Prices,
    scope: Scope,
    cluster: Cluster,
) -> Plan:
    """The plan with its certificate, its runner-ups, and why it leaves devices out; ``bounds`` hold for the scope, and
    without one."""
    plan = verdict.plan
    assert plan.predicted is not None
    bound, free = (min(one, plan.predicted.iteration_seconds) for one in bounds)
    return replace(
        plan,
        certificate=Certificate(
            lower_bound_seconds=bound,
            gap=plan.predicted.iteration_seconds / bound - 1,
            granularity=max(scope.units),
            scope=scope.describe(prices.pools),
            free_bound_seconds=min(free, bound),
        ),
        runner_ups=verdict.runner_ups,
        left_out=tuple(_left_out(verdict, others, prices, scope, cluster)),
    )


def _left_out(
    verdict: Verdict, others: Sequence[Candidate], prices: Prices, scope: Scope, cluster: Cluster
) -> Iterator[LeftOut]:
    used = set(verdict.plan.devices)
    pool_of = {name: pool for pool in prices.pools for node in pool.nodes for name in node}
    reasons: dict[int, str] = {}
    for device in cluster.devices:
        if device.name in used:
            continue
        pool = pool_of.get(device.name)
        if pool is None:
            yield LeftOut(device=device.name, reason=_why_unable(verdict.plan, device))
            continue
        if pool.index not in reasons:
            reasons[pool.index] = why_left_out(pool, prices, scope, verdict.winner, others)
        yield LeftOut(device=device.name, reason=reasons[pool.index])


def _why_unable(plan: Plan, device: Device) -> str:
    return f"{device.kind.name} has no {plan.model.dtype}" if device.speed.at(0) > 0 else "it is lost at time 0"


def placed(candidate: Candidate, prices: Prices, cluster: Cluster) -> Plan:
    """The candidate on devices, with algorithms for its collectives."""
    return on_devices(candidate.shape, candidate.schedule, candidate.plan, prices, cluster)


def why_infeasible(prices: Prices, cluster: Cluster) -> str:
    """Whether the devices are too small in all, or one by one; ``explain.infeasible`` says more."""
    chain = prices.chain
    needed = chain.parameters * sum(prices.state_bytes)
    room = sum(pool.count * USABLE * pool.device.kind.memory for pool in prices.pools)
    need, have = SIZE.format(needed, digits=3), SIZE.format(room, digits=3)
    state = f"weights, gradients and optimizer state need {need}, the devices have {have} to use"
    start = f"no plan of {named(chain)} fits on {cluster!r}: {state}"
    return start if needed > room else f"{start}, and activations or a single layer do not fit beside them"


def named(chain: Chain) -> str:
    """``gpt2 (0.124 B parameters, fp16, adamw)``."""
    return f"{chain.name} ({chain.parameters / 1e9:.3g} B parameters, {chain.dtype}, {chain.optimizer})"
