"""A generation is formed of hosts that have answered, and one whose ranks cannot meet is followed
by another."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runtime.elastic_cases import PROGRAM
from runtime.training_cases import Case, plan_of

from argosy.cluster.file import cluster_from_content
from argosy.cluster.topology import canonical
from argosy.plan.file import dumps_plan
from argosy.plan.plan import ClusterRef
from argosy.runtime.elastic.claims import Claims
from argosy.runtime.elastic.leader import Leader
from argosy.runtime.elastic.replan import Replanner
from argosy.runtime.elastic.training import work
from argosy.runtime.processes.run_spec import RunSpec, dumps_run_spec

_NODE = {
    "devices": {"kind": "CPU-core", "count": 1},
    "nic": {"bandwidth": "25 Gbit/s", "latency": "20 us"},
}
CLUSTER = cluster_from_content(
    canonical({"name": "two", "nodes": [{"name": "n", "count": 2, **_NODE}]})
)
PLAN = replace(plan_of(Case(per_node=1)), cluster=ClusterRef.of(CLUSTER))


class FakeHost:
    """A host that answers its leader at once, and has other hosts join when the leader sends it
    something."""

    def __init__(self, leader: Leader, name: str, port: int) -> None:
        self.leader, self.name, self.port = leader, name, port
        self.replies: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.started: list[dict[str, Any]] = []
        self.bring: dict[str, FakeHost] = {}
        """Who joins, by the kind of message at which it does."""
        self.tasks: list[asyncio.Task[None]] = []

    def join(self) -> None:
        host = {"name": self.name, "address": self.name, "port": 1}
        hello = {"host": host, "devices": [f"{self.name}.0"], "leaving": False}
        line: Any = self
        self.tasks.append(asyncio.create_task(self.leader.admit(line, hello)))

    def send(self, message: dict[str, Any]) -> None:
        if message["kind"] == "stop":
            self.replies.put_nowait(
                {"answer": message["serial"], "headers": [], "free_port": self.port}
            )
        elif message["kind"] == "reach":
            reached = [place[0] for place in message["places"]]
            self.replies.put_nowait({"answer": message["serial"], "reached": reached})
        elif message["kind"] == "start":
            self.started.append(message)
        if message["kind"] in self.bring:
            self.bring.pop(message["kind"]).join()

    async def receive(self, *, patience: float) -> dict[str, Any]:
        return await self.replies.get()

    async def beat(self, interval: float) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


@pytest.mark.parametrize("moment", ["stop", "reach"])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_host_that_joins_while_others_are_stopped_is_stopped_first(
    tmp_path: Path, moment: str, is_restarted: bool
) -> None:
    """Without its answer there is no port at which the ranks could meet, and its copies are not
    known."""
    spec = RunSpec(plan="p", program="q", out=str(tmp_path), steps=1)

    async def form() -> dict[str, Any]:
        leader = Leader(spec, "n1", Claims(tmp_path), Replanner(first=PLAN, cluster=CLUSTER))
        early, late = FakeHost(leader, "n1", 5001), FakeHost(leader, "n0", 5000)
        early.bring = {moment: late}
        if is_restarted:
            FakeHost(leader, "n0", 4000).join()
        early.join()
        await asyncio.sleep(0)
        await leader._form()
        return early.started[0]

    start = asyncio.run(form())
    assert start["hosts"] == ["n0", "n1"]
    assert start["master"] == ("n0", 5000)


def test_ranks_that_cannot_meet_end_their_generation_and_not_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # and does not listen: nobody answers there
        port = str(probe.getsockname()[1])
        values = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        spec = RunSpec(
            plan="p",
            program=str(PROGRAM),
            out=str(tmp_path),
            steps=1,
            any_device=True,
            patience=0.2,
        )
        task = {"run": dumps_run_spec(spec), "plan": dumps_plan(PLAN), "rank": 1}
        message = work(task, multiprocessing.Pipe()[0])
    assert message["how"] == "elsewhere", message
    assert f"rank 1 could not join the others at 127.0.0.1:{port}" in message["message"]
