"""Enumerate and price all plans of a tiny planning problem without any code of the product.

The oracle reads and writes files only: it writes the model, the cluster and the constants that
``argosy plan`` reads, and reads the plan that this command writes. It has its own roofline, its own
memory account, its own collectives and its own event simulation, written from the equations that
``docs/math.md`` publishes. Replicas have one device each; sequences and experts are not split.

    (1)  forward  = max(n FLOP_f / (a_f P) + p (weights + n kept) / H, floor_f), summed over layers
    (2)  backward = max(n FLOP_b / (a_b P) + 2 p (weights + n kept) / H, floor_b), and one more
         forward under full recomputation
    (3)  update   = 2 (weights + gradients + optimizer state on the device) / H
    (4)  flows have max-min fair rates, and arrive one latency after their last byte has left
    (5)  a ring passes (n - 1) / n of the bytes from each device to the next; n - 1 latencies
    (6)  a tree passes half of the bytes along each of two binary trees; floor(log2 n) latencies
    (7)  a stage fits if state + gathered layer + samples x (dropped layer + in flight x kept +
         (2 k + 1) x largest output) is at most 92 % of a device's memory
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

USABLE = 0.92
WEIGHT, GRADIENT, OPTIMIZER = 2, 2, 12
"""Bytes per weight in bf16 with AdamW: weight; gradient; two moments and a copy in fp32."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    forward_flop: float
    backward_flop: float
    parameters: int
    kept: float
    output: float


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node with devices of one kind; rates are in bytes/s and FLOP/s."""

    name: str
    devices: int
    flops: float
    memory: float
    memory_bandwidth: float
    nic: float
    nic_latency: float
    bus: float
    bus_latency: float

    @property
    def names(self) -> list[str]:
        return [f"{self.name}0.{index}" for index in range(self.devices)]


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The constants of (1) and (2), which a calibration file states."""

    forward_peak: float = 0.6
    backward_peak: float = 0.5
    passes: float = 2.0
    forward_floor: float = 0.0
    backward_floor: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Problem:
    layers: tuple[Layer, ...]
    nodes: tuple[Node, ...]
    global_batch: int
    schedules: tuple[tuple[str, int], ...]
    """Kinds of schedules, each with its k."""
    constants: Constants = Constants()

    @property
    def node_of(self) -> dict[str, Node]:
        return {name: node for node in self.nodes for name in node.names}

    def write(self, folder: Path) -> list[str]:
        """Write the files that describe the problem, and return the arguments of ``argosy``."""
        (folder / "model.json").write_text(json.dumps(_model_file(self.layers)))
        (folder / "cluster.toml").write_text(_cluster_file(self.nodes))
        constants = {**vars(self.constants), "attention_peak": 0.5}
        calibration = {"version": 1, "constants": constants}
        (folder / "constants.json").write_text(json.dumps(calibration))
        texts = [f"{kind}:{k}" if kind == "kfkb" else kind for kind, k in self.schedules]
        named = [text for schedule in texts for text in ("--schedule", schedule)]
        files = ["-m", str(folder / "model.json"), "-c", str(folder / "cluster.toml")]
        files += ["--calibration", str(folder / "constants.json")]
        output = ["-q", "-o", str(folder / "plan.json")]
        return ["plan", *files, "-b", str(self.global_batch), "--max-width", "1", *named, *output]


def _model_file(layers: Sequence[Layer]) -> dict[str, Any]:
    """Return a profile that describes layers; its one row is of a device that no cluster has."""
    row = {"layer": "layer0", "micro_batch": 1, "tensor_width": 1, "dtype": "bf16"}
    described = [
        {
            "name": f"layer{index}",
            "kind": f"kind{index}",
            "parameters": layer.parameters,
            "activation_bytes": layer.kept,
            "output_bytes": layer.output,
            "forward_flop": layer.forward_flop,
            "backward_flop": layer.backward_flop,
        }
        for index, layer in enumerate(layers)
    ]
    rows = [{**row, "forward_seconds": 1.0, "backward_seconds": 1.0}]
    return {"version": 1, "device": "none", "model": "m", "rows": rows, "layers": described}


