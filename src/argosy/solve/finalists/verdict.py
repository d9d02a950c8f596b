"""Turn the best candidates into a plan: placed on devices, simulated by the exact engine, with its
certificate and its reasons."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from argosy.cluster.device import Device
from argosy.cluster.topology import Cluster
from argosy.cost.memory import USABLE
from argosy.plan.offload import NO_OFFLOAD, Offload
from argosy.plan.plan import Certificate, LeftOut, Plan, Predicted, RunnerUp
from argosy.sim.prediction import Played, play_once, prediction
from argosy.sim.simulate import SMALL_PLAN, iteration_seconds
from argosy.sim.tasks.known import Known
from argosy.solve.finalists.candidate import Candidate, lightened
from argosy.solve.finalists.devices import on_devices
from argosy.solve.finalists.judge import Key
from argosy.solve.finalists.reasons import why_left_out, why_slower
from argosy.space.enumerate import Scope
from argosy.space.offloaded import least_on_devices
from argosy.space.price import Prices
from argosy.units import SIZE
from argosy.workload.chain import Chain

# If folding loses something, a plan with at most this product of devices and micro-batches is
# played whole also to rank it.
_TINY = 128
# Times that differ by less than this share count as equal.
_SAME = 1e-9
# A plan names at most this many runner-ups.
_MOST_RUNNER_UPS = 3
_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A decision that names the winning candidate, on devices, and the others."""

    winner: Candidate
    plan: Plan
    """The plan with its time; ``certify`` adds the rest of the prediction."""
    runner_ups: tuple[RunnerUp, ...]

    @property
    def seconds(self) -> float:
        assert self.plan.predicted is not None
        return self.plan.predicted.iteration_seconds


