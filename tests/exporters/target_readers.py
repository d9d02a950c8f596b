"""Readers of other systems' forms, written apart from the exporters, and plans to export."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from argosy.cluster.file import build_cluster
from argosy.cluster.topology import Cluster
from argosy.document import parse_toml
from argosy.dtype import Dtype
from argosy.plan.plan import ClusterRef, ModelRef, Plan, Replica, Stage
from argosy.schedule import ScheduleSpec

CLUSTER = """
name = "pair-of-kinds"
[[nodes]]
name = "a"
count = 2
devices = { kind = "A100-80GB", count = 4 }
intra = [ { medium = "nvlink", bandwidth = "300 GB/s", latency = "3 us" } ]
nic = { bandwidth = "100 Gbit/s", latency = "10 us" }
[[nodes]]
name = "v"
count = 2
devices = { kind = "V100-32GB", count = 4 }
intra = [ { medium = "nvlink", bandwidth = "150 GB/s", latency = "3 us" } ]
nic = { bandwidth = "25 Gbit/s", latency = "20 us" }
"""


def cluster() -> Cluster:
    return build_cluster(parse_toml(CLUSTER, file="cluster.toml"), folder=Path())


def plan(
    ends: Sequence[int],
    *,
    hosts: Sequence[str] = ("a0", "a1", "v0", "v1"),
    data: int = 2,
    width: int = 2,
    samples: int = 1,
    micro_batches: int = 8,
    model: str = "llama-3-8b",
    schedule: ScheduleSpec | None = None,
) -> Plan:
    """A stage per host, each with ``data`` replicas of ``width`` devices."""
    starts = [0, *ends[:-1]]
    stages = tuple(
        Stage(first=first, end=end, replicas=tuple(
            Replica(devices=tuple(f"{host}.{at * width + number}" for number in range(width)), samples=samples)
            for at in range(data)
        ))
        for first, end, host in zip(starts, ends, hosts, strict=True)
    )  # fmt: skip
    where = cluster()
    return Plan(
        model=ModelRef(name=model, sequence_length=2048, dtype=Dtype.BF16),
        cluster=ClusterRef.of(where),
        global_batch=data * samples * micro_batches,
        micro_batch_size=data * samples,
        num_micro_batches=micro_batches,
        schedule=schedule or ScheduleSpec(),
        stages=stages,
    )


def with_stage(plan: Plan, index: int, **changes: object) -> Plan:
    stages = list(plan.stages)
    stages[index] = replace(stages[index], **changes)  # type: ignore[arg-type]
    return replace(plan, stages=tuple(stages))


def read_layout(text: str) -> list[str]:
    """Stages of a Megatron-LM layout as runs of letters: E, t, m, L.

    A comma means nothing, ``(...)*n`` repeats what is in it with its bars, ``x*n`` a letter; a bar
    ends a stage.
    """
    text = text.replace(",", "")
    while "(" in text:
        text = re.sub(r"\(([^()]*)\)\*(\d+)", lambda found: found[1] * int(found[2]), text)
    text = re.sub(r"([A-Za-z])\*(\d+)", lambda found: found[1] * int(found[2]), text)
    stages = text.split("|")
    assert set("".join(stages)) <= set("EtmL")
    return stages


HOSTS = ("a0", "a1", "v0", "v1")


def run_script(script: str) -> list[list[str]]:
    """The arguments of every torchrun call of a script, as the shell itself sees them, in the order
    of node ranks.

    A script that asks for its host is run once on every host that it knows."""
    stub = "torchrun() { local IFS=$'\\x1f'; printf '%s\\n' \"torchrun$IFS$*\"; };"
    script = re.sub(r"^python -m torch.distributed.run", "torchrun", script, flags=re.MULTILINE)
    calls = []
    for host in HOSTS if "ARGOSY_HOST" in script else ("",):
        environment = {**os.environ, "ARGOSY_HOST": host, "CUDA_VISIBLE_DEVICES": ""}
        command = ["bash", "-c", stub + "\n" + script]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0 or (
            done.returncode == 2 and f"{host} is no host of the plan" in done.stderr
        )
        calls += [line.split("\x1f") for line in done.stdout.splitlines()]
    calls.sort(key=_node_rank)
    return [words[1:] for words in calls]


def _node_rank(words: Sequence[str]) -> int:
    options = options_of(words)
    rank = (
        options.get("node-rank")
        or options.get("node_rank")
        or str(options.get("rdzv-conf")).removeprefix("rank=")
    )
    return int(rank)


def visible_devices(script: str) -> list[tuple[str, ...]]:
    """The devices of every agent that a script starts, in the order of node ranks."""
    found = re.findall(r"agent (\d+) \d+ ([\d,]+) ", script)
    return [
        tuple(devices.split(",")) for _, devices in sorted(found, key=lambda pair: int(pair[0]))
    ]


def options_of(arguments: Sequence[str]) -> dict[str, str | bool]:
    """``--name value`` and flags of a command line."""
    found: dict[str, str | bool] = {}
    for at, word in enumerate(arguments):
        if word.startswith("--"):
            following = arguments[at + 1] if at + 1 < len(arguments) else "--"
            found[word[2:]] = True if following.startswith("--") else following
    return found


def read_hostfile(text: str) -> dict[str, dict[str, str]]:
    """``name slots=4 type=A100`` by name."""
    rows = [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return {name: dict(pair.split("=") for pair in pairs) for name, *pairs in rows}


def read_meshes(numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """FlagScale's flat list as [tensor, context, expert, data, pipeline] each."""
    assert len(numbers) % 5 == 0
    return [tuple(numbers[at : at + 5]) for at in range(0, len(numbers), 5)]


def read_json(text: str) -> dict[str, object]:
    content: dict[str, object] = json.loads(text)
    return content