def _cluster_file(nodes: Sequence[Node]) -> str:
    text = 'name = "tiny"\n'
    for node in nodes:
        text += f"""
[[kinds]]
name = "kind-{node.name}"
memory = "{node.memory:.0f} B"
memory_bandwidth = "{node.memory_bandwidth:.0f} B/s"
flops = {{ bf16 = "{node.flops:.0f} FLOP/s" }}

[[nodes]]
name = "{node.name}"
devices = {{ kind = "kind-{node.name}", count = {node.devices} }}
intra = [{{ medium = "bus", bandwidth = "{node.bus:.0f} B/s", latency = "{node.bus_latency} s" }}]
nic = {{ bandwidth = "{node.nic:.0f} B/s", latency = "{node.nic_latency} s" }}
"""
    return text


@dataclass(frozen=True, kw_only=True)
class Stage:
    first: int
    end: int
    devices: tuple[str, ...]
    samples: tuple[int, ...]
    recompute: bool = False
    zero: int = 0
    algorithm: str | None = None
    """How gradients go around; None: the algorithm that is fastest without other traffic."""

    @property
    def layers(self) -> range:
        return range(self.first, self.end)


@dataclass(frozen=True, kw_only=True)
class Plan:
    micro_batches: int
    schedule: tuple[str, int]
    stages: tuple[Stage, ...]

    @property
    def depths(self) -> list[int]:
        """Return the number of forwards that each stage runs before its first backward."""
        kind, k = self.schedule
        count = len(self.stages)
        behind = range(count, 0, -1)
        limits = {
            "gpipe": [self.micro_batches] * count,
            "1f1b": list(behind),
            "eager-1f1b": [2 * left - 1 for left in behind],
            "kfkb": [k * left for left in behind],
        }[kind]
        return [min(self.micro_batches, limit) for limit in limits]

    @property
    def group(self) -> int:
        kind, k = self.schedule
        return {"gpipe": self.micro_batches, "kfkb": k}.get(kind, 1)


def read_plan(text: str) -> Plan:
    """Read a plan file; it contains only what the oracle prices."""
    content = json.loads(text)
    algorithms = {item["stage"]: item["algorithm"] for item in content.get("collectives", [])}
    stages = []
    for index, stage in enumerate(content["stages"]):
        assert stage.get("context", 1) == stage.get("expert", 1) == 1
        assert stage.get("recompute", "none") in ("none", "full")
        assert not stage.get("offload")
        replicas = stage["replicas"]
        assert all(len(replica["devices"]) == 1 for replica in replicas)
        stages.append(
            Stage(
                first=stage["layers"][0],
                end=stage["layers"][1],
                devices=tuple(replica["devices"][0] for replica in replicas),
                samples=tuple(replica["samples"] for replica in replicas),
                recompute=stage.get("recompute", "none") == "full",
                zero=stage.get("zero", 0),
                algorithm=algorithms.get(index, "ring"),
            )
        )
    schedule = content["schedule"]
    plan = Plan(
        micro_batches=content["num_micro_batches"],
        schedule=(schedule["kind"], schedule.get("k", 1)),
        stages=tuple(stages),
    )
    assert schedule.get("depth") in (None, plan.depths)
    return plan


# Prices


@dataclass(frozen=True, kw_only=True)
class Price:
    """The cost of one micro-batch, and of the update, on one device of a stage."""

    forward: float
    backward: float
    update: float
    state: float
    kept: float
    dropped: float
    """Bytes that a backward computes again at a time."""
    gathered: tuple[float, float]
    """Bytes of the largest layer that ZeRO holds whole for a moment, in a forward and a
    backward."""


