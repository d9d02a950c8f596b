"""``argosy lab``: built, shown, changed, used and removed by commands. Needs root and a kernel that
has namespaces."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from argosy.cli import main
from argosy.lab import lab as labs
from argosy.lab import record
from argosy.lab.record import prefix_of, records
from argosy.lab.system import why_no_core_share, why_not

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no lab here: {REASON}")
NO_SHARES = REASON or why_no_core_share()
CLUSTER = """
name = "pair"
[[nodes]]
name = "a"
devices = { kind = "CPU-core" }
nic = { bandwidth = "100 Mbit/s" }
[[nodes]]
name = "b"
devices = { kind = "CPU-core", efficiency = 0.5 }
nic = { bandwidth = "100 Mbit/s", latency = "1 ms" }
"""
NAME = f"command{os.getpid()}"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A cluster file; a lab that a test leaves behind is removed."""
    monkeypatch.chdir(tmp_path)
    Path("pair.toml").write_text(CLUSTER, encoding="utf-8")
    yield "pair.toml"
    if any(known.name == NAME for known in records()):
        labs.down(NAME)


class Command:
    """``argosy lab ...``: its exit code, what it said, and what it answered in JSON."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *arguments: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) as stop:
            main(["lab", *arguments])
        captured = self.capsys.readouterr()
        assert stop.value.code == code, captured.err
        return captured.out if code == 0 else captured.err


@pytest.fixture
def lab(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def test_a_lab_lives_by_commands(source: str, lab: Command) -> None:
    told = lab("up", source, "--name", NAME, "--no-shares")
    assert told.startswith(f"lab {NAME} is up: ")
    assert [line.split()[0] for line in told.splitlines()[1:3]] == ["a0", "b0"]
    assert f"{NAME}  " in lab("show")
    described = next(
        one for one in json.loads(lab("show", "--json"))["labs"] if one["name"] == NAME
    )
    assert [host["devices"] for host in described["hosts"]] == [["a0.0"], ["b0.0"]]
    program = [
        sys.executable,
        "-c",
        "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'])",
    ]
    assert set(lab("run", NAME, "--", *program).splitlines()) == {"a0.0: 0 2", "b0.0: 1 2"}
    assert lab("run", NAME, "--devices", "b0.0", "--", *program) == "b0.0: 0 1\n"
    assert lab("change", NAME, "a0.nic", "20 Mbit/s") == ""
    assert json.loads(lab("change", NAME, "a0.nic", "0", "--json"))["bytes_per_second"] == 0
    assert "0.0 ended with exit code 1" in lab("run", NAME, "-q", "--", "false", code=4)
    slower = lab("change", NAME, "a0.0", "0.5", code=2)
    assert (
        slower
        == "error: Cannot change the speed of a0.0 because the lab was started without shares of cores. "
        "Try 0, for a lost device.\n"
    )
    assert f"Cannot start the lab {NAME} because it is already running" in lab(
        "up", source, "--name", NAME, code=2
    )
    assert lab("down", NAME) == f"lab {NAME} is down\n"
    assert NAME in lab("down", NAME, code=2)


def core_share(group: Path) -> float:
    """That a control group may have, whichever version it is of."""
    if (group / "cpu.max").exists():
        quota, period = (group / "cpu.max").read_text().split()
        return int(quota) / int(period)
    return int((group / "cpu.cfs_quota_us").read_text()) / int(
        (group / "cpu.cfs_period_us").read_text()
    )


@pytest.mark.skipif(NO_SHARES is not None, reason=f"no shares of a core here: {NO_SHARES}")
def test_a_device_is_slowed_by_a_command(source: str, lab: Command) -> None:
    up = json.loads(lab("up", source, "--name", NAME, "--json"))
    assert up["not_emulated"] == ["latency (up to 1 ms here): the lab shapes bandwidth only"]
    (group,) = Path("/sys/fs/cgroup").glob(f"**/{prefix_of(NAME)}a0.0")
    whole = core_share(group)
    assert whole == pytest.approx(labs.open_lab(NAME).share_of("a0.0"), rel=1e-3)
    assert json.loads(lab("change", NAME, "a0.0", "0.5", "--json"))["speed"] == 0.5
    assert core_share(group) == pytest.approx(whole / 2, rel=1e-3)
    for value in ("1.5", "-1", "half"):
        assert f'VALUE: found "{value}", expected a speed from 0 (lost) to 1 (full)' in lab(
            "change", NAME, "--", "a0.0", value, code=2
        )
    assert 'found "a0.nix", expected an edge or a device of pair; did you mean "a0.nic"?' in lab(
        "change", NAME, "a0.nix", "1 Mbit/s", code=2
    )
    assert 'VALUE: found "fast"' in lab("change", NAME, "a0.nic", "fast", code=2)
    assert json.loads(lab("down", NAME, "--json"))["labs"] == [NAME]


def test_where_no_lab_is_up_the_commands_say_so(
    source: str, lab: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "FOLDER", tmp_path / "none")
    assert lab("show") == lab("down") == "no lab is up\n"
    assert 'found "pair"' in lab("run", "pair", "--", "true", code=2)
    assert "expected a command after --" in lab("run", "pair", code=2)
