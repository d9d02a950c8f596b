"""``argosy run`` on several hosts: network namespaces behind shaped cables. Needs root and a kernel
that has them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from runtime.run_cases import PROGRAM, losses_alone, written_plan
from runtime.training_cases import Case

from argosy.cluster.file import load_cluster
from argosy.lab import Lab
from argosy.lab.system import why_not
from argosy.runtime.processes.failure import read_notes
from argosy.timeline.file import load_timeline

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no lab here: {REASON}")
CASE = Case(shares=((1, 1), (2,)), num_micro_batches=4)
CLUSTER = """
name = "hosts"
[[nodes]]
name = "n"
count = 3
devices = { kind = "CPU-core" }
nic = { bandwidth = "50 Mbit/s" }
"""
SECONDS = 120


class Hosts:
    """A plan for three hosts, and commands on them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.plan = folder, written_plan(folder, CASE, nodes=3)
        (folder / "cluster.toml").write_text(CLUSTER)
        self.lab = Lab(load_cluster(str(folder / "cluster.toml")), shares=False)

    def argosy(self, *options: str) -> list[str]:
        address = self.lab.layout.hosts[0].address
        common = [
            "--out",
            str(self.folder / "run"),
            "--address",
            address,
            "--port",
            "29511",
            "--steps",
            "3",
        ]
        return [
            sys.executable,
            "-m",
            "argosy",
            "run",
            str(self.plan),
            f"{PROGRAM}:build",
            *common,
            *options,
        ]

    def start(
        self, commands: list[list[str]], fault: str = ""
    ) -> list[subprocess.CompletedProcess[str]]:
        """One command on each host, at the same time."""
        own = {"OMP_NUM_THREADS": "1", "FAULT": fault}
        started = [
            subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{self.lab.prefix}{host.name}", *command],
                env={**os.environ, **own},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for host, command in zip(self.lab.layout.hosts, commands, strict=True)
        ]
        done = []
        for process in started:
            out, error = process.communicate(timeout=SECONDS)
            done.append(subprocess.CompletedProcess(process.args, process.returncode, out, error))
        return done


def test_three_hosts_train_as_one_process(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path)
    with hosts.lab:
        each = [hosts.argosy("--node-rank", str(rank), "--json", "--quiet") for rank in range(3)]
        results = hosts.start(each)
    assert [done.returncode for done in results] == [0, 0, 0], [done.stderr for done in results]
    figures = json.loads(results[0].stdout)
    assert figures["losses"] == pytest.approx(losses_alone(3), rel=1e-4)
    timeline = load_timeline(tmp_path / "run" / "timeline.json")
    assert {span.where for span in timeline.spans} >= {
        "n0.0",
        "n1.0",
        "n2.0",
        "n0.0>n2.0",
        "n2.0>n1.0",
    }
    assert (tmp_path / "run" / "torchrun-2.log").exists()


def test_the_printed_script_runs_on_every_host(tmp_path: Path) -> None:
    """``--dry-run`` prints a script that finds out on which host it is; started on each, it
    trains."""
    hosts = Hosts(tmp_path)
    printed = subprocess.run(
        hosts.argosy("--dry-run"), capture_output=True, text=True, check=True
    ).stdout
    (tmp_path / "start.sh").write_text(printed)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with hosts.lab:
        started = [
            ["env", f"PATH={path}", f"ARGOSY_HOST=n{rank}", "bash", f"{tmp_path}/start.sh"]
            for rank in range(3)
        ]
        results = hosts.start(started)
    assert [done.returncode for done in results] == [0, 0, 0], [done.stderr for done in results]
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "progress.jsonl").read_text().splitlines()
    ]
    assert [line["loss"] for line in lines] == pytest.approx(losses_alone(3), rel=1e-4)


def test_every_host_says_which_rank_was_killed(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path)
    with hosts.lab:
        each = [hosts.argosy("--node-rank", str(rank), "--quiet") for rank in range(3)]
        results = hosts.start(each, fault="killed")
    assert [done.returncode for done in results] == [4, 4, 4], [done.stderr for done in results]
    assert "rank 1 (n1.0) was killed by SIGKILL" in results[1].stderr
    assert all(
        "lost contact" in results[index].stderr and "n1.0" in results[index].stderr
        for index in (0, 2)
    )
    last_step = (tmp_path / "run" / "progress.jsonl").stat().st_mtime
    assert {note.rank for note in read_notes(tmp_path / "run")} == {0, 2}, (
        "those who can still speak"
    )
    assert all(note.at - last_step < 20 for note in read_notes(tmp_path / "run"))