def price(problem: Problem, stage: Stage, device: str, samples: int) -> Price:
    node, constants = problem.node_of[device], problem.constants
    layers = [problem.layers[index] for index in stage.layers]
    forward = backward = 0.0
    for layer in layers:
        moved = constants.passes * (WEIGHT * layer.parameters + samples * layer.kept)
        traffic = moved / node.memory_bandwidth
        ahead = samples * layer.forward_flop / (constants.forward_peak * node.flops) + traffic
        back = samples * layer.backward_flop / (constants.backward_peak * node.flops) + 2 * traffic
        ahead = max(ahead, constants.forward_floor)
        forward += ahead
        backward += max(back, constants.backward_floor) + (ahead if stage.recompute else 0.0)
    parameters, holders = sum(layer.parameters for layer in layers), len(stage.devices)
    sharded = [holders if stage.zero >= level else 1 for level in (3, 2, 1)]
    widths = (WEIGHT, GRADIENT, OPTIMIZER)
    state = sum(parameters * width / among for width, among in zip(widths, sharded, strict=True))
    kept = [layer.kept for layer in layers]
    if stage.recompute:
        kept = [problem.layers[index - 1].output if index else 0.0 for index in stage.layers]
    largest = WEIGHT * max(layer.parameters for layer in layers)
    times = (0.0, 0.0)
    if holders > 1 and stage.zero >= 2:
        times = (2 + 1 / holders if stage.zero == 3 else 0.0, stage.zero + 1 / holders)
    return Price(
        forward=forward,
        backward=backward,
        update=2 * state / node.memory_bandwidth,
        state=state,
        kept=samples * sum(kept),
        dropped=samples * max(layer.kept for layer in layers) if stage.recompute else 0.0,
        gathered=(times[0] * largest, times[1] * largest),
    )


def fits(problem: Problem, plan: Plan) -> bool:
    """Return whether (7) holds on every device."""
    largest = max((layer.output for layer in problem.layers[:-1]), default=0.0)
    for stage, depth in zip(plan.stages, plan.depths, strict=True):
        for device, samples in zip(stage.devices, stage.samples, strict=True):
            cost = price(problem, stage, device, samples)
            held = cost.state + cost.gathered[1] + cost.dropped + depth * cost.kept
            held += samples * (2 * plan.group + 1) * largest
            if held > USABLE * problem.node_of[device].memory:
                return False
    return True


# Links


@dataclass(frozen=True)
class Flow:
    links: tuple[str, ...]
    bytes: float
    latency: float


