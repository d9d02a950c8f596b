"""Choose islands, their samples, and the number of steps between exchanges.

    (1)  islands   parts of the cluster between which links are slower than inside
                   (``cluster.divide``), without those on which the model does not fit or run
    (2)  samples   b[i] proportional to b[i] / T[i], with T[i] the time of island i's plan for b[i]
                   samples (``planner.find_plan`` on the island's devices), until the slowest island
                   gets no faster; then the slowest gives 8, 4, 2 and 1 units to the fastest where
                   that helps, because T[i] jumps with the divisors of b[i]
    (3)  H         the least number of steps with which the exchange e adds at most
                   ``EXCHANGE_SHARE`` of the time: e <= share H max T[i]; at most the limit.
                   Overlapped by tau steps: the least H with e <= tau max T[i] and
                   tau < H / fragments
    (4)  memory    outer state and offloaded data <= usable host memory, on the host of each lead,
                   if the cluster file states the memory of that host
    (5)  estimate  B / sum of b[i] / T[i] + fragments max(0, e - tau T) / H, with B the global
                   batch; islands that raise it are left out

Larger H is faster and changes training more, so H is no larger than (3) needs. The certificate
holds for the algorithm with these islands, samples and H: no step takes less than the slowest
island's lower bound and its part of an exchange.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from argosy.cluster.divide import Division, division_into, divisions
from argosy.cluster.host import Tier, tier_size
from argosy.cluster.lasting import at_time_zero, with_only
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.cost.offload import host_uses
from argosy.errors import InfeasibleError, bad_input
from argosy.plan.islands import Compression, IslandPlan, IslandPrediction, OuterOptimizer, lead
from argosy.plan.islands_file import check_island_plan
from argosy.plan.plan import Certificate, Plan
from argosy.planner import Settings, find_plan
from argosy.sim.islands import exchange_seconds, play_islands
from argosy.units import SIZE, counted
from argosy.workload.chain import Chain

# Share of the time of a step that an exchange may add before H grows (3).
EXCHANGE_SHARE = 0.05
# Default maximum number of steps between two exchanges that (3) chooses.
DEFAULT_LIMIT = 100
# Divisions of a cluster with more parts are only tried if the user requests them.
_MOST_ISLANDS = 8
# Samples are shared again at most this often (2).
_MOST_ROUNDS = 4
# Shares are multiples of a power of two, at least the global batch over twice this number, so that
# micro-batches divide them.
_PARTS_OF_BATCH = 64


@dataclass(frozen=True, kw_only=True)
class IslandOptions:
    """A set of options that a user may set for an island plan."""

    count: int | None = None
    """Number of islands; None for the fastest number."""
    sync_every: int | None = None
    """H; None to choose it by (3)."""
    limit: int = DEFAULT_LIMIT
    """Largest H that (3) may choose."""
    fragments: int = 1
    overlaps: bool = False
    """Whether steps continue during exchanges."""
    outer: OuterOptimizer = field(default_factory=OuterOptimizer)
    compression: Compression = Compression.NONE

    def __post_init__(self) -> None:
        """Raise InputError if the fragments do not divide the number of steps, or if there is no
        time to overlap."""
        every, parts = self.sync_every, self.fragments
        least = 2 * parts if self.overlaps else parts
        why = f"{counted(parts, 'fragment')}{' and --overlap' if self.overlaps else ''}"
        if every is not None and (every % parts or every < least):
            expected = (
                f"a multiple of the {parts} fragments"
                if every % parts
                else f"at least {least} with {why}"
            )
            raise bad_input(expected, every, "--sync-every")
        if every is None and self.limit < least:
            raise bad_input(f"at least {least} with {why}", self.limit, "--max-sync-every")


@dataclass(frozen=True, kw_only=True)
class _Task:
    chain: Chain
    cluster: Cluster
    global_batch: int
    settings: Settings
    model: ComputeModel


def find_island_plan(
    chain: Chain,
    cluster: Cluster,
    *,
    global_batch: int,
    options: IslandOptions,
    settings: Settings | None = None,
    model: ComputeModel | None = None,
    synchronous: Plan | None = None,
) -> IslandPlan:
    """Return the fastest island plan; ``synchronous`` is the plan whose time it carries for
    comparison."""
    still = at_time_zero(cluster)
    task = _Task(
        chain=chain,
        cluster=still,
        global_batch=global_batch,
        settings=settings or Settings(),
        model=model or ComputeModel(),
    )
    plans: list[IslandPlan] = []
    reason, hint = "all of its nodes reach each other equally fast", "Try --islands N or off."
    if not divisions(still):
        reason, hint = "it has one node, and an island has at least one", "Try --islands off."
    for division in _candidates(still, options):
        try:
            plan = _planned(division, task, options)
            plans.append(_without_brakes(plan, division, task, options))
        except InfeasibleError as error:
            reason, hint = str(error).splitlines()[0], "Try --islands off."
    if not plans:
        raise InfeasibleError(f"Cannot divide {cluster.name} into islands because {reason}. {hint}")
    best = min(plans, key=_step_seconds)
    assert best.predicted is not None
    if synchronous is None or synchronous.predicted is None:
        return best
    seconds = synchronous.predicted.iteration_seconds
    return replace(best, predicted=replace(best.predicted, synchronous_seconds=seconds))


def _candidates(cluster: Cluster, options: IslandOptions) -> list[Division]:
    """Return the divisions of the cluster into islands that are tried (1)."""
    if options.count is not None:
        return [division_into(cluster, options.count)]
    return [division for division in divisions(cluster) if len(division) <= _MOST_ISLANDS]


def _planned(division: Division, task: _Task, options: IslandOptions) -> IslandPlan:
    """Return the plan of a division, predicted and certified."""
    if task.global_batch < len(division):
        expected = f"a global batch of at least {len(division)}, one sample for each island"
        raise bad_input(expected, task.global_batch, "--global-batch")
    islands = _shared_out(*_able(division, task), task)
    plan = IslandPlan(
        islands=islands,
        sync_every=options.fragments,
        fragments=options.fragments,
        outer=options.outer,
        compression=options.compression,
    )
    seconds = exchange_seconds(plan, task.chain, task.cluster)
    if math.isinf(seconds):
        raise InfeasibleError("a link between its parts is down")
    slowest = _slowest(islands)
    every, late = _timing(seconds, slowest, options)
    plan = replace(plan, sync_every=every, overlap=late)
    check_island_plan(plan)
    plan = certified(plan, task.chain, task.cluster, task.model)
    _check_host_memory(plan, task)
    return plan


def _without_brakes(
    plan: IslandPlan, division: Division, task: _Task, options: IslandOptions
) -> IslandPlan:
    """Return the plan without the islands that make it slower, unless the user requests a number of
    islands.

    An island behind a slow link makes all others wait at exchanges. While the estimate (5) is lower
    without some island, the plan without the island of the lowest estimate is made and compared.
    """
    while options.count is None and len(plan.islands) > 2:
        smaller = min(
            (
                replace(plan, islands=plan.islands[:at] + plan.islands[at + 1 :])
                for at in range(len(plan.islands))
            ),
            key=lambda rest: _estimate(rest, task, options),
        )
        if _estimate(smaller, task, options) >= _step_seconds(plan):
            break
        used = {name for island in smaller.islands for name in island.devices}
        division = tuple(part for part in division if used.intersection(part))
        changed = _planned(division, task, options)
        if _step_seconds(changed) >= _step_seconds(plan):
            break
        plan = changed
    return plan


def _estimate(plan: IslandPlan, task: _Task, options: IslandOptions) -> float:
    """Return the seconds of a step if these islands shared the batch by their speeds (5)."""
    rates = [island.global_batch / _seconds(island) for island in plan.islands]
    step = task.global_batch / math.fsum(rates)
    exchange = exchange_seconds(plan, task.chain, task.cluster)
    if math.isinf(exchange):
        return math.inf
    every, late = _timing(exchange, step, options)
    return step + plan.fragments * max(0.0, exchange - late * step) / every


def _step_seconds(plan: IslandPlan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_seconds


def _check_host_memory(plan: IslandPlan, task: _Task) -> None:
    """Raise InfeasibleError if a host whose memory the cluster file states has too little of it for
    the outer state and for what its island offloads (4)."""
    assert plan.predicted is not None
    for island in plan.islands:
        node, _ = task.cluster.node_of[lead(island)]
        if node.host_memory.size is None:
            continue
        uses = host_uses(island, task.chain, task.cluster)
        offloaded = sum(
            use.total for use in uses if use.node == node.name and use.tier is Tier.HOST
        )
        needed = plan.predicted.outer_bytes + offloaded
        usable = tier_size(task.cluster, node, Tier.HOST)
        if needed > usable:
            raise InfeasibleError(
                f"the lead on {node.name} needs {SIZE.short(needed)} of host memory,"
                f" and a plan may use {SIZE.short(usable)} there"
            )


def _able(division: Division, task: _Task) -> tuple[Division, list[float]]:
    """Return the parts on which the model fits and runs, and the samples per second of each with
    equal shares."""
    able: list[tuple[str, ...]] = []
    rates: list[float] = []
    reason = ""
    for part in division:
        try:
            plan = _find(part, max(1, task.global_batch // len(division)), task)
            able.append(part)
            rates.append(plan.global_batch / _seconds(plan))
        except InfeasibleError as error:
            reason = str(error).splitlines()[0].rstrip(".")
    if len(able) < 2:
        raise InfeasibleError(f"fewer than two parts can train alone: {reason}")
    return tuple(able), rates


def _find(part: tuple[str, ...], samples: int, task: _Task) -> Plan:
    where = with_only(task.cluster, part)
    return find_plan(
        task.chain, where, global_batch=samples, settings=task.settings, model=task.model
    )


def _shared_out(division: Division, rates: list[float], task: _Task) -> tuple[Plan, ...]:
    """Return plans of islands that take about equally long (2), starting from each island's samples
    per second."""
    unit = 2 ** int(math.log2(max(1.0, task.global_batch / _PARTS_OF_BATCH)))
    known: dict[tuple[int, int], Plan] = {}

    def planned(shares: tuple[int, ...]) -> tuple[Plan, ...]:
        for at, share in enumerate(shares):
            if (at, share) not in known:
                known[at, share] = _find(division[at], share, task)
        return tuple(known[at, share] for at, share in enumerate(shares))

    best: tuple[Plan, ...] = ()
    tried: set[tuple[int, ...]] = set()
    for _ in range(_MOST_ROUNDS):
        shares = proportional(task.global_batch, rates, unit)
        if shares in tried:
            break
        tried.add(shares)
        plans = planned(shares)
        if not best or _slowest(plans) < _slowest(best):
            best = plans
        rates = [plan.global_batch / _seconds(plan) for plan in plans]
    for amount in (8 * unit, 4 * unit, 2 * unit, unit):
        shares = _evened(best, amount)
        if min(shares) >= 1 and shares not in tried:
            tried.add(shares)
            best = min(best, planned(shares), key=_slowest)
    return best


def _evened(plans: tuple[Plan, ...], amount: int) -> tuple[int, ...]:
    """Return the samples of islands after the slowest gives ``amount`` of its own to the
    fastest."""
    order = sorted(range(len(plans)), key=lambda at: _seconds(plans[at]))
    shares = [plan.global_batch for plan in plans]
    shares[order[-1]] -= amount
    shares[order[0]] += amount
    return tuple(shares)


def _slowest(plans: tuple[Plan, ...]) -> float:
    return max(map(_seconds, plans))


def proportional(total: int, rates: list[float], unit: int) -> tuple[int, ...]:
    """Divide ``total`` into whole multiples of ``unit``, at least one each, proportional to rates.

    The fastest takes the rest.

    >>> proportional(64, [3.0, 1.0], 8)
    (48, 16)
    >>> proportional(10, [1.0, 1.0, 1.0], 1)
    (4, 3, 3)
    """
    unit = unit if total >= unit * len(rates) else 1
    units = total // unit
    exact = [units * rate / math.fsum(rates) for rate in rates]
    shares = [max(1, int(share)) for share in exact]
    while sum(shares) < units:
        at = max(range(len(rates)), key=lambda at: (exact[at] - shares[at], rates[at], -at))
        shares[at] += 1
    while sum(shares) > units:
        at = max(
            (at for at in range(len(rates)) if shares[at] > 1),
            key=lambda at: (shares[at] - exact[at], -at),
        )
        shares[at] -= 1
    result = [share * unit for share in shares]
    result[max(range(len(rates)), key=lambda at: (rates[at], -at))] += total - units * unit
    return tuple(result)


def _seconds(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.iteration_seconds


def _timing(exchange: float, step: float, options: IslandOptions) -> tuple[int, int]:
    """Return H and tau by (3)."""
    parts = options.fragments
    if not options.overlaps:
        return _multiple(math.ceil(parts * exchange / (EXCHANGE_SHARE * step)), options), 0
    late = max(1, math.ceil(exchange / step))
    every = _multiple(parts * (late + 1), options)
    return every, min(late, every // parts - 1)


def _multiple(steps: int, options: IslandOptions) -> int:
    """Return the least multiple of the fragments from ``steps`` on, within the limit unless H is
    given."""
    parts = options.fragments
    if options.sync_every is not None:
        return options.sync_every
    return min(max(1, -(-steps // parts)), options.limit // parts) * parts


def certified(
    plan: IslandPlan, chain: Chain, cluster: Cluster, model: ComputeModel | None = None
) -> IslandPlan:
    """Return the plan with its prediction on a cluster that does not change, and its
    certificate."""
    course = play_islands(plan, chain, cluster, model, steps=2 * plan.sync_every)
    exchange = exchange_seconds(plan, chain, cluster)
    count = len(plan.islands)
    piece = chain.parameters * plan.compression.bytes_per_value / count
    seconds = course.step_seconds
    predicted = IslandPrediction(
        step_seconds=seconds,
        samples_per_second=plan.global_batch / seconds,
        island_seconds=tuple(map(_seconds, plan.islands)),
        exchange_seconds=exchange,
        exchange_bytes=2 * (count - 1) * piece,
        outer_bytes=4.0 * chain.parameters * (2 + 1 / plan.fragments),
    )
    return replace(plan, predicted=predicted, certificate=_certificate(plan, predicted))


def _certificate(plan: IslandPlan, predicted: IslandPrediction) -> Certificate | None:
    """Return the certificate of the algorithm, or None if an island has no certificate of its
    own."""
    proofs = [island.certificate for island in plan.islands if island.certificate is not None]
    if len(proofs) < len(plan.islands):
        return None
    exchanged = (
        0.0 if plan.overlap else plan.fragments * predicted.exchange_seconds / plan.sync_every
    )
    bound = max(proof.lower_bound_seconds for proof in proofs) + exchanged
    shares = ", ".join(str(island.global_batch) for island in plan.islands)
    scopes = " and ".join(dict.fromkeys(proof.scope for proof in proofs))
    return Certificate(
        lower_bound_seconds=bound,
        gap=max(0.0, predicted.step_seconds / bound - 1),
        granularity=max(proof.granularity for proof in proofs),
        scope=f"{plan.algorithm}, with {shares} samples a step on these devices ({scopes} on each)",
        cost_model=proofs[0].cost_model,
    )
