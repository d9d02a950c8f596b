"""Lines of JSON that a run adds to its files, while others read them."""

from __future__ import annotations

import errno
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from argosy.errors import InputError
from argosy.runtime.elastic.folder import check_folder
from argosy.runtime.elastic.origin import steps_told
from argosy.runtime.processes.manifest import write_manifest
from argosy.runtime.processes.run_folder import (
    DECISIONS,
    PROGRESS,
    Log,
    Tail,
    append,
    forget_after,
    held,
    read_lines,
)
from argosy.runtime.processes.run_spec import RunSpec


def test_every_line_is_read_once_and_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / PROGRESS
    tail = Tail(path)
    assert tail.read() == []
    append(path, {"step": 0})
    with path.open("a") as file:
        file.write('{"step": 1')
    assert tail.read() == [{"step": 0}]
    assert tail.read() == []
    with path.open("a") as file:
        file.write("}\n")
    assert tail.read() == [{"step": 1}]
    assert tail.lines == [{"step": 0}, {"step": 1}]


def test_what_an_earlier_run_has_left_is_not_read_as_news(tmp_path: Path) -> None:
    path = tmp_path / PROGRESS
    for step in range(5):
        append(path, {"step": step})
    tail = Tail(path)
    assert tail.read() == []
    path.unlink()  # the new run begins its own
    assert tail.read() == []
    append(path, {"step": 0})
    assert tail.read() == [{"step": 0}]
    assert len(read_lines(path)) == 1


def test_a_line_that_was_cut_off_with_its_writer_does_not_count(tmp_path: Path) -> None:
    assert steps_told(tmp_path) == 0
    (tmp_path / PROGRESS).write_text('{"step": 6}\n{"step": 7, "lo')
    assert steps_told(tmp_path) == 7


def test_whoever_writes_after_a_line_that_was_cut_off_is_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append(path, {"step": 0})
    with path.open("ab") as file:
        file.write(b'{"step": 1, "lo')
    append(path, {"step": 2})
    append(path, {"step": 3})
    assert [line["step"] for line in read_lines(path)] == [0, 2, 3]


def test_only_what_is_trained_again_is_forgotten(tmp_path: Path) -> None:
    path, decisions = tmp_path / PROGRESS, tmp_path / DECISIONS
    forget_after(tmp_path, 3)
    assert not path.exists()
    for step in range(5):
        append(path, {"step": step})
    with path.open("ab") as file:
        file.write(b'\0\0\0\n[]\n{"step": 5, "lo')
    append(decisions, {"event": "decision", "step": 0, "applied_before": 2})
    append(decisions, {"event": "outcome", "step": 0})
    append(decisions, {"event": "decision", "step": 2, "applied_before": 4})
    append(decisions, {"event": "outcome", "step": 3})
    kept = b"".join(path.read_bytes().splitlines(keepends=True)[:3])
    for _ in range(2):
        forget_after(tmp_path, 3)
        assert path.read_bytes() == kept
        assert [(line["event"], line["step"]) for line in read_lines(decisions)] == [
            ("decision", 0),
            ("outcome", 0),
        ]
    forget_after(tmp_path, 0)
    assert list(tmp_path.iterdir()) == []


def test_an_elastic_run_that_goes_on_keeps_what_was_told(tmp_path: Path) -> None:
    for step in (3, 4):
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    write_manifest(
        tmp_path / "checkpoints" / "step-00000003", {"steps": 3, "scale": 1.0, "aliases": {}}, {}
    )
    for step in range(5):
        append(tmp_path / PROGRESS, {"step": step})
    check_folder(RunSpec(plan="p", program="q", out=str(tmp_path), steps=1, resume=True))
    assert [line["step"] for line in read_lines(tmp_path / PROGRESS)] == [0, 1, 2]


def test_a_folder_is_held_by_one_run_for_each_node(tmp_path: Path) -> None:
    waiting = [sys.executable, "-c", "input()"]
    with held(tmp_path, "0") as lock:
        with pytest.raises(InputError) as refused, held(tmp_path, "0"):
            pass
        with held(tmp_path, "1"):
            pass
        child = subprocess.Popen(waiting, stdin=subprocess.PIPE, pass_fds=(lock,))
    assert str(refused.value) == (
        f"Cannot start a run in {tmp_path} because a run is still writing into it (node 0). "
        "Try another --out, or wait for the end of that run."
    )
    try:
        with pytest.raises(InputError, match="a run is still writing into it"), held(tmp_path, "0"):
            pass
    finally:
        child.kill()
        child.communicate()
    with held(tmp_path, "0"):
        pass


def test_an_elastic_run_and_another_refuse_each_other(tmp_path: Path) -> None:
    def refused(node: str, *, elastic: bool) -> str:
        with pytest.raises(InputError) as caught, held(tmp_path, node, elastic=elastic):
            pass
        return str(caught.value)

    with held(tmp_path, "v0", elastic=True), held(tmp_path, "v1", elastic=True):
        assert "because an elastic run is still writing into it (node v" in refused(
            "0", elastic=False
        )
    with held(tmp_path, "0"), held(tmp_path, "1"):
        assert "because a run is still writing into it (node " in refused("v0", elastic=True)
    with held(tmp_path, "v0", elastic=True):
        pass


def test_lines_wait_for_a_disk_that_is_full_and_for_a_folder_that_was_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = Log(tmp_path / "run" / PROGRESS)
    log.add({"step": 0})
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with mock.patch.object(Path, "open", full):
        log.add({"step": 1})
        log.add({"step": 2})
    assert capsys.readouterr().err.count("No space left on device; its lines are kept") == 1
    log.add({"step": 3})
    assert [line["step"] for line in read_lines(log.path)] == [0, 1, 2, 3]
    shutil.rmtree(tmp_path / "run")
    log.add({"step": 4})
    assert [line["step"] for line in read_lines(log.path)] == [4]


def test_a_line_of_which_only_a_part_was_written_is_written_again(tmp_path: Path) -> None:
    """As on a disk that has room for some bytes: the system writes those, and raises nothing."""
    log = Log(tmp_path / PROGRESS)
    log.add({"step": 0})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    asked = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (log.path.stat().st_size + 5, limits[1]))
        log.add({"step": 1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, asked)
    assert log.path.read_bytes().endswith(b'{"ste')
    log.add({"step": 2})
    assert [line["step"] for line in read_lines(log.path)] == [0, 1, 2]
