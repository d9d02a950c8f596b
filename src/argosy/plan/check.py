"""Check that a plan makes sense on a cluster: one function per rule, every violation reported.

A plan that passes can be simulated. Memory is checked by the cost model, not here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from argosy.cluster.host import Tier
from argosy.cluster.topology import Cluster
from argosy.document import Document, parse_path
from argosy.errors import InputError, Problem, closest, raise_any
from argosy.plan.plan import Algorithm, Collective, Plan, Recompute, Stage
from argosy.plan.runnable import powersgd_problems
from argosy.schedule import ScheduleKind, ScheduleSpec, build_schedule, check_schedule
from argosy.schedule.action import worker_of
from argosy.workload.chain import Chain

# A function that yields the problems that a plan has by one rule.
Rule = Callable[[Plan, Chain, Cluster], Iterator[Problem]]

# Largest product of stages and micro-batches for which a schedule is built, to bound time and
# memory.
_MOST_ACTIONS = 1_000_000
# Largest number of unknown devices with a suggestion, because each is compared with all devices.
_MOST_SUGGESTED = 8


def check_plan(
    plan: Plan,
    chain: Chain,
    cluster: Cluster,
    *,
    document: Document | None = None,
    file: str | None = None,
) -> None:
    """Raise one ``InputError`` with all problems of a plan, if it has any.

    Problems name the line in ``document``, the file that the plan was read from, or else only
    ``file``.
    """
    problems = [problem for rule in RULES for problem in rule(plan, chain, cluster)]
    if document is not None:
        problems = [
            replace(problem, file=document.file, line=document.line(parse_path(problem.path or "")))
            for problem in problems
        ]
        problems.sort(key=lambda problem: problem.line or 0)
    elif file is not None:
        problems = [replace(problem, file=file) for problem in problems]
    raise_any(problems)


def check_devices(plan: Plan, cluster: Cluster) -> None:
    """Raise an ``InputError`` if the cluster lacks a device of the plan; this needs no model."""
    problems = list(_unknown_devices(plan, cluster))
    raise_any(problems)


def batch_adds_up(plan: Plan, chain: Chain, cluster: Cluster) -> Iterator[Problem]:
    """Check that ``micro_batch_size * num_micro_batches = global_batch``."""
    product = plan.micro_batch_size * plan.num_micro_batches
    if product != plan.global_batch:
        expected = f"micro_batch_size x num_micro_batches = {product}"
        yield Problem("global_batch", str(plan.global_batch), expected)


def samples_add_up(plan: Plan, chain: Chain, cluster: Cluster) -> Iterator[Problem]:
    """Check that the samples of a stage's replicas sum to the micro-batch."""
    for index, stage in enumerate(plan.stages):
        total = sum(replica.samples for replica in stage.replicas)
        if total != plan.micro_batch_size:
            expected = f"samples that sum to the micro_batch_size {plan.micro_batch_size}"
            yield Problem(f"stages[{index}].replicas", f"a sum of {total}", expected)


def layers_are_covered(plan: Plan, chain: Chain, cluster: Cluster) -> Iterator[Problem]:
    """Check that stages follow one another from the first layer to the last."""
    at = 0
    for index, stage in enumerate(plan.stages):
        if stage.first != at or stage.end <= stage.first:
            expected = f"a range of at least one layer that begins at {at}"
            yield Problem(f"stages[{index}].layers", f"[{stage.first}, {stage.end})", expected)
        at = stage.end
    if at != len(chain.layers):
        expected = f"stages up to layer {len(chain.layers)}, the end of {chain.name}"
        yield Problem(f"stages[{len(plan.stages) - 1}].layers", f"an end at {at}", expected)


def devices_exist(plan: Plan, chain: Chain, cluster: Cluster) -> Iterator[Problem]:
    """Check that the cluster has every device."""
    yield from _unknown_devices(plan, cluster)


def devices_work_once(plan: Plan, chain: Chain, cluster: Cluster) -> Iterator[Problem]:
    """Check that a device belongs to one replica of one stage, or of the stages of one worker if
    the schedule puts several on a worker."""
    chunks = plan.schedule.stages_per_worker
    if chunks < 1 or len(plan.stages) % chunks:
        return  # ``schedule_fits`` reports this problem
    workers = len(plan.stages) // chunks
    for index, stage in enumerate(plan.stages[workers:], start=workers):
        worker = worker_of(plan.schedule.kind, index, workers)
        first = [replica.devices for replica in plan.stages[worker].replicas]
        if [replica.devices for replica in stage.replicas] != first:
            expected = f"the devices of stage {worker}, its worker's first chunk"
            yield Problem(f"stages[{index}].replicas", "other devices", expected)
    owner: dict[str, int] = {}
    for path, name, index in _placed_devices(plan):
        if index < workers and name in owner:
            expected = (
                f"each device in one replica of one stage; it is already in stage {owner[name]}"
            )
            yield Problem(path, f'"{name}"', expected)
        owner.setdefault(name, index)


