"""Hypothesis strategies for the vocabulary of Argosy, shared by all tests.

Amounts and knots here are multiples of 1/8 and rates powers of two wherever an outage is possible:
floating point is then exact, so that two correct programs agree even on work that ends at the very
moment at which a link goes down.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from argosy.cluster.device import Device, DeviceKind
from argosy.cluster.file import build_cluster
from argosy.cluster.topology import Cluster, Link, Medium, Node, Wire
from argosy.cluster.trace import Trace
from argosy.document import Document
from argosy.dtype import Dtype
from argosy.plan.plan import ClusterRef, ModelRef, Plan, Recompute, Replica, Stage
from argosy.schedule import Action, ActionKind, Schedule, ScheduleKind, ScheduleSpec, build_schedule
from argosy.schedule.action import worker_of
from argosy.sim.engine.graph import TaskGraph
from argosy.workload.chain import Chain, Layer
from benchmarks.bare_pipeline import StageCost, pipeline_graph


@st.composite
def traces(draw: st.DrawFn, *, max_steps: int = 8, may_end_at_zero: bool = True) -> Trace:
    """Step functions of up to ``max_steps`` knots, with segments at 0 among them.

    Knots are multiples of 1/8 s and values are 0 or from 1/16 to 1000, so that sums stay well
    conditioned.
    """
    values = st.one_of(st.just(0.0), st.floats(1 / 16, 1000))
    gaps = draw(st.lists(st.integers(1, 800), max_size=max_steps - 1))
    times, held = [0.0], [draw(values)]
    for gap in gaps:
        times.append(times[-1] + gap / 8)
        held.append(draw(values))
    if held[-1] == 0 and not may_end_at_zero:
        held[-1] = 1.0
    return Trace(tuple(times), tuple(held))


KIND = DeviceKind(
    name="plain",
    vendor="nobody",
    memory=1e12,
    memory_bandwidth=1e12,
    flops=((Dtype.BF16, 1e12),),
    source="made up",
)
ONE, ZERO = Trace.constant(1.0), Trace.constant(0.0)

eighths = st.integers(1, 64).map(lambda count: count / 8)


@st.composite
def exact_traces(
    draw: st.DrawFn, *, max_steps: int = 5, may_stop: bool = True, may_end: bool = False
) -> Trace:
    """Step functions with which floating point is exact; ``may_stop`` at 0 for a while, ``may_end``
    there."""
    values = st.sampled_from((1.0, 0.5, 2.0, 0.25, 4.0, *((0.0,) if may_stop else ())))
    times = draw(st.lists(st.integers(1, 400), max_size=max_steps - 1, unique=True).map(sorted))
    held = [draw(values) for _ in range(len(times) + 1)]
    if not held[-1] and not may_end:
        held[-1] = 1.0
    return Trace((0.0, *(time / 8 for time in times)), tuple(held))


def full_mesh(
    num_devices: int,
    *,
    bandwidths: Sequence[Trace] = (ONE,),
    latencies: Sequence[Trace] = (ZERO,),
    speeds: Sequence[Trace] = (ONE,),
) -> Cluster:
    """One device per node, and between any two nodes a wire of their own: nothing is shared. The
    traces are dealt out in turn to the links (two per wire) and devices."""
    names = [f"n{index}" for index in range(num_devices)]
    bandwidth, latency, speed = (itertools.cycle(each) for each in (bandwidths, latencies, speeds))
    links: list[Link] = []
    wires = []
    for one, other in itertools.combinations(names, 2):
        edge = f"{one}-{other}"
        links += [
            Link(name=f"{edge}.{way}", edge=edge, bandwidth=next(bandwidth), latency=next(latency))
            for way in ("forward", "back")
        ]
        ends = {"nodes": frozenset([one]), "far_nodes": frozenset([other])}
        wires.append(
            Wire(name=edge, **ends, forward=len(links) - 2, back=len(links) - 1, bypasses_nic=True)
        )
    return Cluster(
        name="mesh",
        nodes=tuple(Node(name=name, devices=(f"{name}.0",)) for name in names),
        devices=tuple(
            Device(name=f"{name}.0", node=name, kind=KIND, speed=next(speed)) for name in names
        ),
        links=tuple(links),
        wires=tuple(wires),
    )


def star(num_devices: int, *, bandwidths: Sequence[Trace] = (ONE,), per_node: int = 1) -> Cluster:
    """Nodes of ``per_node`` devices on one switch: a node's NIC is shared, and so is the bus inside
    it."""
    bandwidth = itertools.cycle(bandwidths)
    links: list[Link] = []
    nodes: list[Node] = []
    for first in range(0, num_devices, per_node):
        name = f"n{len(nodes)}"
        devices = tuple(f"{name}.{index}" for index in range(min(per_node, num_devices - first)))
        edges = {
            f"{name}.bus": f"{name}.bus",
            f"{name}.nic.out": f"{name}.nic",
            f"{name}.nic.in": f"{name}.nic",
        }
        links += [
            Link(name=link, edge=edge, bandwidth=next(bandwidth), latency=ZERO)
            for link, edge in edges.items()
        ]
        bus = (len(links) - 3,) * len(devices)
        medium = Medium(name="bus", outward=bus, inward=bus)
        nodes.append(
            Node(name=name, devices=devices, media=(medium,), nic=(len(links) - 2, len(links) - 1))
        )
    return Cluster(
        name="star",
        nodes=tuple(nodes),
        devices=tuple(
            Device(name=name, node=node.name, kind=KIND) for node in nodes for name in node.devices
        ),
        links=tuple(links),
    )


@st.composite
def schedules(
    draw: st.DrawFn,
    *,
    max_stages: int = 6,
    max_micro_batches: int = 12,
    kinds: Sequence[ScheduleKind] = tuple(ScheduleKind),
    dedicated: bool = False,
) -> Schedule:
    """Schedules of every kind. ``dedicated``: no two channels between the same two workers in the
    same direction, which an interleaved schedule on two workers has, and a V-shaped one on any."""
    kind = draw(st.sampled_from([kind for kind in kinds if max_stages > 1 or not kind.is_v]))
    if kind is ScheduleKind.INTERLEAVED:
        counts = [
            count for count in (1, 2, 3) if count <= max_stages and not (dedicated and count == 2)
        ]
        workers = draw(st.sampled_from(counts))
        chunks = draw(st.integers(1, max(1, max_stages // workers)))
        count = workers * draw(st.integers(1, max(1, max_micro_batches // workers)))
        return build_schedule(ScheduleSpec(kind=kind, chunks=chunks), workers * chunks, count)
    if kind.is_v:
        workers = 1 if dedicated else draw(st.integers(1, max(1, max_stages // 2)))
        least = 2 * workers if kind is ScheduleKind.DUALPIPE_V else 1
        return build_schedule(
            ScheduleSpec(kind=kind),
            2 * workers,
            draw(st.integers(least, max(least, max_micro_batches))),
        )
    num_stages = draw(st.integers(1, max_stages))
    count = draw(st.integers(1, max_micro_batches))
    spec = ScheduleSpec(kind=kind)
    if kind is ScheduleKind.KFKB:
        spec = ScheduleSpec(kind=kind, k=draw(st.integers(1, count)))
    elif kind is ScheduleKind.EAGER and draw(st.booleans()):
        depth = draw(st.lists(st.integers(1, count), min_size=num_stages, max_size=num_stages))
        spec = ScheduleSpec(kind=kind, depth=tuple(sorted(depth, reverse=True)))
    return build_schedule(spec, num_stages, count)


@st.composite
def disturbed_schedules(
    draw: st.DrawFn, *, max_stages: int = 4, max_micro_batches: int = 5
) -> Schedule:
    """Complete schedules in an order that may be impossible: some actions swapped with a later one
    of their row, some backwards cut in two."""
    schedule = draw(schedules(max_stages=max_stages, max_micro_batches=max_micro_batches))
    rows = []
    for row in schedule.rows:
        actions: list[Action] = []
        for action in row:
            if action.kind is ActionKind.BACKWARD and draw(st.booleans()):
                halves = (ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT)
                actions += [Action(action.stage, half, action.micro_batch) for half in halves]
            else:
                actions.append(action)
        for _ in range(draw(st.integers(0, 2))):
            one, other = (draw(st.integers(0, len(actions) - 1)) for _ in range(2))
            actions[one], actions[other] = actions[other], actions[one]
        rows.append(tuple(actions))
    return replace(schedule, rows=tuple(rows))


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A schedule with costs on a cluster; worker w runs on the w-th device."""

    schedule: Schedule
    costs: tuple[StageCost, ...]
    cluster: Cluster

    @cached_property
    def graph(self) -> TaskGraph:
        names = [device.name for device in self.cluster.devices]
        return pipeline_graph(self.schedule, self.costs, names[: self.schedule.num_workers])


