"""Why a plan lost, and why a device was left out: sentences from what a search knows anyway.

The time of an iteration is taken apart into

    (1)  pace     = M times the forward + backward of the slowest stage
    (2)  ending   = the longest gradient exchange and update
    (3)  filling  = filling and draining: one micro-batch through all other stages and back, at most
    (4)  waiting  = the rest: hand-overs between stages that nothing hides

and the part in which the loser differs most is its reason. ``explain`` asks the simulator and says
more.
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

_EQUAL = 1e-6


@dataclass(frozen=True, kw_only=True)
class _Parts:
    slowest: int
    """Stage."""
    per_micro_batch: float
    """Of that stage, in seconds."""
    pace: float
    ending: float
    filling: float
    waiting: float


def _parts(candidate: Candidate, seconds: float) -> _Parts:
    """(1) to (4) of a candidate that takes so many seconds."""
    times = [sum(choice.option.seconds(choice.first, choice.end)) for choice in candidate.plan]
    slowest = times.index(max(times))
    pace = candidate.shape.num_micro_batches * times[slowest]
    ending = max(choice.option.tail(choice.first, choice.end) for choice in candidate.plan)
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
    """By how much, and the part in which it loses most."""
    if seconds / best - 1 <= _EQUAL:
        return (
            "as fast, with more ZeRO or recomputation"
            if loser.effort > winner.effort
            else "as fast"
        )
    one, other = _parts(loser, seconds), _parts(winner, best)
    gaps = {
        name: getattr(one, name) - getattr(other, name)
        for name in ("pace", "ending", "filling", "waiting")
    }
    worst = max(gaps, key=lambda name: gaps[name])
    slower = f"{100 * (seconds / best - 1):.3g} % slower"
    if gaps[worst] < _EQUAL * best / len(gaps):  # where parts overlap in time, none need be longer
        return slower
    match worst:
        case "pace":
            samples = loser.shape.micro_batch_size / winner.shape.micro_batch_size
            where = f"stage {one.slowest} ({describe_choice(loser.plan[one.slowest])})"
            times = _against(one.per_micro_batch, other.per_micro_batch * samples)
            reason = f"its slowest, {where}, takes {times} for as many samples"
        case "ending":
            reason = f"gradient exchange and update take {_against(one.ending, other.ending)}"
        case "filling":
            reason = (
                f"filling and draining its pipeline takes {_against(one.filling, other.filling)}"
            )
        case _:
            reason = f"waiting for hand-overs takes {_against(one.waiting, other.waiting)}"
    return f"{slower}: {reason}"


def _against(one: float, other: float) -> str:
    """
    >>> _against(0.0312, 0.029), _against(0.12004, 0.12)
    ('31.2 ms against 29 ms', '120.04 ms against 120 ms')
    """
    return " against ".join(TIME.apart(one, other, digits=3))


def why_left_out(
    pool: Pool, prices: Prices, scope: Scope, winner: Candidate, others: Sequence[Candidate]
) -> str:
    """Why a plan uses fewer devices of a pool than there are."""
    if not _holds_a_layer(pool, prices):
        room = SIZE.format(USABLE * pool.device.kind.memory, digits=3)
        return f"no layer fits into the {room} that a plan may use of a {pool.name}"
    used = _taken(winner, pool)
    unit = scope.units[pool.index]
    if pool.count - used < unit:
        return f"stages were made of multiples of {unit}x {pool.name} only"
    pace = _relative_pace(pool, prices, winner)
    richer = [other for other in others if _taken(other, pool) > used]
    if not richer:
        return f"no plan with it was among the best {len(others)}{pace}"
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
    """Whether the lightest layer fits alone, with one sample, all state on one device."""
    per_weight = sum(prices.state_bytes)
    needs = [
        per_weight * layer.parameters
        + (0.0 if layer.frozen is None else layer.frozen.bytes)
        + min(layer.activation_bytes, layer.output_bytes)
        for layer in prices.chain.layers
    ]
    return min(needs) <= USABLE * pool.device.kind.memory


def _relative_pace(pool: Pool, prices: Prices, winner: Candidate) -> str:
    """How long a sample takes there, against the fastest kind in use; nothing where that is no
    reason."""

    def seconds(index: int) -> float | None:
        """With as few samples as are known; None where this kind was not measured one by one."""
        known = prices.sample_range(index, 1)
        return (
            None if known is None else prices.whole(index, 1, known[0], Recompute.NONE) / known[0]
        )

    in_use = {part.pool for choice in winner.plan for part in choice.option.parts} - {pool.index}
    own, others = seconds(pool.index), {index: seconds(index) for index in in_use}
    known = {index: each for index, each in others.items() if each is not None}
    if own is None or not known or len(known) < len(others):
        return ""
    fastest = min(known, key=lambda index: known[index])
    times = own / known[fastest]
    return (
        f"; it takes {times:.2g} times as long as a {prices.pools[fastest].name}"
        if times > 1.05
        else ""
    )
