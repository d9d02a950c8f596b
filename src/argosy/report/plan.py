"""Show a plan: its stages, its predicted figures, their certainty, and the plans it was preferred
to."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from rich.table import Table

from argosy.cluster.topology import Cluster
from argosy.cost.uncertainty import MEMORY_MARGIN, interval, is_close
from argosy.plan.plan import Certificate, Plan, Predicted, Recompute, Replica, Search, Stage
from argosy.report.marks import names_in_short
from argosy.report.tables import held_in_words, named_lines, plain_table
from argosy.units import SIZE, TIME, counted

# The largest number of pruning rules that are listed.
_MOST_PRUNED = 6


def plan_title(plan: Plan) -> str:
    """Return a title, as ``gpt2-xl on two-cards: 2 stages, 16 micro-batches of 4, 1f1b``."""
    stages = counted(len(plan.stages), "stage")
    batches = counted(plan.num_micro_batches, "micro-batch", "micro-batches")
    tuned = "" if plan.model.tuning.is_full else f" ({plan.model.tuning})"
    tuned += f" with PowerSGD of rank {plan.model.powersgd}" if plan.model.powersgd else ""
    head = f"{plan.model.name}{tuned} on {plan.cluster.name}: {stages}"
    return f"{head}, {batches} of {plan.micro_batch_size}, {plan.schedule!r}"


def stage_table(plan: Plan, cluster: Cluster) -> Table:
    """Return a table with a line per stage.

    ``2 x 4`` means two replicas, each of four devices that share its work.
    """
    columns = (">stage", "layers", "on", "devices", ">replicas", "samples", "recompute", ">zero")
    table = plain_table(*columns, *(["offload"] if plan.offloads else []))
    for name in ("devices", "samples"):
        column = table.columns[columns.index(name)]
        column.no_wrap, column.overflow = False, "fold"
    for index, stage in enumerate(plan.stages):
        table.add_row(
            str(index),
            f"{stage.first}..{stage.end - 1}",
            "\n".join(kinds_in_short(stage, cluster)),
            devices_in_short(stage.devices, cluster),
            "\n".join(_groups(stage)),
            samples_in_short(stage.replicas),
            "-" if stage.recompute is Recompute.NONE else str(stage.recompute),
            str(stage.zero) if stage.zero else "-",
            *((str(stage.offload).replace(",", "\n") or "-",) if plan.offloads else ()),
        )
    return table


def kinds_in_short(stage: Stage, cluster: Cluster) -> list[str]:
    """Return ``4x A100-80GB`` for every kind of device in a stage."""
    counts = Counter(cluster.device(name).kind.name for name in stage.devices)
    return [f"{count}x {kind}" for kind, count in counts.items()]


def _groups(stage: Stage) -> Iterator[str]:
    """Yield the replicas of a stage by width, and its degrees of context and expert parallelism."""
    for width, group in groupby(stage.replicas, key=lambda replica: replica.width):
        yield f"{len(list(group))} x {width}"
    if stage.context > 1:
        yield f"context {stage.context}"
    if stage.expert > 1:
        yield f"experts / {stage.expert}"


def collectives_in_short(plan: Plan) -> str:
    """Return the algorithm of every collective, with the stages that use it.

    >>> from dataclasses import replace
    >>> from argosy.plan.file import load_plan
    >>> from argosy.plan.plan import Algorithm, Collective, CollectiveChoice
    >>> choices = [CollectiveChoice(collective=Collective.WEIGHTS, stage=at, algorithm=algorithm)
    ...            for at, algorithm in enumerate((Algorithm.RING, Algorithm.TREE, Algorithm.RING))]
    >>> collectives_in_short(replace(load_plan("gpt2-xl-on-two-cards"), collectives=tuple(choices)))
    'weights ring (stages 0, 2) and tree (stage 1)'
    """
    stages: dict[str, dict[str, list[int]]] = {}
    for choice in plan.collectives:
        stages.setdefault(choice.collective, {}).setdefault(choice.algorithm, []).append(
            choice.stage
        )
    return "; ".join(
        f"{name} {' and '.join(_where(by_algorithm))}"
        for name, by_algorithm in sorted(stages.items())
    )


def _where(stages: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """Yield every algorithm with its stages; without them if all stages use one algorithm."""
    for algorithm, numbers in stages.items():
        listed = f"stage{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
        yield f"{algorithm} ({listed})" if len(stages) > 1 else algorithm


def samples_in_short(replicas: Iterable[Replica]) -> str:
    """Return the samples of a micro-batch that each replica takes.

    >>> samples_in_short([Replica(devices=("a",), samples=n) for n in (2, 2)])
    '2 each'
    >>> samples_in_short([Replica(devices=("a",), samples=n) for n in (3, 3, 1)])
    '2x 3, 1'
    """
    runs = [
        (samples, len(list(group)))
        for samples, group in groupby(replicas, key=lambda replica: replica.samples)
    ]
    if len(runs) == 1:
        samples, count = runs[0]
        return f"{samples} each" if count > 1 else str(samples)
    return ", ".join(
        f"{count}x {samples}" if count > 1 else str(samples) for samples, count in runs
    )


def devices_in_short(devices: Iterable[str], cluster: Cluster) -> str:
    """Return device names in short; a node with all its devices is listed by its own name.

    >>> from argosy.cluster.file import load_cluster
    >>> devices_in_short(["a0.0", "a0.1", "a0.2", "a0.3", "v1.0", "v1.1"], load_cluster("mixed-16"))
    'a0, v1.0..1'
    """
    chosen = set(devices)
    names: list[str] = []
    for node in cluster.nodes:
        used_devices = [name for name in node.devices if name in chosen]
        names += [node.name] if len(used_devices) == len(node.devices) else used_devices
    return names_in_short(names)


@named_lines
def figure_table(plan: Plan, cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Return the predicted figures of a plan and the effort of its search, one per line."""
    if plan.predicted is not None:
        yield "iteration", f"{TIME.format(plan.predicted.iteration_seconds)} predicted"
        yield "uncertainty", interval_in_words(plan, cluster, plan.predicted.iteration_seconds)
        yield (
            "throughput",
            throughput(plan.predicted.samples_per_second, plan.model.sequence_length),
        )
        if plan.predicted.peak_memory_bytes:
            yield "memory", _fullest(plan.predicted, cluster)
        if plan.predicted.bottleneck:
            yield "bottleneck", plan.predicted.bottleneck
    if plan.collectives:
        yield "collectives", collectives_in_short(plan)
    if plan.model.powersgd:
        rank = plan.model.powersgd
        yield (
            "what changes",
            (
                f"gradients are summed as matrices of rank {rank}, so losses differ from those of "
                "exact sums"
            ),
        )
    if plan.certificate is not None:
        yield "certificate", certificate_in_a_sentence(plan.certificate)
    if plan.search is not None:
        yield "search", _effort(plan.search)