def _placed_devices(plan: Plan) -> Iterator[tuple[str, str, int]]:
    """Yield the place at which each device is named, its name, and its stage."""
    for index, stage in enumerate(plan.stages):
        for position, replica in enumerate(stage.replicas):
            for name in replica.devices:
                yield f"stages[{index}].replicas[{position}].devices", name, index


def _unknown_devices(plan: Plan, cluster: Cluster) -> Iterator[Problem]:
    places = ((path, name) for path, name, _ in _placed_devices(plan))
    yield from _unknown(places, cluster)


def _unknown(places: Iterable[tuple[str, str]], cluster: Cluster) -> Iterator[Problem]:
    """Yield a problem for each named device that the cluster lacks; the first few with a
    suggestion, because finding one takes a comparison with all devices."""
    missing = ((path, name) for path, name in places if name not in cluster.device_index)
    for number, (path, name) in enumerate(missing):
        suggestion = closest(name, cluster.device_index) if number < _MOST_SUGGESTED else None
        yield Problem(path, f'"{name}"', f"a device of {cluster.name}", suggestion=suggestion)


def ratios_sum_to_one(plan: Plan, chain: Chain, cluster: Cluster) -> Iterator[Problem]:
    """Check that ratios are one per device, at least 0, and sum to 1."""
    for index, stage in enumerate(plan.stages):
        for position, replica in enumerate(stage.replicas):
            path = f"stages[{index}].replicas[{position}].ratios"
            if replica.ratios and len(replica.ratios) != replica.width:
                expected = f"one ratio for each of the {replica.width} devices"
                yield Problem(path, f"{len(replica.ratios)} ratios", expected)
            elif (
                not math.isclose(sum(replica.shares), 1, rel_tol=0, abs_tol=1e-6)
                or min(replica.shares) < 0
            ):
                negative = min(replica.shares) < 0
                actual = (
                    f"{min(replica.shares):g}" if negative else f"a sum of {sum(replica.shares):g}"
                )
                yield Problem(path, actual, "ratios of at least 0 that sum to 1")