@st.composite
def stage_costs(draw: st.DrawFn, num_stages: int) -> tuple[StageCost, ...]:
    """Costs that differ from stage to stage; some stages hand on nothing."""
    amounts = st.one_of(st.just(0.0), eighths)
    return tuple(
        StageCost(
            forward=draw(eighths),
            backward=draw(eighths),
            output_bytes=draw(amounts),
            activation_bytes=draw(amounts),
        )
        for _ in range(num_stages)
    )


@st.composite
def pipelines(
    draw: st.DrawFn,
    *,
    of: st.SearchStrategy[Schedule] | None = None,
    changing: bool = True,
    may_end: bool = False,
    latency: bool = True,
) -> Pipeline:
    """Pipelines on wires of their own, that change and go down for a while, with latencies that
    change."""
    schedule = draw(schedules(dedicated=True) if of is None else of)
    most = 5 if changing else 1
    traces = exact_traces(max_steps=most, may_stop=changing, may_end=may_end)
    few = st.lists(traces, min_size=1, max_size=3)
    quick = st.lists(
        exact_traces(max_steps=min(3, most)).map(lambda trace: trace.scaled(0.25)), max_size=2
    )
    return Pipeline(
        schedule=schedule,
        costs=draw(stage_costs(schedule.num_stages)),
        cluster=full_mesh(
            schedule.num_workers,
            bandwidths=draw(few),
            latencies=(draw(quick) if latency else []) or [ZERO],
            speeds=draw(few),
        ),
    )