def throughput(samples_per_second: float, sequence_length: int) -> str:
    """Return the throughput in samples and, for sequences, in tokens per second.

    >>> throughput(19.0631, 2048)
    '19.06 samples/s, 39,041 tokens/s'
    """
    tokens = (
        f", {samples_per_second * sequence_length:,.0f} tokens/s" if sequence_length > 1 else ""
    )
    return f"{samples_per_second:.4g} samples/s{tokens}"


def interval_in_words(plan: Plan, cluster: Cluster, seconds: float) -> str:
    """Describe the uncertainty, as ``1.94 s to 2.35 s: nine of ten measured steps were within 10
    %``."""
    expected = interval(plan, cluster, seconds)
    low, high = (TIME.short(bound) for bound in (expected.low, expected.high))
    error = f"{100 * expected.error:.0f} %"
    within = f"{low} to {high}: nine of ten measured steps were within {error}"
    if not expected.optimism:
        return within
    slower = f"{100 * expected.optimism:.1f} % slower than predicted"
    return f"{within}; the best of many plans is on average {slower}"


def _fullest(predicted: Predicted, cluster: Cluster) -> str:
    """Describe the device whose memory is fullest."""
    shares = {
        name: held / cluster.device(name).kind.memory for name, held in predicted.peak_memory_bytes
    }
    name = max(shares, key=lambda device: shares[device])
    held = dict(predicted.peak_memory_bytes)[name]
    capacity = SIZE.short(cluster.device(name).kind.memory)
    close = f"; it may not fit, because predictions are within {100 * MEMORY_MARGIN:.0f} %"
    limit = close if is_close(held, cluster.device(name).kind.memory) else ""
    return f"{held_in_words(held)} of {capacity} on the fullest device, {name}{limit}"


