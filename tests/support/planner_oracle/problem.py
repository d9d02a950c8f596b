"""Describe a tiny planning problem, write its files, and draw random ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any


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
    exchange_rate: float | None = None
    """Bytes that one of its devices would send if it computed nothing; None if sending costs it no
    compute."""

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
        rate = node.exchange_rate
        text += f"""
[[kinds]]
name = "kind-{node.name}"
{"" if rate is None else f'exchange_rate = "{rate:.0f} B/s"'}
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


def random_problem(seed: int) -> Problem:
    """Return the same small problem for the same seed: one to three layers on two to four devices
    of two kinds."""
    random, rates = Random(seed), Random(f"exchange rates {seed}")
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
                exchange_rate=rates.choice((None, 5e9, 5e10)),
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


def short_of_memory(seed: int) -> Problem:
    """Return a problem of at most two layers in which the faster kind of device has little
    memory."""
    random, problem = Random(seed), random_problem(seed)
    global_batch = random.choice((6, 8))
    fast, slow = problem.nodes
    network = {"nic": 2e10, "nic_latency": 0.0}
    memory = fast.memory * random.uniform(0.2, 1) // 1
    return replace(
        problem,
        layers=problem.layers[:2],
        nodes=(
            replace(fast, flops=4e12, memory=memory, **network),
            replace(slow, flops=2e12, memory=4 * slow.memory // 1, **network),
        ),
        global_batch=global_batch,
        schedules=(("1f1b", 1),),
    )
