"""Improve the finalists of a search by small steps, for a judge other than Argosy's cost model.

A search is guided by Argosy's own costs. The simulator of another system may order plans within a
percent or two differently (Sailor's lets no transfer overlap and sums gradients at the pace of one
GPU), so the best plan for it may be near the finalists and not among them. From each of the best
finalists:

    (1)  steps    one layer across a cut; micro-batches twice or half as large; two neighbouring
                  stages of one kind merged into groups of twice the tensor width, or a stage as two
                  of half the width
    (2)  climb    take the step with the highest score, as long as it is higher

A plan that the judge rejects scores 0. Plans that such steps do not reach are not found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from argosy.cluster.topology import Cluster
from argosy.plan.plan import Plan, Replica, Stage

Score = Callable[[Plan], float]
"""A figure of merit of a plan; higher is better."""
# A score must grow by more than rounding error to count as better.
_BETTER = 1 + 1e-9


def best_nearby(plans: Iterable[Plan], score: Score, cluster: Cluster, *, most: int = 12) -> Plan:
    """Return the best plan that (2) reaches from the ``most`` best of the given plans."""
    starts = sorted(plans, key=score, reverse=True)[:most]
    return max((climb(plan, score, cluster) for plan in starts), key=score)


def climb(plan: Plan, score: Score, cluster: Cluster) -> Plan:
    """Return the plan that (2) reaches."""
    reached = score(plan)
    while True:
        neighbour = max(steps(plan, cluster), key=score, default=plan)
        if score(neighbour) <= reached * _BETTER:
            return plan
        plan, reached = neighbour, score(neighbour)


def steps(plan: Plan, cluster: Cluster) -> Iterator[Plan]:
    """Yield the neighbours of a plan by (1)."""
    plan = replace(plan.bare, collectives=())
    for at, (front, back) in enumerate(zip(plan.stages, plan.stages[1:], strict=False)):
        for cut in (front.end - 1, front.end + 1):
            if front.first < cut < back.end:
                yield _with(plan, at, 2, replace(front, end=cut), replace(back, first=cut))
        merged = _merged(front, back, cluster)
        if merged is not None:
            yield _with(plan, at, 2, merged)
    for at, stage in enumerate(plan.stages):
        halves = _halves(stage)
        if halves is not None:
            yield _with(plan, at, 1, *halves)
    yield from _other_batches(plan)


def _with(plan: Plan, at: int, count: int, *stages: Stage) -> Plan:
    return replace(plan, stages=(*plan.stages[:at], *stages, *plan.stages[at + count :]))


def _merged(front: Stage, back: Stage, cluster: Cluster) -> Stage | None:
    """Return two stages as one with groups of twice the width, each inside a node, or None if that
    is impossible."""
    if len(front.replicas) != len(back.replicas) or not (_is_even(front) and _is_even(back)):
        return None
    if (
        front.replicas[0].width != back.replicas[0].width
        or front.replicas[0].samples != back.replicas[0].samples
    ):
        return None
    both = {*front.devices, *back.devices}
    names = [device.name for device in cluster.devices if device.name in both]
    width = 2 * front.replicas[0].width
    groups = [tuple(names[at : at + width]) for at in range(0, len(names), width)]
    homes = [{cluster.device(name).node for name in group} for group in groups]
    if len({cluster.device(name).kind.name for name in names}) > 1 or any(
        len(home) > 1 for home in homes
    ):
        return None
    samples = front.replicas[0].samples
    return replace(
        front,
        end=back.end,
        replicas=tuple(Replica(devices=group, samples=samples) for group in groups),
    )


def _halves(stage: Stage) -> tuple[Stage, Stage] | None:
    """Return a stage as two, each with half of every group, or None if groups or layers cannot be
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
    """Return whether all groups are equal and have equal shares, and only tensors are split."""
    shapes = {(replica.width, replica.samples, replica.ratios) for replica in stage.replicas}
    return len(shapes) == 1 and not stage.replicas[0].ratios and stage.context == stage.expert == 1


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