@st.composite
def cluster_files(
    draw: st.DrawFn, *, uniform: bool = False, changing: bool = True
) -> dict[str, Any]:
    """Contents of cluster files: one or two groups of nodes with media, NICs, sometimes racks, a
    bus that the host shares, media in conflict, changes. ``uniform``: all devices and nodes alike,
    one route between any two."""

    def rate() -> str:
        return f"{draw(st.sampled_from((1, 2, 3, 5, 8)))} GB/s"

    def delay() -> str:
        return f"{draw(st.sampled_from((0, 1, 30)))} ms"

    groups = []
    for name in "ab"[: 1 if uniform else draw(st.integers(1, 2))]:
        media: list[dict[str, Any]] = [
            {"medium": "nvlink", "bandwidth": rate(), "latency": delay()}
        ]
        group: dict[str, Any] = {
            "name": name,
            "count": draw(st.integers(1, 3 if uniform else 2)),
            "devices": {"kind": "A100-80GB", "count": draw(st.integers(1, 3))},
            "intra": media,
            "nic": {"bandwidth": rate(), "latency": delay()},
        }
        if not uniform and draw(st.booleans()):
            media.append({"medium": "pcie", "bandwidth": rate(), "shared": draw(st.booleans())})
            group["conflicts"] = [["nvlink", "pcie"]] if draw(st.booleans()) else []
        groups.append(group)
    content: dict[str, Any] = {"name": "drawn", "nodes": groups}
    if not uniform and draw(st.booleans()):
        uplink = {"bandwidth": rate(), "latency": delay()}
        content["switches"] = [{"name": "rack0", "nodes": ["a0"], "uplink": uplink}]
    if not uniform and draw(st.booleans()):
        content["shared"] = [{"name": "bus", "edges": ["a0.nic"], "bandwidth": rate()}]
    if changing and draw(st.booleans()):
        times = draw(st.lists(st.integers(1, 60), min_size=1, max_size=4, unique=True).map(sorted))
        steps = [[f"{time} s", rate() if draw(st.booleans()) else "0 GB/s"] for time in times]
        content["changes"] = [{"link": "a*.nic", "steps": [*steps, ["61 s", rate()]]}]
        slow = draw(st.sampled_from((0.5, 0, 2)))
        content["changes"] += [{"device": "a0.0", "steps": [["3 s", slow], ["9 s", 1.0]]}]
    return content


def cluster_of(content: dict[str, Any]) -> Cluster:
    """A cluster from the fields of its file, with devices whose figures are round."""
    cluster = build_cluster(Document("cluster", content, {}), folder=Path())
    return replace(cluster, devices=tuple(replace(device, kind=KIND) for device in cluster.devices))


