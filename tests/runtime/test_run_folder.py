"""Lines of JSON that a run adds to its files, while others read them."""

from __future__ import annotations

from pathlib import Path

from argosy.runtime.elastic.origin import steps_told
from argosy.runtime.folder import PROGRESS, Tail, append, read_lines


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
