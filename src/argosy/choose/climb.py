"""Plans for a judge of somebody else's: the finalists of a search, improved by small steps in
whatever figure they are judged by.

A search leads by our own costs. Another system's simulator may order plans within a percent or two
differently (Sailor's lets no transfer overlap and sums gradients at the pace of one GPU), so the
best plan for it may be near ours and not among them. From each of the best finalists:

    (1)  steps    a layer across a cut; micro-batches twice or half as large; two neighbouring stages of one kind in
                  groups of twice the tensor width, or a stage as two of half the width
    (2)  climb    the step with the highest score, as long as it is higher

The score of a plan that the judge refuses is 0. What is not reached by such steps is not found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from argosy.cluster.topology import Cluster
from argosy.plan.plan import Plan, Replica, Stage

Score = Callable[[Plan], float]
"""The higher the better."""
_BETTER = 1 + 1e-9


def best_nearby(plans: Iterable[Plan], score: Score, cluster: Cluster, *, most: int = 12) -> Plan:
    """The best that (2) reaches from the ``most`` best of some plans."""
    starts = sorted(plans, key=score, reverse=True)[:most]
    return max((climb(plan, score, cluster) for plan in starts), key=score)


def climb(plan: Plan, score: Score, cluster: Cluster) -> Plan:
    """(2)."""
    reached = score(plan)
    while True:
        other = max(steps(plan, cluster), key=score, default=plan)
        if score(other) <= reached * _BETTER:
            return plan
        plan, reached = other, score(other)


def steps(plan: Plan, cluster: Cluster) -> Iterator[Plan]:
    """(1)."""
    plan = replace(plan.bare, collectives=())
    for at, (one, other) in enumerate(zip(plan.stages, plan.stages[1:], strict=False)):
        for cut in (one.end - 1, one.end + 1):
            if one.first < cut < other.end:
                yield _with(plan, at, 2, replace(one, end=cut), replace(other, first=cut))
        merged = _merged(one, other, cluster)
        if merged is not None:
            yield _with(plan, at, 2, merged)
    for at, stage in enumerate(plan.stages):
        halves = _halves(stage)
        if halves is not None:
            yield _with(plan, at, 1, *halves)
    yield from _other_batches(plan)


def _with(plan: Plan, at: int, count: int, *stages: Stage) -> Plan:
    return replace(plan, stages=(*plan.stages[:at], *stages, *plan.stages[at + count :]))


def _merged(one: Stage, other: Stage, cluster: Cluster) -> Stage | None:
    """Two stages as one with groups of twice the width, each inside a node; None where that cannot
    be."""
    if len(one.replicas) != len(other.replicas) or not (_is_even(one) and _is_even(other)):
        return None
    if (
        one.replicas[0].width != other.replicas[0].width
        or one.replicas[0].samples != other.replicas[0].samples
    ):
        return None
    both = {*one.devices, *other.devices}
    names = [device.name for device in cluster.devices if device.name in both]
    width = 2 * one.replicas[0].width
    groups = [tuple(names[at : at + width]) for at in range(0, len(names), width)]
    homes = [{cluster.device(name).node for name in group} for group in groups]
    if len({cluster.device(name).kind.name for name in names}) > 1 or any(
        len(home) > 1 for home in homes
    ):
        return None
    samples = one.replicas[0].samples
    return replace(
        one,
        end=other.end,
        replicas=tuple(Replica(devices=group, samples=samples) for group in groups),
    )


def _halves(stage: Stage) -> tuple[Stage, Stage] | None:
    """A stage as two, each with half of every group; None where groups or layers cannot be
    halved."""
    width, layers = stage.replicas[0].width, stage.end - stage.first
    if width % 2 or layers < 2 or not _is_even(stage):
        return None
    middle = stage.first + layers // 2
    front, back = (
        tuple(replace(replica, devices=replica.devices[part]) for replica in stage.replicas)
        for part in (slice(0, width // 2), slice(width // 2, width))
    )
    return replace(stage, end=middle, replicas=front), replace(stage, first=middle, replicas=back)


def _is_even(stage: Stage) -> bool:
    """Equal groups with equal shares, split over tensors only."""
    alike = {(replica.width, replica.samples, replica.ratios) for replica in stage.replicas}
    return len(alike) == 1 and not stage.replicas[0].ratios and stage.context == stage.expert == 1


def _other_batches(plan: Plan) -> Iterator[Plan]:
    counts = [replica.samples for stage in plan.stages for replica in stage.replicas]
    if plan.num_micro_batches % 2 == 0:
        yield _scaled(plan, 2, 1)
    if all(samples % 2 == 0 for samples in counts):
        yield _scaled(plan, 1, 2)


def _scaled(plan: Plan, times: int, parts: int) -> Plan:
    stages = tuple(
        replace(
            stage,
            replicas=tuple(replace(r, samples=r.samples * times // parts) for r in stage.replicas),
        )
        for stage in plan.stages
    )
    return replace(
        plan,
        stages=stages,
        micro_batch_size=plan.micro_batch_size * times // parts,
        num_micro_batches=plan.num_micro_batches * parts // times,
    )
