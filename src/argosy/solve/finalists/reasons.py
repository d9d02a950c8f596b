"""Explain why a plan lost, and why a device was omitted, from the numbers of the search.

The time of an iteration is divided into

    (1)  pace     = M times the forward + backward of the slowest stage
    (2)  ending   = the longest gradient exchange and update
    (3)  filling  = filling and draining: at most one micro-batch through all other stages and back
    (4)  waiting  = the rest: transfers between stages that nothing overlaps

and the part in which the loser differs most is its reason. ``explain`` uses the simulator and gives
more detail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from argosy.cost.memory import USABLE
from argosy.plan.plan import Recompute
from argosy.solve.finalists.candidate import Candidate, describe_choice
from argosy.space.enumerate import Scope
from argosy.space.pool import Pool
from argosy.space.price import Prices
from argosy.units import SIZE, TIME

# Times that differ by no more than this share count as equal.
_EQUAL = 1e-6


@dataclass(frozen=True, kw_only=True)
class _Parts:
    slowest: int
    """Index of the slowest stage."""
    per_micro_batch: float
    """Seconds of that stage per micro-batch."""
    pace: float
    ending: float
    filling: float
    waiting: float


def _parts(candidate: Candidate, seconds: float) -> _Parts:
    """Return the parts (1) to (4) of an iteration of a candidate that takes ``seconds``."""
    times = [sum(choice.option.seconds(choice.first, choice.end)) for choice in candidate.plan]
    slowest = times.index(max(times))
    pace = candidate.shape.num_micro_batches * times[slowest]
    tails = [choice.option.tail(choice.first, choice.end) for choice in candidate.plan]
    ending = max(0.0, *tails)  # below 0 under ZeRO 3, whose tail corrects the pace
    rest = max(0.0, seconds - pace - ending)
    filling = min(rest, sum(times) - times[slowest])
    return _Parts(
        slowest=slowest,
        per_micro_batch=times[slowest],
        pace=pace,
        ending=ending,
        filling=filling,
        waiting=rest - filling,
    )


def why_slower(loser: Candidate, seconds: float, winner: Candidate, best: float) -> str:
    """Return by how much a plan is slower, and the part in which it loses most."""
    if seconds / best - 1 <= _EQUAL:
        return (
            "as fast, with more ZeRO or recomputation"
            if loser.effort > winner.effort
            else "as fast"
        )
    lost, best_parts = _parts(loser, seconds), _parts(winner, best)
    gaps = {
        name: getattr(lost, name) - getattr(best_parts, name)
        for name in ("pace", "ending", "filling", "waiting")
    }
    worst = max(gaps, key=lambda name: gaps[name])
    slower = f"{100 * (seconds / best - 1):.3g} % slower"
    if gaps[worst] < _EQUAL * best / len(gaps):  # if parts overlap in time, none need be longer
        return slower
    match worst:
        case "pace":
            samples = loser.shape.micro_batch_size / winner.shape.micro_batch_size
            where = f"stage {lost.slowest} ({describe_choice(loser.plan[lost.slowest])})"
            times = _against(lost.per_micro_batch, best_parts.per_micro_batch * samples)
            reason = f"its slowest, {where}, takes {times} for as many samples"
        case "ending":
            reason = f"gradient exchange and update take {_against(lost.ending, best_parts.ending)}"
        case "filling":
            times = _against(lost.filling, best_parts.filling)
            reason = f"filling and draining its pipeline takes {times}"
        case _:
            reason = f"waiting for hand-overs takes {_against(lost.waiting, best_parts.waiting)}"
    return f"{slower}: {reason}"


def _against(slower: float, faster: float) -> str:
    """Format two times so that they can be told apart.

    >>> _against(0.0312, 0.029), _against(0.12004, 0.12)
    ('31.2 ms against 29 ms', '120.04 ms against 120 ms')
    """
    return " against ".join(TIME.apart(slower, faster, digits=3))


def why_left_out(
    pool: Pool, prices: Prices, scope: Scope, winner: Candidate, others: Sequence[Candidate]
) -> str:
    """Return why a plan uses fewer devices of a pool than there are."""
    if not _holds_a_layer(pool, prices):
        room = SIZE.short(USABLE * pool.device.kind.memory)
        return f"no layer fits into the {room} that a plan may use of each {pool.name}"
    used = _taken(winner, pool)
    unit = scope.units[pool.index]
    if pool.count - used < unit:
        return f"stages were made of multiples of {unit}x {pool.name} only"
    pace = _relative_pace(pool, prices, winner)
    richer = [candidate for candidate in others if _taken(candidate, pool) > used]
    if not richer:
        return f"no plan with it was among the {len(others)} best{pace}"
    gap = min(richer).seconds / winner.seconds - 1
    if gap <= _EQUAL:
        return f"plans with it are no faster{pace}"
    return f"the best plan with more of them was judged {100 * gap:.3g} % slower{pace}"


def _taken(candidate: Candidate, pool: Pool) -> int:
    return sum(
        part.devices
        for choice in candidate.plan
        for part in choice.option.parts
        if part.pool == pool.index
    )


def _holds_a_layer(pool: Pool, prices: Prices) -> bool:
    """Return whether the lightest layer fits alone, with one sample, all state on one device."""
    per_weight = sum(prices.state_bytes)
    needs = [
        per_weight * layer.parameters
        + (0.0 if layer.frozen is None else layer.frozen.bytes)
        + min(layer.activation_bytes, layer.output_bytes)
        for layer in prices.chain.layers
    ]
    return min(needs) <= USABLE * pool.device.kind.memory


def _relative_pace(pool: Pool, prices: Prices, winner: Candidate) -> str:
    """Return how long a sample takes there, relative to the fastest kind in use; an empty text if
    that is no reason."""

    def seconds(index: int) -> float | None:
        """Return the seconds with as few samples as are known; None if this kind was not measured
        with single devices."""
        known = prices.sample_range(index, 1)
        return (
            None if known is None else prices.whole(index, 1, known[0], Recompute.NONE) / known[0]
        )

    in_use = {part.pool for choice in winner.plan for part in choice.option.parts} - {pool.index}
    own, others = seconds(pool.index), {index: seconds(index) for index in in_use}
    known = {index: pace for index, pace in others.items() if pace is not None}
    if own is None or not known or len(known) < len(others):
        return ""
    fastest = min(known, key=lambda index: known[index])
    times = own / known[fastest]
    return (
        f"; it takes {times:.2g} times as long as on {prices.pools[fastest].name}"
        if times > 1.05
        else ""
    )