def certificate_in_a_sentence(certificate: Certificate) -> str:
    """State what is proven, and for which cost model.

    The gap is the predicted time over the lower bound, minus 1.
    """
    if certificate.cost_model is None:
        holds_for = "; its cost model is not recorded"
    else:
        holds_for = f", for the {certificate.cost_model}"
    if certificate.gap < OPTIMAL:
        return (
            f"proven {gap_in_words(certificate.gap)}: no plan of {certificate.scope} is "
            f"faster{holds_for}"
        )
    bound = TIME.format(certificate.lower_bound_seconds)
    free = certificate.free_bound_seconds
    beyond = "" if free is None else f"; of any granularity, none below {TIME.format(free)}"
    gap = gap_in_words(certificate.gap)
    return (
        f"no plan of {certificate.scope} is more than {gap} faster (bound "
        f"{bound}{beyond}){holds_for}"
    )


# A plan with a relative gap below this is optimal up to rounding.
OPTIMAL = 1e-6


def gap_in_words(gap: float) -> str:
    """Return a gap in percent, or that the plan is optimal and to which precision.

    >>> gap_in_words(0.0459), gap_in_words(2.346)
    ('4.6 %', '235 %')
    >>> gap_in_words(5.2e-10), gap_in_words(0.0)
    ('optimal (to 1e-9)', 'optimal')
    """
    if gap <= 0:
        return "optimal"
    if gap < OPTIMAL:
        return f"optimal (to 1e{max(-9, math.ceil(math.log10(gap)))})"
    return f"{100 * gap:.3g} %" if gap >= 1 else f"{100 * gap:.2g} %"


def _effort(search: Search) -> str:
    """Describe the effort of a search: plans evaluated, CPU time, and what the pruning rules
    removed."""
    removed = sorted(search.pruned, key=lambda rule: (-rule[1], rule[0]))
    rules = [f"{rule} {count:,}" for rule, count in removed if count][:_MOST_PRUNED]
    text = f"{search.candidates:,} plans judged in {TIME.short(search.cpu_seconds)} of CPU time"
    return f"{text}; removed by {', '.join(rules)}" if rules else text


def runner_up_table(plan: Plan) -> Table:
    """Return a table of the plans that came close, and why they lost."""
    table = plain_table("runner-up", ">iteration", "why it lost")
    for column in (table.columns[0], table.columns[2]):
        column.no_wrap, column.ratio = False, 1
    table.columns[0].ratio = 2
    for runner_up in plan.runner_ups:
        table.add_row(
            runner_up.description, TIME.format(runner_up.iteration_seconds), runner_up.reason
        )
    return table


def left_out(plan: Plan, cluster: Cluster) -> list[tuple[str, str]]:
    """Return the devices that the plan does not use, grouped by reason."""
    reasons: dict[str, list[str]] = {}
    for unused in plan.left_out:
        reasons.setdefault(unused.reason, []).append(unused.device)
    return [(devices_in_short(names, cluster), reason) for reason, names in reasons.items()]


def left_out_lines(plan: Plan, cluster: Cluster) -> list[str]:
    """Return a line for each group of devices that the plan does not use."""
    return [f"left out: {names}: {reason}" for names, reason in left_out(plan, cluster)]
