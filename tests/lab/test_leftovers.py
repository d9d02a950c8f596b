"""What labs and jobs know of each other, without a lab: whose things are whose, and what is left by
who was killed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from argosy.cluster.file import load_cluster
from argosy.errors import InputError, RunError
from argosy.lab import Lab, record, system
from argosy.lab.job import LabJob, WorkerCommand
from argosy.lab.record import Record, prefix_of, records


def test_what_belongs_to_a_lab_does_not_belong_to_another_whose_name_begins_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "_NAMESPACES", tmp_path)
    mine, other = (Lab(load_cluster("mixed-8"), name=name) for name in ("trial", "trial-2"))
    for lab in (mine, other):
        for name in lab.layout.namespaces:
            (tmp_path / f"{lab.prefix}{name}").touch()
    assert len(system.namespaces(mine.prefix)) == len(mine.layout.namespaces)
    assert not set(system.namespaces(mine.prefix)) & set(system.namespaces(other.prefix))


def test_a_lab_may_be_called_as_any_cluster() -> None:
    cluster = load_cluster("mixed-8")
    assert Lab(cluster, name="my_lab-8").prefix == prefix_of("my_lab-8")
    for name in ("a.b", "a/b", "", "ä", "a" * 41):
        with pytest.raises(InputError, match="lab name"):
            Lab(cluster, name=name or " ")


def test_a_lab_that_goes_while_labs_are_listed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "FOLDER", tmp_path)
    for name in "abc":
        Record(name=name, cluster="{}", shares=()).write()
    found = records()
    assert next(found).name == "a"
    (tmp_path / "b.json").unlink()
    assert [one.name for one in found] == ["c"]


def test_a_job_that_cannot_be_started_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    sleeper = WorkerCommand(
        label="a0.0", command=(sys.executable, "-c", "import time; time.sleep(60)"), environment={}
    )
    missing = WorkerCommand(label="b0.0", command=(str(tmp_path / "nothing"),), environment={})
    job = LabJob([sleeper, missing])
    with pytest.raises(RunError, match=r"b0\.0 cannot be started: .*/nothing: No such file"), job:
        pass
    assert [process.poll() is not None for process in job.processes] == [True]


def test_a_job_whose_start_is_interrupted_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes are out of the terminal's reach."""
    sleeper = WorkerCommand(
        label="a0.0", command=(sys.executable, "-c", "import time; time.sleep(60)"), environment={}
    )
    job, start = LabJob([sleeper, sleeper]), LabJob._start

    def start_one(self: LabJob, worker: WorkerCommand) -> None:
        if self.processes:
            raise KeyboardInterrupt
        start(self, worker)

    monkeypatch.setattr(LabJob, "_start", start_one)
    with pytest.raises(KeyboardInterrupt), job:
        pass
    assert [process.poll() is not None for process in job.processes] == [True]


def test_a_lab_that_cannot_follow_its_changes_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def set_time(now: float) -> float:
        raise RunError("tc: no such device")

    lab = Lab(load_cluster("mixed-8"), name="astray")
    monkeypatch.setattr("argosy.lab.lab.FOLDER", tmp_path)
    monkeypatch.setattr(lab, "_set_time", set_time)
    monkeypatch.setattr(
        lab,
        "start",
        lambda *_, **__: LabJob([WorkerCommand(label="a", command=("true",), environment={})]),
    )
    with pytest.raises(
        RunError, match="the lab stopped following the cluster's changes: tc: no such device"
    ):
        lab.run(["true"])
