"""Show why a plan is as fast as it is, for people and for ``--json``.

The explanation covers memory, the bottleneck, and changes that would help.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from rich.table import Table
from rich.text import Text

from argosy.cluster.topology import Cluster
from argosy.cost.memory import USABLE
from argosy.cost.offload import HostUse
from argosy.document import JsonObject
from argosy.explain import DeviceMemory, Explanation, WhatIf
from argosy.explain.leftout import LEAST_GAIN
from argosy.report.marks import percent
from argosy.report.plan import collectives_in_short, devices_in_short, interval_in_words, throughput
from argosy.report.summary import critical_parts
from argosy.report.tables import MOST_PARTS, gib, named_lines, plain_table
from argosy.units import GIB, SIZE, TIME

# The largest number of settings that are listed.
_MOST_SETTINGS = 4
MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "buffers")
"""The parts of the memory that a device holds (fields of ``explain.DeviceMemory``)."""
# Shares of the time below this are not listed.
_HALF_A_PERCENT = 0.005
# Bytes of the "1 GB more memory" that a sentence of the report considers.
_MORE_MEMORY = 1e9


def memory_table(explanation: Explanation, cluster: Cluster) -> Table:
    """Return a table of peak memory in GiB by device; neighbours with equal figures share a
    line."""
    table = plain_table("device", *(f">{part}" for part in MEMORY_PARTS), ">peak", ">of", ">free")
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    for cells, group in groupby(explanation.memory, key=_memory_cells):
        *parts, free = cells
        style = "bold red" if free.startswith("-") else ""
        names = devices_in_short([memory.device for memory in group], cluster)
        table.add_row(names, *parts, Text(free, style=style))
    return table


def _memory_cells(memory: DeviceMemory) -> tuple[str, ...]:
    """Return the cells of a device: the parts, the peak, the capacity and the free memory in
    GiB."""
    amounts = [getattr(memory, part) for part in MEMORY_PARTS]
    return (
        *(gib(amount) for amount in (*amounts, memory.peak)),
        f"{memory.capacity / GIB:.0f}",
        gib(memory.free),
    )


@named_lines
def reason_table(explanation: Explanation, cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Return a table of time, bottleneck, busiest link and critical path, one per line."""
    plan, load = explanation.plan, explanation.bottleneck
    rate = throughput(plan.global_batch / explanation.seconds, plan.model.sequence_length)
    yield "iteration", f"{TIME.format(explanation.seconds)}, {rate}"
    yield "uncertainty", interval_in_words(plan, cluster, explanation.seconds)
    shares = {
        "computes": load.computing,
        "exchanges tensors": load.exchanging,
        "waits": 1 - load.busy,
    }
    spent = [
        f"{part_name} for {percent(share)}"
        for part_name, share in shares.items()
        if share >= _HALF_A_PERCENT
    ]
    yield "bottleneck", f"stage {load.stage}: it {', '.join(spent)} of the time"
    if plan.collectives:
        yield "collectives", collectives_in_short(plan)
    if explanation.edges:
        busiest = explanation.edges[0]
        yield (
            "busiest link",
            f"{busiest.edge}, {percent(busiest.utilisation)} of what it could carry",
        )
    for use in explanation.hosts:
        yield f"on {use.node}.{use.tier}", _host_use(use)
    path = critical_parts(explanation.timeline.critical_path())
    total = sum(spent for _, spent in path)
    shown = [
        (part_name, spent)
        for part_name, spent in path[:MOST_PARTS]
        if spent >= _HALF_A_PERCENT * total
    ]
    rest = total - sum(spent for _, spent in shown)
    shown += [("other", rest)] if rest >= _HALF_A_PERCENT * total else []
    yield (
        "critical path",
        ", ".join(f"{part_name} {percent(spent / total)}" for part_name, spent in shown),
    )


def _host_use(use: HostUse) -> str:
    """Describe the use of a host's memory or drive.

    For example ``12.5 GiB of 51.2 GiB that plans may use: optimizer state 9.1 GiB, activations 3.4
    GiB``.
    """
    parts = {"optimizer state": use.moments, "weights": use.weights, "activations": use.activations}
    listed = [f"{name} {SIZE.short(size)}" for name, size in parts.items() if size]
    lacks = "" if use.total <= use.capacity else ", which is too little"
    sizes = (SIZE.short(size) for size in (use.total, use.capacity))
    return f"{' of '.join(sizes)} that plans may use{lacks}: {', '.join(listed)}"


