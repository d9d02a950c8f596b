"""Elastic runs for the tests: agents as processes of their own, and what can befall them."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

from runtime.llama_models import EXPERTS

from argosy.cluster.file import cluster_from_content
from argosy.cluster.topology import Cluster, canonical
from argosy.plan.file import dumps_plan
from argosy.plan.plan import Plan, Replica, Stage
from argosy.planner import Settings, find_plan
from argosy.runtime.processes.run_folder import EVENTS, read_lines
from argosy.runtime.processes.run_spec import RunSpec, dumps_run_spec
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.workload.load import load_model

PROGRAM = Path(__file__).parent / "programs" / "double_gpt.py"
_MODEL = {
    "model_type": "gpt2",
    "vocab_size": 256,
    "n_positions": 64,
    "n_embd": 512,
    "n_layer": 4,
    "n_head": 4,
}
"""What the model is taken to cost; it has as many layers as the one that is trained, which costs
next to nothing."""


_MIXTURE = {
    "model_type": "mixtral",
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
}
"""What a model with experts is taken to cost."""


@cache
def losses_alone(
    steps: int, captured: str = "", rate: str = "0.01", mixture: str = ""
) -> list[float]:
    environment = {**os.environ, "CAPTURED": captured, "RATE": rate, "MIXTURE": mixture}
    done = subprocess.run(
        [sys.executable, PROGRAM, str(steps)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    losses: list[float] = json.loads(done.stdout)
    return losses


def in_one_group(plan: Plan, cluster: Cluster) -> Plan:
    """All layers on one tensor-parallel group of all devices, which may be on several hosts; the
    first does most."""
    devices = tuple(device.name for device in cluster.devices)
    rest = (1 - 0.4) / (len(devices) - 1)
    group = Replica(devices=devices, samples=4, ratios=(0.4, *[rest] * (len(devices) - 1)))
    stage = Stage(first=0, end=plan.stages[-1].end, replicas=(group,))
    schedule = ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B)
    return replace(
        plan,
        stages=(stage,),
        micro_batch_size=4,
        num_micro_batches=plan.global_batch // 4,
        schedule=schedule,
        left_out=(),
        collectives=(),
        policy=(),
        predicted=None,
        certificate=None,
    )


def sharing_experts(plan: Plan, cluster: Cluster) -> Plan:
    """All layers on every device, which share the experts unevenly."""
    devices = [device.name for device in cluster.devices]
    samples = (2, *(1 for _ in devices[1:]))
    replicas = tuple(
        Replica(devices=(name,), samples=number)
        for name, number in zip(devices, samples, strict=True)
    )
    rest = (EXPERTS - 3) // (len(devices) - 1)
    experts = (EXPERTS - rest * (len(devices) - 1), *[rest] * (len(devices) - 1))
    plan = in_one_group(plan, cluster)
    stage = replace(plan.stages[0], replicas=replicas, expert=len(devices), experts=experts)
    micro_batch, batch = sum(samples), plan.global_batch
    return replace(
        plan, stages=(stage,), micro_batch_size=micro_batch, num_micro_batches=batch // micro_batch
    )


class ElasticRun:
    """A job on a few hosts, all on this machine; leaving it ends whatever still runs."""

    def __init__(
        self,
        folder: Path,
        *,
        hosts: int = 3,
        devices: int = 1,
        steps: int = 12,
        bandwidth: str = "10 Gbit/s",
        step_seconds: float = 0.1,
        chain: bool = True,
        is_grouped: bool = False,
        shares_sequence: bool = False,
        shares_experts: bool = False,
        gate: int | None = None,
        environment: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> None:
        self.folder, self.steps = folder, steps
        self.environment = {
            "OMP_NUM_THREADS": "1",
            "STEP_SECONDS": str(step_seconds),
            "MIXTURE": "1" if shares_experts else "",
            **(environment or {}),
        }
        self.wrap: Callable[[str], list[str]] = lambda host: []
        """What a host's command begins with."""
        self.address: Callable[[str], str] = lambda host: "127.0.0.1"
        if gate is not None:
            self.environment["GATE"] = str(folder / "gate")
            self.open_gate(gate)
        self.mark = f"elastic-{secrets.token_hex(4)}"
        nic = {"bandwidth": bandwidth, "latency": "20 us"}
        node: dict[str, Any] = {
            "name": "h",
            "count": hosts,
            "devices": {"kind": "CPU-core", "count": devices},
            "nic": nic,
        }
        if devices > 1:
            node["intra"] = [{"medium": "pcie", "bandwidth": "10 GB/s", "latency": "5 us"}]
        self.cluster = cluster_from_content(canonical({"name": "few", "nodes": [node]}))
        config = folder / "costs" / "config.json"
        config.parent.mkdir(parents=True)
        config.write_text(json.dumps(_MIXTURE if shares_experts else _MODEL))
        model = load_model(str(config), dtype="fp32")
        self.plan = find_plan(
            model, self.cluster, global_batch=8, settings=Settings(runnable=True, max_width=1)
        )
        if is_grouped:
            self.plan = in_one_group(self.plan, self.cluster)
        if shares_sequence:
            (stage,) = in_one_group(self.plan, self.cluster).stages
            stage = replace(stage, context=len(stage.devices))
            self.plan = replace(in_one_group(self.plan, self.cluster), stages=(stage,))
        if shares_experts and shares_sequence:
            (stage,) = self.plan.stages
            self.plan = replace(self.plan, stages=(replace(stage, expert=stage.context),))
        elif shares_experts:
            self.plan = sharing_experts(self.plan, self.cluster)
        (folder / "plan.json").write_text(dumps_plan(self.plan))
        self.settings = {
            "lost_after": 2.0,
            "gather": 120.0,
            "wait": 60.0,
            "patience": 60.0,
            **settings,
        }
        self.settings |= {"model": str(config)} if chain else {}
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.ended: list[subprocess.Popen[bytes]] = []

    @property
    def hosts(self) -> list[str]:
        return [node.name for node in self.cluster.nodes]

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def __enter__(self) -> ElasticRun:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self.agents.values():
            if process.poll() is None:
                process.kill()
            process.wait()
        self.await_(lambda: not self.processes(), 60)

    def start(self, *hosts: str) -> None:
        """The agents of these hosts, or of all."""
        for host in hosts or self.hosts:
            spec = RunSpec(
                plan=str(self.folder / "plan.json"),
                program=str(PROGRAM),
                out=str(self.run),
                steps=self.steps,
                any_device=True,
                **self.settings,
            )
            file = self.folder / f"run-{host}.json"
            file.write_text(dumps_run_spec(spec))
            own = {
                **self.environment,
                "ELASTIC_TEST": self.mark,
                "SLOW": str(self.folder / f"slow-{host}"),
            }
            agent = [
                sys.executable,
                "-m",
                "argosy.runtime.elastic.agent",
                str(file),
                host,
                self.address(host),
            ]
            command = [*self.wrap(host), *agent]
            with (self.folder / f"agent-{host}.log").open("ab") as log:
                self.agents[host] = subprocess.Popen(
                    command, env={**os.environ, **own}, stdout=log, stderr=log
                )

    def open_gate(self, step: int) -> None:
        """Let training go on until this step."""
        draft = self.folder / "gate.new"
        draft.write_text(str(step))
        draft.replace(self.folder / "gate")

    def processes(self) -> list[int]:
        """All that belongs to the run, whatever it calls itself."""
        mark, found = f"ELASTIC_TEST={self.mark}".encode(), []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    environment, state = (
                        (entry / "environ").read_bytes(),
                        (entry / "stat").read_text(),
                    )
                except OSError:
                    continue
                if mark in environment.split(b"\0") and state.rpartition(")")[2].split()[0] != "Z":
                    found.append(int(entry.name))
        return found

    def lines(self) -> list[dict[str, Any]]:
        path = self.run / "progress.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def num_changes(self) -> int:
        """That controllers have made."""
        path = self.run / "decisions.jsonl"
        events = (
            [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        )
        return sum(event["event"] == "decision" for event in events)

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        return [event for event in read_lines(self.run / EVENTS) if name in (None, event["event"])]

    def await_(self, condition: Callable[[], object], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds} s\n{self.told()}"
            time.sleep(0.02)

    def await_step(self, step: int, seconds: float = 240) -> None:
        """Until so many steps have been done, or the job is over."""
        self.await_(
            lambda: self.is_over() or any(line["step"] + 1 >= step for line in self.lines()),
            seconds,
        )

    def is_over(self) -> bool:
        return (self.run / "elastic" / "outcome.json").exists()

    def await_event(self, name: str, seconds: float = 240, **facts: Any) -> dict[str, Any]:
        """An event with these facts."""
        found: list[dict[str, Any]] = []

        def has_come() -> bool:
            found[:] = [event for event in self.events(name) if facts.items() <= event.items()]
            return bool(found)

        self.await_(has_come, seconds)
        return found[-1]

    def await_end(self, seconds: float = 240) -> None:
        self.await_(
            lambda: all(process.poll() is not None for process in self.agents.values()), seconds
        )

    def told(self) -> str:
        logs = sorted([*self.folder.glob("agent-*.log"), *self.run.glob("worker-*.log")])
        texts = [f"== {path.name}\n{path.read_text()[-1500:]}" for path in logs]
        events = "\n".join(json.dumps(event) for event in self.events())
        left = [
            f"{pid} {Path(f'/proc/{pid}/cmdline').read_bytes()[:200]!r}" for pid in self.processes()
        ]
        return (
            f"{left}\n{events}\n{[(line['step'], line['generation']) for line in self.lines()]}\n"
            + "\n".join(texts)
        )

    def kill_host(self, host: str) -> None:
        """As when the power fails: the agent goes, and everything with it."""
        self.agents[host].kill()
        self.agents[host].wait()

    def worker(self, host: str) -> int | None:
        """The process that trains on a host."""
        agent = self.agents[host].pid
        family = {pid: parent_of(pid) for pid in self.processes()}
        servers = [pid for pid, parent in family.items() if parent == agent and is_python(pid)]
        workers = [pid for pid, parent in family.items() if parent in servers]
        return min(workers, default=None)

    def kill_worker(self, host: str) -> bool:
        pid = self.worker(host)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        return pid is not None

    def tell_to_go(self, host: str) -> None:
        self.agents[host].send_signal(signal.SIGTERM)

    def check(self, survivors: Sequence[str] | None = None) -> None:
        """The right losses, every step trained once on the way to the result, nothing left
        behind."""
        for host in survivors if survivors is not None else self.agents:
            assert self.agents[host].returncode == 0, self.told()
        final: dict[int, float] = {}
        position = None
        begun = {
            event["generation"]: event["step"] for event in reversed(self.events("generation"))
        }
        for line in self.lines():
            is_next = position is not None and line["step"] == position
            expected = position if is_next else begun[line["generation"]]
            assert line["step"] == expected, f"a step was skipped\n{self.told()}"
            position = line["step"] + 1
            final[line["step"]] = line["loss"]
        alone = losses_alone(
            self.steps,
            self.environment.get("CAPTURED", ""),
            self.environment.get("RATE", "0.01"),
            self.environment["MIXTURE"],
        )
        assert sorted(final) == list(range(self.steps)), self.told()
        for step, loss in final.items():
            assert abs(loss - alone[step]) <= 1e-7 * abs(alone[step]), (
                step,
                loss,
                alone[step],
                self.told(),
            )
        assert sorted(path.name for path in (self.run / "elastic").iterdir()) == ["outcome.json"], (
            self.told()
        )
        assert not list((self.run / "checkpoints").glob(".*")), "a partial checkpoint was left"
        self.await_(lambda: not self.processes(), 60)


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def is_python(pid: int) -> bool:
    try:
        return b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