class ExactTrial:
    """An exact judge that simulates every plan at most once, with the exact engine."""

    def __init__(
        self,
        prices: Prices,
        cluster: Cluster,
        calm: Cluster,
        scope: Scope,
        executor: Executor | None = None,
        judged: Mapping[Key, float] | None = None,
    ) -> None:
        """Prepare a trial; ``judged`` has times of plans that ``Judge.played`` simulates folded."""
        self.prices = prices
        self.cluster = cluster
        self.calm = calm
        self.scope = scope
        self.executor = executor
        """Simulates in parallel, with the same result."""
        self.judged = {} if judged is None else judged
        self.plans: dict[Key, Plan] = {}
        self.known = Known()
        """What placed plans have in common."""
        self.times: dict[Key, float] = {}
        """Seconds of plans folded along their symmetries."""
        self.whole_times: dict[Key, float] = {}
        """Seconds of small plans as a whole."""
        self.iterations: dict[Key, Played] = {}
        """Their recorded iterations."""

    def decide(self, candidates: Sequence[Candidate]) -> Verdict:
        """Return the candidate that is fastest on ``calm``, and the results of the others.

        The first candidate is also tried with the least recomputation and ZeRO of the scope that
        fit.
        """
        entries = [*candidates]
        lighter = lightened(candidates[0], self.scope)
        if lighter != candidates[0].plan:
            entries.append(replace(candidates[0], plan=lighter, is_played=False))
        times = self._deciding_seconds(entries)
        order = sorted(
            range(len(entries)), key=lambda at: (float(f"{times[at]:.9g}"), entries[at].effort, at)
        )
        first, best = order[0], self._placed(entries[order[0]])
        predicted = Predicted(
            iteration_seconds=times[first],
            samples_per_second=best.global_batch / times[first],
            peak_memory_bytes=(),
            bottleneck="",
        )
        played = [(entries[index], times[index]) for index in order]
        return Verdict(
            winner=replace(entries[first], seconds=times[first], is_played=True),
            plan=replace(best, predicted=predicted),
            runner_ups=tuple(_runner_ups(played)),
        )

    def seconds(self, candidates: Sequence[Candidate]) -> list[float]:
        """Return the seconds of an iteration of each candidate, folded along its symmetries: a
        tenth of the work of simulating it whole. Tiny plans that lose something by folding are
        simulated whole."""
        fresh = {
            candidate.key: candidate for candidate in candidates if candidate.key not in self.times
        }
        play = self._play(self._seconds_of)
        for whole in (False, True):
            chosen = {
                key: candidate for key, candidate in fresh.items() if _is_tiny(candidate) is whole
            }
            if not whole:
                self.times |= {key: self.judged[key] for key in chosen if key in self.judged}
                chosen = {
                    key: candidate for key, candidate in chosen.items() if key not in self.judged
                }
            self.times.update(
                zip(chosen, self._map(partial(play, whole=whole), chosen.values()), strict=True)
            )
        return [self.times[candidate.key] for candidate in candidates]

    def _deciding_seconds(self, candidates: Sequence[Candidate]) -> list[float]:
        """Return folded times, and ``exact_seconds`` of all candidates that may be the fastest by
        them."""
        times, best = self.seconds(candidates), math.inf
        for index in sorted(range(len(candidates)), key=times.__getitem__):
            candidate = candidates[index]
            if times[index] < best * (candidate.folding_loss - _SAME):
                (times[index],) = self.exact_seconds([candidate])
                best = min(best, times[index])
        return times

    def exact_seconds(
        self, candidates: Sequence[Candidate], *, is_recorded: bool = True
    ) -> list[float]:
        """Return the seconds of an iteration of each candidate; small plans are simulated as a
        whole.

        Their iterations are recorded for ``played`` unless most of them lose, as in a proof:
        recording takes a third of the time.
        """
        small = {
            candidate.key: candidate
            for candidate in candidates
            if candidate.num_steps <= SMALL_PLAN and candidate.key not in self.whole_times
        }
        if is_recorded:
            self._record(small)
        else:
            times = self._map(partial(self._play(self._seconds_of), whole=True), small.values())
            self.whole_times.update(zip(small, times, strict=True))
        large = [candidate for candidate in candidates if candidate.num_steps > SMALL_PLAN]
        folded = iter(self.seconds(large))
        return [
            self.whole_times[candidate.key] if candidate.num_steps <= SMALL_PLAN else next(folded)
            for candidate in candidates
        ]

    def _record(self, small: Mapping[Key, Candidate]) -> None:
        """Simulate small plans as a whole, and keep their iterations."""
        played = self._map(partial(self._play(play_once), whole=True), small.values())
        self.iterations.update(zip(small, played, strict=True))
        self.whole_times.update({key: self.iterations[key].seconds for key in small})

    @property
    def _seconds_of(self) -> Callable[..., float]:
        """Return the function that simulates an iteration; other processes share no results."""
        return partial(iteration_seconds, known=self.known if self.executor is None else None)

    def _play(self, play: Callable[..., _Result]) -> Callable[..., _Result]:
        return partial(play, chain=self.prices.chain, cluster=self.calm, model=self.prices.model)

    def played(self, candidate: Candidate) -> Played:
        """Return the iteration whose time is ``exact_seconds``; the bottleneck of a large plan is
        its slowest stage."""
        (seconds,) = self.exact_seconds([candidate])
        if candidate.num_steps <= SMALL_PLAN:
            if candidate.key not in self.iterations:
                self._record({candidate.key: candidate})
            return self.iterations[candidate.key]
        stages = [sum(choice.option.seconds(choice.first, choice.end)) for choice in candidate.plan]
        return Played(seconds=seconds, bottleneck=stages.index(max(stages)))

    def _map(
        self, play: Callable[[Plan], _Result], candidates: Iterable[Candidate]
    ) -> Iterable[_Result]:
        plans = [self._placed(candidate) for candidate in candidates]
        return self.executor.map(play, plans) if self.executor is not None else map(play, plans)

    def _placed(self, candidate: Candidate) -> Plan:
        if candidate.key not in self.plans:
            self.plans[candidate.key] = placed(candidate, self.prices, self.cluster, self.known)
        return self.plans[candidate.key]


