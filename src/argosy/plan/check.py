"""Whether a plan makes sense on a cluster: one function per rule, every violation reported.

What the checker passes can be simulated; memory is a question of cost and is answered there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from argosy.cluster.topology import Cluster
from argosy.errors import InputError, Problem, closest
from argosy.plan.plan import Plan
from argosy.schedule import ScheduleKind, build_schedule, check_schedule
from argosy.workload.chain import Chain

Rule = Callable[[Plan, Chain, Cluster], Iterator[Problem]]


def check_plan(plan: Plan, chain: Chain, cluster: Cluster, *, file: str | None = None) -> None:
    """Raise one ``InputError`` with everything that is wrong, or return."""
    problems = [problem for rule in RULES for problem in rule(plan, chain, cluster)]
    if not problems:
        try:
            check_schedule(build_schedule(plan.schedule, len(plan.stages), plan.num_micro_batches))
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(Problem(**{**vars(problem), "file": file}) for problem in problems)


def batch_adds_up(plan: Plan, chain: Chain, cluster: Cluster) -> Iterator[Problem]:
    """``micro_batch_size * num_micro_batches = global_batch``."""
    product = plan.micro_batch_size * plan.num_micro_batches
    if product != plan.global_batch:
        expected = f"micro_batch_size x num_micro_batches = {product}"
        yield Problem(path="global_batch", found=str(plan.global_batch), expected=expected)


def samples_add_up(plan: Plan, chain: Chain, cluster: Cluster) -> Iterator[Problem]:
    """Over a stage, the replicas' samples are the micro-batch."""
    for index, stage in enumerate(plan.stages):
        total = sum(replica.samples for replica in stage.replicas)
        if total != plan.micro_batch_size:
            expected = f"samples that sum to the micro_batch_size {plan.micro_batch_size}"
            yield Problem(path=f"stages[{index}].replicas", found=f"a sum of {total}", expected=expected)


def layers_are_covered(plan: Plan, chain: Chain, cluster: Cluster) -> Iterator[Problem]:
    """Stages follow one another from the first layer to the last."""
    at = 0
    for index, stage in enumerate(plan.stages):
        if stage.first != at or stage.end <= stage.first:
            expected = f"a range of at least one layer that begins at {at}"
            yield Problem(path=f"stages[{index}].layers", found=f"[{stage.first}, {stage.end})", expected=expected)
        at = stage.end
    if at != len(chain.layers):
        expected = f"stages up to layer {len(chain.layers)}, the end of {chain.name}"
        yield Problem(path=f"stages[{len(plan.stages) - 1}].layers", found=f"an end at {at}", expected=expected)


def devices_exist(plan: Plan, chain: Chain, cluster: Cluster) -> Iterator[Problem]:
    for index, stage in enumerate(plan.stages):
        for position, replica in enumerate(stage.replicas):
            for name in replica.devices:
                if name not in cluster.device_index:
                    yield Problem(
                        path=f"stages[{index}].replicas[{position}].devices",
                        found=f'"{name}"',
                        expected=f"a device of {cluster.name}",
                        suggestion=closest(name, cluster.device_index),
                    )


def devices_work_once(plan: Plan, chain: Chain, cluster: Cluster) -> Iterator[Problem]:
    """A device belongs to one replica of one stage; chunks of an interleaved schedule come back to their worker."""
    interleaved = plan.schedule.kind is ScheduleKind.INTERLEAVED and plan.schedule.chunks > 0
    workers = len(plan.stages) // plan.schedule.chunks if interleaved else len(plan.stages)
    owner: dict[str, int] = {}
    for index, stage in enumerate(plan.stages):
        if interleaved and index >= workers > 0:
            first = [replica.devices for replica in plan.stages[index % workers].replicas]
            if [replica.devices for replica in stage.replicas] != first:
                expected = f"the devices of stage {index % workers}, its worker's first chunk"
                yield Problem(path=f"stages[{index}].replicas", found="other devices", expected=expected)
            continue
        for name in stage.devices:
            if name in owner:
                expected = "each device in one replica of one stage"
                found = f'"{name}" in stage {owner[name]} and stage {index}'
                yield Problem(path=f"stages[{index}].replicas", found=found, expected=expected)
            owner.setdefault(name, index)


def ratios_sum_to_one(plan: Plan, chain: Chain, cluster: Cluster) -> Iterator[Problem]:
    for index, stage in enumerate(plan.stages):
        for position, replica in enumerate(stage.replicas):
            path = f"stages[{index}].replicas[{position}].ratios"
            if replica.ratios and len(replica.ratios) != replica.width:
                expected = f"one ratio for each of the {replica.width} devices"
                yield Problem(path=path, found=f"{len(replica.ratios)} ratios", expected=expected)
            elif not math.isclose(sum(replica.shares), 1, rel_tol=0, abs_tol=1e-6) or min(replica.shares) < 0:
                found = f"a sum of {sum(replica.shares):g}"
                yield Problem(path=path, found=found, expected="ratios of at least 0 that sum to 1")


def tensor_width_fits(plan: Plan, chain: Chain, cluster: Cluster) -> Iterator[Problem]:
    """A layer with h attention heads can be split over at most h devices."""
    for index, stage in enumerate(plan.stages):
        layers = chain.layers[stage.first : stage.end]
        most = min((layer.max_tensor_width for layer in layers), default=1)
        for position, replica in enumerate(stage.replicas):
            if replica.width > max(most, 1):
                yield Problem(
                    path=f"stages[{index}].replicas[{position}].devices",
                    found=f"{replica.width} devices",
                    expected=f"at most {most}, the widest split that layers {stage.first}..{stage.end - 1} allow",
                )


def schedule_fits(plan: Plan, chain: Chain, cluster: Cluster) -> Iterator[Problem]:
    depth = plan.schedule.depth
    if depth is not None and len(depth) != len(plan.stages):
        expected = f"one depth for each of the {len(plan.stages)} stages"
        yield Problem(path="schedule.depth", found=f"{len(depth)} depths", expected=expected)


RULES: tuple[Rule, ...] = (
    batch_adds_up,
    samples_add_up,
    layers_are_covered,
    devices_exist,
    devices_work_once,
    ratios_sum_to_one,
    tensor_width_fits,
    schedule_fits,
)
