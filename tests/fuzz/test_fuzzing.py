"""A few changed inputs for every reader and command, and every input that was once too much for one
of them.

``make fuzz`` tries as many more as there is time for; what it finds belongs into ``corpus``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz.fuzz_commands import command_files, commands, folder_files
from fuzz.fuzz_loop import judge, luck_of, put_files, try_input
from fuzz.fuzz_targets import BY_NAME, SEEDS, TARGETS, valid_files

CORPUS = Path(__file__).parent / "corpus"
ENTRIES = sorted(path for path in CORPUS.glob("*/*") if path.is_dir())
FEW = {"commands": 12, "checkpoint": 8, "weights": 8, "snapshot": 15, "restart": 15}
"""Inputs for those that take longer; elsewhere 40."""


@pytest.mark.parametrize("name", BY_NAME)
def test_changed_inputs_are_read_or_refused(name: str, tmp_path: Path) -> None:
    failures = [try_input(BY_NAME[name], number, tmp_path) for number in range(FEW.get(name, 40))]
    assert not [failure for failure in failures if failure is not None]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_once_failed_does_not_again(entry: Path, tmp_path: Path) -> None:
    """An entry holds the files that differ from the valid ones."""
    target = BY_NAME[entry.parent.name]
    changed = {
        str(path.relative_to(entry)): path.read_bytes()
        for path in entry.rglob("*")
        if path.is_file()
    }
    place = tmp_path / target.name
    put_files({**valid_files(target.name), **changed}, place)
    found = judge(lambda: target.read(place))
    assert found is None, found


@pytest.mark.parametrize("name", [target.name for target in TARGETS if target.name != "commands"])
def test_the_valid_files_are_valid(name: str, tmp_path: Path) -> None:
    """Else a reader could pass by refusing everything."""
    put_files(valid_files(name), tmp_path / name)
    BY_NAME[name].read(tmp_path / name)


def test_the_rule_is_kept_in_earnest() -> None:
    """What is no answer is found out: another exception, a warning, an endless loop, an endless
    allocation."""
    assert judge(lambda: 1 / 0) is not None
    assert judge(lambda: bytearray(2**45)) is not None
    assert judge(lambda: None) is None


def test_an_input_is_told_by_its_number() -> None:
    assert command_files(luck_of("commands", 7)) == command_files(luck_of("commands", 7))
    assert command_files(luck_of("commands", 7)) != command_files(luck_of("commands", 8))


def test_every_folder_of_seeds_is_used() -> None:
    assert {path.name for path in SEEDS.iterdir()} <= set(BY_NAME)
    assert {path.name for path in CORPUS.iterdir()} <= set(BY_NAME)
    assert {"plan", "nbody run", "lab up", "cluster show"} <= set(commands())
    assert len(folder_files()) > 15