def _is_tiny(candidate: Candidate) -> bool:
    return candidate.num_steps <= _TINY and candidate.folding_loss > 1


def _runner_ups(played: Sequence[tuple[Candidate, float]]) -> Iterator[RunnerUp]:
    """Yield the first few candidates that look different from the winner and from each other, with
    why they lost."""
    winner, best = played[0]
    described = {repr(winner)}
    for loser, time in played[1:]:
        description = repr(loser)
        if description in described or time == math.inf:
            continue
        described.add(description)
        yield RunnerUp(
            description=description,
            iteration_seconds=time,
            reason=why_slower(loser, time, winner, best),
        )
        if len(described) > _MOST_RUNNER_UPS:
            return


def certify(
    verdict: Verdict,
    others: Sequence[Candidate],
    bounds: tuple[float, float],
    trial: ExactTrial,
    scope: Scope,
) -> Plan:
    """Return the plan with its certificate, its prediction, its runner-ups, and the reasons for
    unused devices; ``bounds`` are those within the scope and without one."""
    prices, played = trial.prices, trial.played(verdict.winner)
    plan = verdict.plan
    assert plan.predicted is not None
    bound, free = (min(limit, plan.predicted.iteration_seconds) for limit in bounds)
    return replace(
        plan,
        predicted=prediction(plan, played, prices.chain),
        certificate=Certificate(
            lower_bound_seconds=bound,
            gap=plan.predicted.iteration_seconds / bound - 1,
            granularity=max(scope.units),
            scope=scope.describe(prices.pools) + _summed(prices.chain),
            free_bound_seconds=min(free, bound),
        ),
        runner_ups=verdict.runner_ups,
        left_out=tuple(_left_out(verdict, others, prices, scope, trial.cluster)),
    )


def _summed(chain: Chain) -> str:
    """Return the algorithm that a certificate is about, if gradients are compressed."""
    return f", gradients summed by PowerSGD of rank {chain.powersgd}" if chain.powersgd else ""


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
    return (
        f"{device.kind.name} has no {plan.model.dtype}"
        if device.speed.at(0) > 0
        else "it is lost at time 0"
    )


def placed(
    candidate: Candidate, prices: Prices, cluster: Cluster, known: Known | None = None
) -> Plan:
    """Return the candidate on devices, with algorithms for its collectives (``known`` as in
    ``with_collectives``)."""
    return on_devices(candidate.shape, candidate.schedule, candidate.plan, prices, cluster, known)


def why_infeasible(prices: Prices, cluster: Cluster, offload: Offload = NO_OFFLOAD) -> str:
    """Return whether the devices are too small in all, or one by one; ``explain.infeasible`` gives
    more detail."""
    chain = prices.chain
    needed = least_on_devices(prices, offload)
    room = sum(pool.count * USABLE * pool.device.kind.memory for pool in prices.pools)
    need, have = SIZE.short(needed), SIZE.short(room)
    demand = "weights, gradients and optimizer state need"
    if offload:
        left = f"offload of {offload} leaves on the devices"
        demand = f"the weights, gradients and optimizer state that {left} need"
    state = f"{demand} {need}, the devices have {have} to use"
    start = f"no plan of {named(chain)} fits on {cluster!r}: {state}"
    return (
        start
        if needed > room
        else f"{start}, and activations or a single layer do not fit beside them"
    )


def named(chain: Chain) -> str:
    """Return a description such as ``gpt2 (0.124 B parameters, fp16, adamw)``."""
    tuned = "" if chain.tuning.is_full else f", {chain.tuning}"
    number = (
        chain.counted_parameters
        if chain.frozen_parameters
        else f"{chain.parameters / 1e9:.3g} B parameters"
    )
    return f"{chain.name} ({number}, {chain.dtype}, {chain.optimizer}{tuned})"