class Network:
    """The links of a problem: a bus in each node, and NICs on one switch that never blocks."""

    def __init__(self, problem: Problem) -> None:
        self.node_of = problem.node_of
        self.rates: dict[str, float] = {}
        for name, node in self.node_of.items():
            self.rates |= {f"{name} out": node.bus, f"{name} in": node.bus}
            self.rates |= {f"{node.name} out": node.nic, f"{node.name} in": node.nic}

    def flow(self, source: str, target: str, num_bytes: float) -> Flow:
        here, there = self.node_of[source], self.node_of[target]
        if here is there:
            return Flow((f"{source} out", f"{target} in"), num_bytes, here.bus_latency)
        latency = here.nic_latency + there.nic_latency
        return Flow((f"{here.name} out", f"{there.name} in"), num_bytes, latency)

    def shared(self, flows: Sequence[Flow]) -> list[float]:
        """Return max-min fair rates: fill all flows equally until a link is full, and repeat."""
        rates = [0.0] * len(flows)
        free, growing = dict(self.rates), set(range(len(flows)))
        while growing:
            users = {link: [at for at in growing if link in flows[at].links] for link in free}
            steps = {link: free[link] / len(at) for link, at in users.items() if at}
            step = min(steps.values())
            full = [link for link, room in steps.items() if room <= step * (1 + 1e-12)]
            for at in growing:
                rates[at] += step
                for link in flows[at].links:
                    free[link] -= step
            growing -= {at for link in full for at in users[link]}
        return rates

    def alone(self, flows: Sequence[Flow], rounds: int) -> float:
        """Return the seconds of flows that begin together, if each link divides its time."""
        load: dict[str, float] = {}
        for flow in flows:
            for link in flow.links:
                load[link] = load.get(link, 0.0) + flow.bytes / self.rates[link]
        ends = [max(load[link] for link in flow.links) + rounds * flow.latency for flow in flows]
        return max(ends, default=0.0)

    def around(
        self, devices: Sequence[str], num_bytes: float, algorithm: str
    ) -> tuple[list[Flow], int]:
        """Return the flows of one half of an all-reduce by (5) or (6), and its latencies."""
        nodes: dict[str, list[str]] = {}
        for name in devices:
            nodes.setdefault(self.node_of[name].name, []).append(name)
        ordered = [name for members in nodes.values() for name in members]
        pairs: dict[tuple[str, str], float] = {}

        def add(source: str, target: str, share: float) -> None:
            pairs[source, target] = pairs.get((source, target), 0.0) + share

        if algorithm != "ring" and len(nodes) > 1:
            for members in nodes.values():
                for left, right in itertools.pairwise(members):
                    add(left, right, 0.5)
                    add(right, left, 0.5)
            ordered = [members[0] for members in nodes.values()]
        count = len(ordered)
        if algorithm == "tree":
            for order in (ordered, ordered[::-1]):
                for child in range(1, count):
                    add(order[child], order[(child - 1) // 2], 0.25)
                    add(order[(child - 1) // 2], order[child], 0.25)
            rounds = int(math.log2(count))
        else:
            for at, name in enumerate(ordered):
                add(name, ordered[(at + 1) % count], (count - 1) / count)
            rounds = count - 1
        return [self.flow(*pair, share * num_bytes) for pair, share in pairs.items()], rounds

    def fastest(self, stage: Stage, num_bytes: float) -> str:
        """Return the algorithm that takes the least time without other traffic."""

        def seconds(algorithm: str) -> float:
            flows, rounds = self.around(stage.devices, 2 * num_bytes, algorithm)
            return round(self.alone(flows, 2 * rounds), 12)

        return min(("ring", "hierarchical", *(() if stage.zero else ("tree",))), key=seconds)


# Simulation


@dataclass(eq=False)
class Work:
    """A computation, or flows that begin together."""

    seconds: float = 0.0
    flows: list[Flow] = field(default_factory=list)
    rounds: int = 1
    after: list[Work] = field(default_factory=list)
    behind: Work | None = None
    """Work on the same channel, whose last byte must have left."""
    takes: tuple[str, float] = ("", 0.0)
    frees: tuple[str, float] = ("", 0.0)
    sent: float = math.inf
    """The time at which its last byte has left."""
    end: float = math.inf


class Iteration:
    """One iteration of a plan as work, and the time at which it ends."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self.problem, self.plan = problem, plan
        self.network = Network(problem)
        self.work: list[Work] = []
        self.prices = [
            [
                price(problem, stage, *pair)
                for pair in zip(stage.devices, stage.samples, strict=True)
            ]
            for stage in plan.stages
        ]
        self.last: dict[str, Work] = {}
        """By device, its latest computation."""
        self.channels: dict[tuple[str, str, bool], Work] = {}
        self.inbox: dict[tuple[str, int, bool], list[Work]] = {}
        """By device, micro-batch and direction, the transfers that a computation waits for."""
        self.exchanged: dict[int, Work] = {}
        """By stage, its latest gather or scatter."""
        self.begun: dict[str, list[Work]] = {}
        """By device, the computation before its latest one."""
        self._build()
        self.seconds = self._play()

    def _build(self) -> None:
        rows = [self._row(depth) for depth in self.plan.depths]
        done: set[tuple[int, str, int]] = set()
        count = len(rows)
        while any(rows):
            for index, row in enumerate(rows):
                while row:
                    way, batch = row[0]
                    needed = (index - 1, "F", batch) if way == "F" else (index + 1, "B", batch)
                    if 0 <= needed[0] < count and needed not in done:
                        break
                    done.add((index, *row.pop(0)))
                    self._act(index, batch, forward=way == "F")
        for index in range(count):
            self._finish(index)

    def _row(self, depth: int) -> list[tuple[str, int]]:
        """Return the actions of a stage: ``depth`` forwards, then groups of each in turn."""
        total, group = self.plan.micro_batches, self.plan.group
        row = [("F", batch) for batch in range(depth)]
        ahead, back = depth, 0
        while back < total:
            some = range(back, min(back + group, total))
            row += [("B", batch) for batch in some]
            row += [("F", batch) for batch in range(ahead, min(ahead + group, total))]
            ahead, back = min(ahead + group, total), some.stop
        return row

    def _add(self, work: Work) -> Work:
        self.work.append(work)
        return work

    def _act(self, index: int, batch: int, *, forward: bool) -> None:
        stage = self.plan.stages[index]
        shares = len(stage.devices) > 1
        gathered = [self._gather(index)] if shares and stage.zero == 3 else []
        for device, cost in zip(stage.devices, self.prices[index], strict=True):
            before = [self.last[device]] if device in self.last else []
            arrived = self.inbox.get((device, batch, forward), [])
            received = sum(flow.bytes for work in arrived for flow in work.flows)
            passing = cost.gathered[0] if forward else cost.gathered[1] + cost.dropped
            work = Work(
                seconds=cost.forward if forward else cost.backward,
                after=[*before, *arrived, *gathered],
                takes=(device, passing + (cost.kept if forward else 0.0)),
                frees=(device, passing + received + (0.0 if forward else cost.kept)),
            )
            self.begun[device] = before
            self.last[device] = self._add(work)
        if not forward and shares and stage.zero >= 2:
            self._pass_weights(index, [self.last[device] for device in stage.devices])
        target = index + 1 if forward else index - 1
        if 0 <= target < len(self.plan.stages):
            self._send(index, target, batch, forward=forward)

    def _send(self, index: int, target: int, batch: int, *, forward: bool) -> None:
        """Send each replica of the other stage the samples that both hold."""
        source, taker = self.plan.stages[index], self.plan.stages[target]
        per_sample = self.problem.layers[max(source.first, taker.first) - 1].output
        for giving, (start, end) in zip(source.devices, _spans(source.samples), strict=True):
            for taking, (first, last) in zip(taker.devices, _spans(taker.samples), strict=True):
                common = min(end, last) - max(start, first)
                if common <= 0:
                    continue
                flow = self.network.flow(giving, taking, common * per_sample)
                channel = (giving, taking, forward)
                work = Work(
                    flows=[flow],
                    after=[self.last[giving]],
                    behind=self.channels.get(channel),
                    takes=(taking, flow.bytes),
                )
                self.channels[channel] = self._add(work)
                self.inbox.setdefault((taking, batch, forward), []).append(work)

    def _bytes(self, index: int) -> float:
        layers = self.plan.stages[index].layers
        return float(GRADIENT * sum(self.problem.layers[at].parameters for at in layers))

    def _gather(self, index: int) -> Work:
        """Gather weights while the previous action of the stage computes."""
        devices = self.plan.stages[index].devices
        return self._pass_weights(index, [w for name in devices for w in self.begun.get(name, [])])

    def _pass_weights(self, index: int, after: list[Work]) -> Work:
        flows, rounds = self._around(index, 1)
        earlier = [self.exchanged[index]] if index in self.exchanged else []
        work = Work(flows=flows, rounds=rounds, after=[*after, *earlier])
        self.exchanged[index] = self._add(work)
        return work

    def _around(self, index: int, times: int) -> tuple[list[Flow], int]:
        stage, num_bytes = self.plan.stages[index], self._bytes(index)
        algorithm = stage.algorithm or self.network.fastest(stage, num_bytes)
        flows, rounds = self.network.around(stage.devices, times * num_bytes, algorithm)
        return flows, times * rounds

    def _finish(self, index: int) -> None:
        """Sum gradients, or gather new weights, and update."""
        stage = self.plan.stages[index]
        ready = [self.last[device] for device in stage.devices]
        ready += [self.exchanged[index]] if stage.zero >= 2 and index in self.exchanged else []
        if len(stage.devices) > 1 and stage.zero < 3:
            flows, rounds = self._around(index, 1 if stage.zero == 2 else 2)
            ready = [*ready, self._add(Work(flows=flows, rounds=rounds, after=ready))]
        for cost in self.prices[index]:
            self._add(Work(seconds=cost.update, after=ready))

    def _play(self) -> float:
        """Play all work (4): repeat until everything is over; between events rates are constant."""
        waiting, now = list(self.work), 0.0
        left: dict[tuple[Work, int], float] = {}
        self.changes: list[tuple[float, float, str]] = []
        while True:
            ready = [work for work in waiting if _is_ready(work, now)]
            for work in ready:
                self.changes.append((now, work.takes[1], work.takes[0]))
                if work.flows:
                    left |= {(work, at): flow.bytes for at, flow in enumerate(work.flows)}
                else:
                    work.sent = work.end = now + work.seconds
            waiting = [work for work in waiting if work not in ready]
            rates = self.network.shared([work.flows[at] for work, at in left])
            drained = [now + rest / rate for rest, rate in zip(left.values(), rates, strict=True)]
            ends = [work.end for work in self.work if now < work.end < math.inf]
            if not drained and not ends:
                assert not waiting
                return now
            following = min([*drained, *ends])
            for key, rate, end in zip(list(left), rates, drained, strict=True):
                left[key] -= rate * (following - now)
                if end <= following * (1 + 1e-15):
                    del left[key]
                    self._left(key[0], left, following)
            now = following

    def _left(self, work: Work, left: Mapping[tuple[Work, int], float], now: float) -> None:
        """Note that the last byte of all flows of some work has left."""
        if not any(other is work for other, _ in left):
            work.sent = now
            work.end = now + work.rounds * max(flow.latency for flow in work.flows)

    def peaks(self) -> dict[str, float]:
        """Return the largest number of bytes that each device holds."""
        held = {
            device: cost.state
            for stage, costs in zip(self.plan.stages, self.prices, strict=True)
            for device, cost in zip(stage.devices, costs, strict=True)
        }
        most = dict(held)
        freed = [(work.end, -work.frees[1], work.frees[0]) for work in self.work]
        for _, amount, device in sorted(self.changes + freed):
            if device:
                held[device] += amount
                most[device] = max(most[device], held[device])
        return most


def _is_ready(work: Work, now: float) -> bool:
    on_channel = work.behind is None or work.behind.sent <= now
    return on_channel and all(earlier.end <= now for earlier in work.after)


def _spans(samples: Sequence[int]) -> list[tuple[int, int]]:
    ends = list(itertools.accumulate(samples))
    return list(zip([0, *ends], ends, strict=False))


# Enumeration


def all_plans(problem: Problem) -> Iterator[Plan]:
    """Yield every plan: each division of the batch, cut of the layers, assignment of devices,
    division of samples, recomputation, ZeRO level and schedule."""
    devices = list(problem.node_of)
    for micro_batches in range(1, problem.global_batch + 1):
        size, rest = divmod(problem.global_batch, micro_batches)
        if rest:
            continue
        schedules = [pair for pair in problem.schedules if pair[1] <= micro_batches]
        for count in range(1, min(len(problem.layers), len(devices)) + 1):
            for stages in _pipelines(problem, devices, count, size):
                for schedule in schedules:
                    yield Plan(micro_batches=micro_batches, schedule=schedule, stages=stages)


def _pipelines(
    problem: Problem, devices: Sequence[str], count: int, size: int
) -> Iterator[tuple[Stage, ...]]:
    num_layers = len(problem.layers)
    cuts = list(itertools.combinations(range(1, num_layers), count - 1))
    for homes in itertools.product(range(count + 1), repeat=len(devices)):
        members = [
            tuple(name for name, home in zip(devices, homes, strict=True) if home == index)
            for index in range(count)
        ]
        if not all(0 < len(names) <= size for names in members) or not _is_first(problem, homes):
            continue
        for cut in cuts:
            ends = (*cut, num_layers)
            choices = [
                list(_ways(first, end, names, size))
                for first, end, names in zip((0, *cut), ends, members, strict=True)
            ]
            yield from itertools.product(*choices)


def _is_first(problem: Problem, homes: Sequence[int]) -> bool:
    """Return whether an assignment is the first of those that exchange equal devices of a node."""
    at = 0
    for node in problem.nodes:
        own = list(homes[at : at + node.devices])
        if own != sorted(own):
            return False
        at += node.devices
    return True


def _ways(first: int, end: int, names: tuple[str, ...], size: int) -> Iterator[Stage]:
    for cut in itertools.combinations(range(1, size), len(names) - 1):
        samples = tuple(b - a for a, b in itertools.pairwise((0, *cut, size)))
        for recompute in (False, True):
            for zero in range(4 if len(names) > 1 else 1):
                yield Stage(
                    first=first,
                    end=end,
                    devices=names,
                    samples=samples,
                    recompute=recompute,
                    zero=zero,
                )


def busy_seconds(problem: Problem, plan: Plan) -> float:
    """Return a time that no simulation of the plan is below: the work of its busiest device."""
    return max(
        plan.micro_batches * (cost.forward + cost.backward) + cost.update
        for stage in plan.stages
        for cost in [
            price(problem, stage, *pair) for pair in zip(stage.devices, stage.samples, strict=True)
        ]
    )


def best_plan(problem: Problem, seconds: float) -> tuple[float, Plan | None, int, int]:
    """Return the least time below ``seconds`` of any plan that fits, that plan, and how many plans
    were enumerated and how many simulated."""
    best: Plan | None = None
    enumerated = simulated = 0
    for plan in all_plans(problem):
        enumerated += 1
        if busy_seconds(problem, plan) >= seconds or not fits(problem, plan):
            continue
        simulated += 1
        time = Iteration(problem, plan).seconds
        if time < seconds:
            seconds, best = time, plan
    return seconds, best, enumerated, simulated


def random_problem(seed: int) -> Problem:
    """Return the same small problem for the same seed: one to three layers on two to four devices
    of two kinds."""
    random = Random(seed)
    layers = []
    for _ in range(random.choice((1, 2, 3, 3))):
        flop = random.choice((0.1, 0.3, 1.0)) * random.uniform(0.5, 1.5) * 1e12
        layers.append(
            Layer(
                forward_flop=flop,
                backward_flop=flop * random.choice((2.0, 1.5)),
                parameters=random.randint(1, 100) * 10**7,
                kept=random.uniform(0.1, 4) * 1e9,
                output=random.choice((0.1, 1, 4)) * random.uniform(0.5, 1.5) * 1e8,
            )
        )
    needed = 16 * sum(layer.parameters for layer in layers) + sum(layer.kept for layer in layers)
    nodes = []
    for name in "ab":
        room = random.choice((0.5, 1.0, 8.0)) * random.uniform(1, 2)
        nodes.append(
            Node(
                name=name,
                devices=random.choice((1, 2)),
                flops=random.choice((1, 2, 4)) * random.uniform(0.8, 1.2) * 1e12 // 1,
                memory=room * needed // 1,
                memory_bandwidth=1e11,
                nic=random.choice((0.2, 1, 5)) * random.uniform(0.8, 1.2) * 1e9 // 1,
                nic_latency=random.choice((0.0, 0.001, 0.02)),
                bus=random.choice((2, 20)) * random.uniform(0.8, 1.2) * 1e9 // 1,
                bus_latency=random.choice((0.0, 0.002)),
            )
        )
    more = [("kfkb", 2), ("gpipe", 1), ("eager-1f1b", 1)]
    floors = random.choice(((0.0, 0.0), (0.05, 0.2)))
    return Problem(
        layers=tuple(layers),
        nodes=tuple(nodes),
        global_batch=random.choice((2, 3, 4)),
        schedules=(("1f1b", 1), *random.sample(more, random.randint(0, 2))),
        constants=Constants(forward_floor=floors[0], backward_floor=floors[1]),
    )
