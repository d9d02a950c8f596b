"""From a plan to commands and batch scripts: which host is which rank, and what a node asks Slurm
for."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from exporters.target_readers import plan
from runtime.launch_cases import HOSTS, launched, named

from argosy.errors import InputError
from argosy.runtime.job.launch import command_line
from argosy.runtime.job.launch_script import dry_run
from argosy.runtime.job.slurm import components, slurm_script


def options(script: str) -> list[list[str]]:
    """The options of every component of a batch script."""
    found = re.findall(r"#SBATCH (.*)", script)
    groups: list[list[str]] = [[]]
    for option in found[1:]:
        if option == "hetjob":
            groups.append([])
        else:
            groups[-1].append(option)
    return groups


def test_unequal_nodes_are_components_that_ask_for_what_they_have() -> None:
    """The plan uses 4, 4, 2 and 2 devices of nodes with 4."""
    made = plan([9, 18, 26, 34])
    narrow = tuple(replace(stage, replicas=stage.replicas[:1]) for stage in made.stages[2:])
    launch = launched(
        replace(made, stages=(*made.stages[:2], *narrow)), a={"cpus": 64}, v={"cpus": 16}
    )
    common = ["--nodes=2", "--ntasks-per-node=1"]
    assert options(slurm_script(launch)) == [
        [*common, "--cpus-per-task=64", "--gres=gpu:a100:4"],
        [*common, "--cpus-per-task=8", "--gres=gpu:v100:2"],
    ]
    assert [component.ranks for component in components(launch)] == [(0, 1), (2, 3)]


def test_equal_nodes_are_an_ordinary_job_and_need_no_type() -> None:
    launch = launched(plan([17, 34], hosts=("a0", "a1")))
    script = slurm_script(launch)
    assert options(script) == [
        ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=4", "--gres=gpu:4"]
    ]
    assert "het-group" not in script


def test_a_gap_in_the_numbers_of_devices_asks_for_the_card_behind_it() -> None:
    made = plan([17, 34], hosts=("a0", "a1"), data=1, width=1)
    far = replace(made.stages[1].replicas[0], devices=("a1.3",))
    made = replace(made, stages=(made.stages[0], replace(made.stages[1], replicas=(far,))))
    assert [one.request.gres for one in components(launched(made))] == ["gpu:1", "gpu:4"]


def test_what_the_cluster_file_says_is_asked_for() -> None:
    devices = {"kind": "A100-80GB", "count": 4, "gres": "gpu:big"}
    made = plan([9, 18, 26, 34])
    launch = launched(
        made, a={"devices": devices}, v={"devices": {**devices, "kind": "V100-32GB", "gres": ""}}
    )
    assert [component.request.gres for component in components(launch)] == ["gpu:big:4", ""]
    named_launch = named(made)
    found = options(slurm_script(named_launch))
    assert [group[-1] for group in found] == ["--nodelist=gpu01,gpu02.east,old1,old2"]


def test_a_script_that_was_not_submitted_says_so(tmp_path: Path) -> None:
    """Nothing is written before."""
    environment = {name: value for name, value in os.environ.items() if name != "SLURM_JOB_ID"}
    script = tmp_path / "job.sh"
    script.write_text(slurm_script(named(plan([9, 18, 26, 34]))))
    done = subprocess.run(
        ["bash", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (
        done.returncode
        and "SLURM_JOB_ID: is not set: submit this script with sbatch" in done.stderr
    )
    assert list(tmp_path.iterdir()) == [script]


def test_a_host_finds_its_rank_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = named(plan([9, 18, 26, 34]))
    for name, rank in {"gpu01": 0, "gpu01.east": 0, "gpu02.east": 1, "gpu02": 1, "old2": 3}.items():
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        assert launch.own_rank() == rank
    monkeypatch.setattr(socket, "gethostname", lambda: "laptop")
    expected = r"this host: found .laptop., expected one of the plan's hosts \(gpu01, gpu02.east"
    with pytest.raises(InputError, match=expected):
        launch.own_rank()
    assert launched(plan([9, 18, 26, 34])).own_rank() == 0, "no host is named"


def test_addresses_ports_and_interfaces_are_those_of_the_cluster_file() -> None:
    first = {"name": "gpu01", "address": "10.0.0.1", "port": 29700}
    launch = launched(
        plan([9, 18, 26, 34]), a={"hosts": [first, HOSTS["a"][1]]}, v={"hosts": HOSTS["v"]}
    )
    words = [command_line(launch, rank, Path("run.json")) for rank in range(4)]
    assert {command[command.index("--rdzv-endpoint") + 1] for command in words} == {
        "10.0.0.1:29700"
    }
    settings = [command[command.index("--rdzv-conf") + 1] for command in words]
    assert settings == ["rank=0", "rank=1,interface=ib0", "rank=2", "rank=3"]
    assert "gpu02.east|gpu02)" in dry_run(launch)
    script = slurm_script(launch)
    assert "hosts+=(gpu02.east 1 4 ib0)" in script
    assert ("address=10.0.0.1" in script) and ("port=29700" in script)
