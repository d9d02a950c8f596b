"""A real Slurm on this machine takes the batch scripts, schedules them on unequal nodes, and
trains.

Run by ``make test-slurm``, which installs munge and Slurm. They need root. Where there is no Slurm,
``pytest -m slurm`` fails, and a run of all tests skips these.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from runtime.run_cases import PROGRAM, losses_alone
from runtime.training_cases import Case, plan_of
from slurm.slurm_cluster import Emulated, SlurmCluster, why_not

from argosy.cluster.file import load_cluster
from argosy.cluster.topology import canonical
from argosy.plan.file import dumps_plan

pytestmark = pytest.mark.slurm
NODES = (
    Emulated(name="big", cpus=4, gres="gpu:a100:2"),
    Emulated(name="small1", cpus=2, gres="gpu:v100:1"),
    Emulated(name="small2", cpus=2, gres="gpu:v100:1"),
)
GIVEN = (
    "--kind",
    "a100=A100-40GB",
    "--kind",
    "v100=V100-16GB",
    "--intra",
    "100 GB/s",
    "--nic",
    "10 Gbit/s",
)
PLACES = {"n0.0": "a0.0", "n0.1": "b1.0", "n0.2": "a0.1", "n0.3": "b0.0"}
"""The devices of the case on the imported nodes; stages use both kinds, so that only ranks by host
are right."""
SECONDS = 120


@pytest.fixture(scope="module")
def slurm(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SlurmCluster]:
    reason = why_not()
    if reason is not None:
        asked_for = request.config.getoption("markexpr") == "slurm"
        (pytest.fail if asked_for else pytest.skip)(f"Cannot start Slurm because {reason}.")
    with SlurmCluster(tmp_path_factory.mktemp("slurm"), NODES) as cluster:
        yield cluster


def argosy(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "argosy", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def imported(slurm: SlurmCluster, folder: Path, *command: str) -> Path:
    (folder / "nodes.txt").write_text(slurm.call(*command))
    argosy(folder, "import", "nodes.txt", "--from", "slurm", *GIVEN, "-o", "cluster.toml")
    return folder / "cluster.toml"


@pytest.mark.parametrize(
    "command",
    [
        ("scontrol", "show", "node"),
        ("scontrol", "show", "node", "-o"),
        ("sinfo", "-N", "-o", "%N %G"),
        ("sinfo", "-h", "-o", "%N %G"),
        ("sinfo", "-o", "%P|%N|%t|%G"),
    ],
)
def test_what_slurm_prints_is_read(
    slurm: SlurmCluster, command: tuple[str, ...], tmp_path: Path
) -> None:
    cluster = load_cluster(imported(slurm, tmp_path, *command))
    machines = [node.machine.name for node in cluster.nodes if node.machine is not None]
    assert machines == ["big", "small1", "small2"]
    kinds = [device.kind.name for device in cluster.devices]
    assert kinds == ["A100-40GB"] * 2 + ["V100-16GB"] * 2
    shown = command[0] == "scontrol"
    assert [node.cpus for node in cluster.nodes] == ([4, 2, 2] if shown else [None] * 3)


@pytest.mark.parametrize("named", [True, False])
def test_a_plan_for_unequal_nodes_is_scheduled_and_trains(
    slurm: SlurmCluster, named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``named``: the cluster file names the hosts; else Slurm chooses them by the type of their
    cards."""
    cluster = load_cluster(imported(slurm, tmp_path, "scontrol", "show", "node"))
    content = json.loads(cluster.content)
    if not named:
        for node in content["nodes"]:
            node["count"] = len(node.pop("hosts"))
            for devices in node["devices"]:
                del devices["gres"]
    plan = plan_of(Case(shares=((1, 1), (1, 1)), num_micro_batches=4))
    stages = tuple(
        replace(
            stage,
            replicas=tuple(
                replace(replica, devices=tuple(PLACES[name] for name in replica.devices))
                for replica in stage.replicas
            ),
        )
        for stage in plan.stages
    )
    plan = replace(plan, stages=stages, cluster=replace(plan.cluster, content=canonical(content)))
    (tmp_path / "plan.json").write_text(dumps_plan(plan))
    options = ("--steps", "2", "--any-device", "--slurm", "job.sh")
    argosy(tmp_path, "run", "plan.json", f"{PROGRAM}:build", *options)
    script = (tmp_path / "job.sh").read_text()
    assert ("#SBATCH --nodelist=big" in script) == named
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    slurm.call("sbatch", "job.sh", cwd=tmp_path)
    deadline = time.monotonic() + SECONDS
    while slurm.jobs().strip():
        assert time.monotonic() < deadline, slurm.jobs()
        time.sleep(0.2)
    printed = "\n".join(path.read_text() for path in tmp_path.glob("slurm-*.out"))
    progress = tmp_path / "run" / "progress.jsonl"
    assert progress.exists(), printed
    losses = [json.loads(line)["loss"] for line in progress.read_text().splitlines()]
    assert losses == pytest.approx(losses_alone(2), rel=1e-4), printed
    facts = json.loads((tmp_path / "run" / "timeline.json").read_text())
    assert {span["where"] for span in facts["spans"]} >= set(PLACES.values())