def context_fits(plan: Plan, chain: Chain, cluster: Cluster) -> Iterator[Problem]:
    """Check that a stage can cut the sequence into its number of parts.

    Each part takes a piece from the front and one from the back, so the length must divide by twice
    the number of parts, unless ratios state the sizes. Every replica needs devices for all parts,
    and the tensor-parallel groups of all parts must have the same ratios inside.
    """
    for index, stage in enumerate(plan.stages):
        if stage.context == 1:
            continue
        path, actual = f"stages[{index}].context", str(stage.context)
        layers = chain.layers_of(stage)
        most = min((layer.max_context for layer in layers), default=1)
        if stage.context > most:
            expected = (
                f"at most {most}, the most parts that layers {stage.first}..{stage.end - 1} allow"
            )
            yield Problem(path, actual, expected)
        elif chain.sequence_length % (2 * stage.context) and not all(
            replica.ratios for replica in stage.replicas
        ):
            expected = f"a number whose double divides the sequence length {chain.sequence_length}"
            yield Problem(path, actual, expected)
        for position, replica in enumerate(stage.replicas):
            where = f"stages[{index}].replicas[{position}]"
            if replica.width % stage.context:
                expected = f"a multiple of the {stage.context} parts of the sequence"
                yield Problem(f"{where}.devices", f"{replica.width} devices", expected)
            elif replica.ratios and _differ(replica.ratios, replica.width // stage.context):
                groups = "tensor-parallel groups that share each of"
                expected = f"{groups} the {stage.context} parts in the same ratios"
                yield Problem(f"{where}.ratios", "different ratios", expected)


def _differ(ratios: Sequence[float], width: int) -> bool:
    """Return whether groups of ``width`` devices share their parts in different ratios; parts may
    have any size above 0."""
    groups = [ratios[at : at + width] for at in range(0, len(ratios), width)]
    if min(map(sum, groups)) <= 0:
        return True
    shares = [[ratio / sum(group) for ratio in group] for group in groups]
    return any(
        not math.isclose(a, b, abs_tol=1e-6)
        for group in shares
        for a, b in zip(group, shares[0], strict=True)
    )


def experts_fit(plan: Plan, chain: Chain, cluster: Cluster) -> Iterator[Problem]:
    """Check that experts can be divided: equally, or as the stage states.

    Holders that divide experts must be equal if they cut the sequence or have several devices.
    """
    for index, stage in enumerate(plan.stages):
        if stage.expert == 1 or any(replica.width % stage.context for replica in stage.replicas):
            continue
        path, actual = f"stages[{index}].expert", str(stage.expert)
        counts = {layer.num_experts for layer in chain.layers_of(stage) if layer.num_experts}
        undivided = [count for count in sorted(counts) if count % stage.expert]
        if stage.experts:
            yield from _experts_add_up(stage, f"stages[{index}].experts", counts)
        elif not counts:
            expected = f"1, because layers {stage.first}..{stage.end - 1} have no experts"
            yield Problem(path, actual, expected)
        elif undivided:
            yield Problem(path, actual, f"a divisor of the {undivided[0]} experts of a layer")
        if stage.num_holders % stage.expert:
            expected = f"a divisor of the {stage.num_holders} holders of the stage's weights"
            yield Problem(path, actual, expected)
        elif _are_uneven(stage):
            equal = "replicas of one width, and equal ones if they have several devices"
            expected = f"{equal}, in groups that share experts"
            yield Problem(f"stages[{index}].replicas", "unequal replicas", expected)


def _experts_add_up(stage: Stage, path: str, counts: Collection[int]) -> Iterator[Problem]:
    total = sum(stage.experts)
    if len(stage.experts) != stage.expert:
        yield Problem(
            path, f"{len(stage.experts)} numbers", f"one for each of {stage.expert} holders"
        )
    elif set(counts) != {total}:
        numbers = " and ".join(map(str, sorted(counts))) or "no"
        yield Problem(path, f"{total} experts", f"the {numbers} experts of every layer")
    elif not all(replica.width == 1 for replica in stage.replicas):
        yield Problem(path, "replicas of several devices", "replicas of one device each")


def _are_uneven(stage: Stage) -> bool:
    if all(replica.width == 1 for replica in stage.replicas):
        return False
    shapes = [(r.width, r.samples, r.ratios) for r in stage.replicas for _ in range(stage.context)]
    groups = (shapes[at : at + stage.expert] for at in range(0, len(shapes), stage.expert))
    return any(len(set(group)) > 1 for group in groups)


def tensor_width_fits(plan: Plan, chain: Chain, cluster: Cluster) -> Iterator[Problem]:
    """Check that tensor-parallel groups are not too wide: a layer with h attention heads can be
    split over at most h devices."""
    for index, stage in enumerate(plan.stages):
        layers = chain.layers_of(stage)
        most = max(1, min((layer.max_tensor_width for layer in layers), default=1))
        for position, replica in enumerate(stage.replicas):
            if layers and replica.width // stage.context > most:
                parts = (
                    f" for each of the {stage.context} parts of the sequence"
                    if stage.context > 1
                    else ""
                )
                covered = f"layers {stage.first}..{stage.end - 1}"
                yield Problem(
                    f"stages[{index}].replicas[{position}].devices",
                    f"{replica.width} devices",
                    f"at most {most}{parts}, the widest split that {covered} allow",
                )


def offload_fits(plan: Plan, chain: Chain, cluster: Cluster) -> Iterator[Problem]:
    """Check that nodes have the drives that a plan names, and that a stage can offload its
    activations: it keeps all of each layer's, or only the inputs."""
    for index, stage in enumerate(plan.stages):
        path, activations = f"stages[{index}].offload", stage.offload.activations
        nodes = {cluster.node_of[name][0] for name in stage.devices if name in cluster.node_of}
        without = sorted(node.name for node in nodes if node.host_memory.nvme_size is None)
        if Tier.NVME in dict(stage.offload.parts).values() and without:
            expected = f"host, because {without[0]} has no host_memory.nvme in the cluster file"
            yield Problem(path, "nvme", expected)
        if activations is not None and stage.recompute is Recompute.SELECTIVE:
            expected = "recompute none or full in a stage that offloads activations"
            yield Problem(f"stages[{index}].recompute", "selective", expected)
        if activations is not None and plan.schedule.kind.is_split:
            expected = f"no offloaded activations with {plan.schedule.kind}, which splits backwards"
            yield Problem(path, "activations", expected)


def schedule_fits(plan: Plan, chain: Chain, cluster: Cluster) -> Iterator[Problem]:
    """Check that the schedule can be built for these stages and micro-batches, and does not
    deadlock."""
    yield from _schedule_problems(plan, plan.schedule, "schedule")


def policy_fits(plan: Plan, chain: Chain, cluster: Cluster) -> Iterator[Problem]:
    """Check that each schedule of the policy can be built, and that each rule names an edge of the
    cluster."""
    edges = sorted(cluster.edges)
    for index, rule in enumerate(plan.policy):
        if rule.edge not in edges:
            yield Problem(
                f"policy[{index}].edge",
                f'"{rule.edge}"',
                f"an edge of {cluster.name}",
                suggestion=closest(rule.edge, edges),
            )
        yield from _schedule_problems(plan, rule.schedule, f"policy[{index}].schedule")


def _schedule_problems(plan: Plan, spec: ScheduleSpec, path: str) -> Iterator[Problem]:
    num_stages, num_micro_batches = len(plan.stages), plan.num_micro_batches
    if num_stages * num_micro_batches > _MOST_ACTIONS:
        expected = f"at most {_MOST_ACTIONS // num_stages} with {num_stages} stages"
        yield Problem("num_micro_batches", str(num_micro_batches), expected)
    elif spec.chunks > 1 and spec.kind is not ScheduleKind.INTERLEAVED:
        expected = "1, because only an interleaved schedule has more"
        yield Problem(f"{path}.chunks", str(spec.chunks), expected)
    elif spec.depth is not None and not spec.kind.is_family:
        expected = f"no depth with {spec.kind}, which has its own"
        yield Problem(f"{path}.depth", f"{len(spec.depth)} depths", expected)
    elif spec.depth is not None and len(spec.depth) != num_stages:
        expected = f"one depth for each of the {num_stages} stages"
        yield Problem(f"{path}.depth", f"{len(spec.depth)} depths", expected)
    else:
        try:
            schedule = build_schedule(spec, num_stages, num_micro_batches)
        except InputError as error:
            for problem in error.problems:
                yield replace(problem, path=(problem.path or path).replace("schedule", path, 1))
            return
        try:
            check_schedule(schedule)
        except InputError as error:
            for problem in error.problems:
                yield replace(problem, path=path, found=f"{problem.path} with {problem.found}")


def collectives_fit(plan: Plan, chain: Chain, cluster: Cluster) -> Iterator[Problem]:
    """Check that each collective is chosen once, for a stage that exists, with an algorithm that
    can do it."""
    chosen = set()
    for index, choice in enumerate(plan.collectives):
        path = f"collectives[{index}]"
        if choice.stage >= len(plan.stages):
            expected = f"a stage, below {len(plan.stages)}"
            yield Problem(f"{path}.stage", str(choice.stage), expected)
            continue
        possible = algorithms(choice.collective, plan.stages[choice.stage])
        if choice.algorithm not in possible:
            expected = f"{' or '.join(possible)} for {choice.collective} of stage {choice.stage}"
            yield Problem(f"{path}.algorithm", f'"{choice.algorithm}"', expected)
        if (choice.collective, choice.stage) in chosen:
            expected = f"one choice for {choice.collective} of stage {choice.stage}"
            yield Problem(path, "a second one", expected)
        chosen.add((choice.collective, choice.stage))


def algorithms(collective: Collective, stage: Stage) -> tuple[Algorithm, ...]:
    """Return the algorithms that can do a collective of a stage.

    Unequal shards are padded or grouped. A tree only does whole sums, so it cannot do the scatters
    and gathers of ZeRO, which are halves of a sum.
    """
    if collective is Collective.TENSOR:
        uneven = (Algorithm.PADDED, Algorithm.GROUPED)
        return uneven if stage.is_uneven else (Algorithm.RING, Algorithm.TREE)
    if stage.zero:
        return Algorithm.RING, Algorithm.HIERARCHICAL
    return Algorithm.RING, Algorithm.HIERARCHICAL, Algorithm.TREE


def powersgd_fits(plan: Plan, chain: Chain, cluster: Cluster) -> Iterator[Problem]:
    """Check that PowerSGD can run the plan."""
    yield from powersgd_problems(plan)


def left_out_devices_are_idle(plan: Plan, chain: Chain, cluster: Cluster) -> Iterator[Problem]:
    """Check that the devices that a plan leaves out exist and are in no stage."""
    places = [
        (f"left_out[{index}].device", left.device) for index, left in enumerate(plan.left_out)
    ]
    yield from _unknown(places, cluster)
    used = set(plan.devices).intersection(cluster.device_index)
    for path, name in places:
        if name in used:
            yield Problem(path, f'"{name}"', "a device that no stage uses")


# All rules, in the order in which their problems are reported.
RULES: tuple[Rule, ...] = (
    batch_adds_up,
    samples_add_up,
    layers_are_covered,
    devices_exist,
    devices_work_once,
    ratios_sum_to_one,
    tensor_width_fits,
    context_fits,
    experts_fit,
    offload_fits,
    schedule_fits,
    policy_fits,
    collectives_fit,
    powersgd_fits,
    left_out_devices_are_idle,
)