@st.composite
def chains(draw: st.DrawFn, *, max_layers: int = 6) -> Chain:
    """Layers of seconds and gigabytes; sometimes the last shares weights with the first, or one
    between them, too."""
    count = draw(st.integers(2, max_layers))
    tied = {count - 1, draw(st.integers(1, count - 1))} if draw(st.booleans()) else set()
    layers = []
    for index in range(count):
        flop = draw(eighths) * 1e11
        layers.append(
            Layer(
                name=f"layer{index}",
                kind="block",
                forward_flop=flop,
                backward_flop=2 * flop,
                parameters=draw(st.integers(1, 8)) * 10**8,
                activation_bytes=draw(eighths) * 1e9,
                output_bytes=draw(eighths) * 1e8,
                reduced_bytes=draw(eighths) * 1e8,
                max_tensor_width=4,
                tied_to=0 if index in tied else None,
                tied_parameters=10**8 if index in tied else 0,
            )
        )
    return Chain(name="drawn", layers=tuple(layers), sequence_length=1, dtype=Dtype.BF16)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A plan with the model and the cluster it is for."""

    plan: Plan
    chain: Chain
    cluster: Cluster


@st.composite
def plans(draw: st.DrawFn, *, clusters: st.SearchStrategy[dict[str, Any]] | None = None) -> Problem:
    """Plans of every shape: replicas and tensor groups of unequal sizes and shares, ZeRO,
    recomputation, all kinds of schedule, devices left out."""
    cluster = cluster_of(draw(cluster_files() if clusters is None else clusters))
    chain = draw(chains())
    names = draw(st.permutations([device.name for device in cluster.devices]))
    kind = draw(st.sampled_from(tuple(ScheduleKind)))
    chunks = 2 if kind.is_chunked else 1
    num_groups = draw(st.integers(1, min(3, len(names), len(chain.layers) // chunks)))
    cuts = draw(_cuts(len(names), num_groups))
    teams = [draw(_replicas(names[first:end])) for first, end in itertools.pairwise(cuts)]
    bounds = draw(_cuts(len(chain.layers), num_groups * chunks))
    bounds = [*bounds[:-1], len(chain.layers)]
    stages = [
        Stage(
            first=first,
            end=end,
            replicas=teams[worker_of(kind, index, num_groups)],
            zero=draw(st.integers(0, 3)),
            recompute=draw(st.sampled_from(Recompute)),
        )
        for index, (first, end) in enumerate(itertools.pairwise(bounds))
    ]
    count = chunks * num_groups * draw(st.integers(1, 2)) if chunks > 1 else draw(st.integers(1, 6))
    plan = Plan(
        model=ModelRef(name=chain.name, sequence_length=1, dtype=chain.dtype),
        cluster=ClusterRef.of(cluster),
        global_batch=_MICRO_BATCH * count,
        micro_batch_size=_MICRO_BATCH,
        num_micro_batches=count,
        schedule=ScheduleSpec(
            kind=kind, k=draw(st.integers(1, 3)), chunks=1 if kind.is_v else chunks
        ),
        stages=tuple(stages),
    )
    return Problem(plan=plan, chain=chain, cluster=cluster)


_MICRO_BATCH = 6


@st.composite
def _cuts(draw: st.DrawFn, length: int, parts: int) -> list[int]:
    """0 and ``parts`` further places, increasing, up to ``length``: each part has at least one
    item."""
    places = st.lists(st.integers(1, length), min_size=parts, max_size=parts, unique=True)
    return [0, *sorted(draw(places))]


@st.composite
def _replicas(draw: st.DrawFn, names: Sequence[str]) -> tuple[Replica, ...]:
    groups: list[tuple[str, ...]] = []
    rest = list(names)
    while rest and len(groups) < 3:
        width = draw(st.integers(1, min(2, len(rest))))
        groups.append(tuple(rest[:width]))
        rest = rest[width:]
    cuts = draw(_cuts(_MICRO_BATCH, len(groups)))
    shares = [end - first for first, end in itertools.pairwise([*cuts[:-1], _MICRO_BATCH])]
    return tuple(
        Replica(
            devices=group,
            samples=samples,
            ratios=(0.75, 0.25) if len(group) == 2 and draw(st.booleans()) else (),
        )
        for group, samples in zip(groups, shares, strict=True)
    )


json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-2, 3),
        st.sampled_from(
            (
                10**30,
                0.5,
                float("nan"),
                float("inf"),
                "",
                "a0",
                "*",
                "1 GB/s",
                "3 s",
                "1 Gb/s",
                "kfkb",
            )
        ),
        st.text(max_size=4),
    ),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=5,
)


@st.composite
def mutated_json(draw: st.DrawFn, value: Any) -> Any:
    """JSON in which one value, anywhere, is something else or gone."""
    if isinstance(value, dict | list) and value and draw(st.integers(0, 9)):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = draw(st.sampled_from(keys))
        changed = value.copy()
        if draw(st.integers(0, 9)):
            changed[key] = draw(mutated_json(value[key]))
        else:
            del changed[key]
        return changed
    return draw(json_values)