def what_if_table(explanation: Explanation) -> Table:
    """Return a table of changes with the time they would save, and whether the memory suffices."""
    table = plain_table("what if", ">iteration", ">gain", "memory")
    table.columns[0].no_wrap = False
    for what_if in sorted(explanation.improvements, key=lambda what_if: -what_if.gain):
        table.add_row(what_if.change, TIME.format(what_if.seconds), gain_in_percent(what_if.gain))
    for what_if in (*explanation.settings[:_MOST_SETTINGS], *explanation.additions):
        need = f"{SIZE.short(what_if.missing)} too little" if what_if.missing else "fits"
        table.add_row(
            what_if.change, TIME.format(what_if.seconds), gain_in_percent(what_if.gain), need
        )
    return table


def gain_in_percent(gain: float) -> str:
    """Return a relative gain as text.

    >>> gain_in_percent(0.0312), gain_in_percent(-0.5), gain_in_percent(0.0001)
    ('3.1 %', '-50.0 %', '-')
    """
    return "-" if abs(gain) < LEAST_GAIN else f"{100 * gain:.1f} %"


def memory_in_a_sentence(explanation: Explanation) -> str:
    """State whether the plan fits, and what one more GB of memory on every device would gain."""
    fullest = max(explanation.memory, key=lambda item: item.peak - item.capacity)
    if fullest.peak > fullest.capacity:
        lacks = SIZE.short(fullest.peak - fullest.capacity)
        return f"This plan cannot run: {fullest.device} lacks {lacks} of memory."
    helpful = [item for item in explanation.settings if item.gain > LEAST_GAIN]
    if not explanation.settings:
        return (
            "More memory buys this plan nothing: no stage recomputes, or exchanges weights to "
            "save memory."
        )
    if not helpful:
        return "More memory buys this plan nothing: settings that need more are no faster."
    within = [item for item in helpful if item.missing <= USABLE * _MORE_MEMORY]
    if not within:
        nearest = helpful[0]
        need = SIZE.short(nearest.missing)
        return (
            f"1 GB more memory buys this plan nothing: {nearest.change} is the nearest, and lacks "
            f"{need}."
        )
    best = max(within, key=lambda item: item.gain)
    with_what = "1 GB more memory on every device allows" if best.missing else "There is memory for"
    return f"{with_what} {best.change}, which is {gain_in_percent(best.gain)} faster."


def help_in_a_sentence(explanation: Explanation) -> str:
    """Name the two changes that would save most time."""
    fitting = [
        what_if
        for what_if in (*explanation.improvements, *explanation.settings)
        if not what_if.missing
    ]
    best = sorted(
        (what_if for what_if in fitting if what_if.gain > LEAST_GAIN),
        key=lambda what_if: -what_if.gain,
    )[:2]
    if not best:
        return "No small change would make it faster."
    changes = [f"{what_if.change} ({gain_in_percent(what_if.gain)})" for what_if in best]
    return f"Most would help {', then '.join(changes)}."


def explanation_to_dict(explanation: Explanation) -> JsonObject:
    """Return an explanation as a dict for JSON, in seconds, bytes, and shares of 1."""
    plan, path = explanation.plan, critical_parts(explanation.timeline.critical_path())
    samples_per_second = plan.global_batch / explanation.seconds
    return {
        "iteration_seconds": explanation.seconds,
        "samples_per_second": samples_per_second,
        "tokens_per_second": samples_per_second * plan.model.sequence_length,
        "memory": [_memory_to_dict(memory) for memory in explanation.memory],
        "stages": [{**vars(load), "busy": load.busy} for load in explanation.loads],
        "edges": [vars(load) for load in explanation.edges],
        "bottleneck": {
            "stage": explanation.bottleneck.stage,
            "edge": explanation.edges[0].edge if explanation.edges else None,
        },
        "critical_path": [{"what": name, "seconds": spent} for name, spent in path],
        "improvements": _what_ifs_to_list(explanation.improvements),
        "settings": _what_ifs_to_list(explanation.settings),
        "additions": _what_ifs_to_list(explanation.additions),
        **({"hosts": [vars(use) for use in explanation.hosts]} if explanation.hosts else {}),
        "runner_ups": [vars(runner_up) for runner_up in plan.runner_ups],
        "left_out": [vars(left) for left in plan.left_out],
        "left_out_tests": [vars(test) for test in explanation.left_out],
    }


def _memory_to_dict(memory: DeviceMemory) -> JsonObject:
    """Return the memory of a device as a dict for JSON, in bytes."""
    parts = {
        f"{part}_bytes": getattr(memory, part)
        for part in (*MEMORY_PARTS, "peak", "capacity", "free")
    }
    return {"device": memory.device, "kind": memory.kind, **parts}


def _what_ifs_to_list(what_ifs: Iterable[WhatIf]) -> list[JsonObject]:
    """Return what-ifs as dicts for JSON, in seconds and bytes."""
    return [
        {
            "change": what_if.change,
            "iteration_seconds": what_if.seconds,
            "gain": what_if.gain,
            "missing_bytes": what_if.missing,
        }
        for what_if in what_ifs
    ]
