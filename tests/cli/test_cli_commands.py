"""Every command explains itself, prints tables that fit, and JSON with a version."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from cli.command_result import PLAN, Run

from argosy.workload.load import preset_names

COMMANDS = [
    ("demo",),
    ("init",),
    ("doctor",),
    ("simulate",),
    ("calibrate",),
    ("export",),
    ("trace",),
    ("devices",),
    ("models",),
    ("run",),
    ("cluster", "show"),
    ("cluster", "check"),
]
CALLS = {
    "demo": ("demo", "--no-train", "-q"),
    "simulate": ("simulate", PLAN, "-q"),
    "trace": ("trace", PLAN, "-q"),
    "devices": ("devices",),
    "models": ("models",),
    "cluster show": ("cluster", "show", "mixed-16"),
    "cluster check": ("cluster", "check", "mixed-16"),
}


@pytest.fixture(autouse=True)
def short_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("argosy.cli.running.demo.SECONDS", 40.0)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_has_an_example(run: Run, command: tuple[str, ...]) -> None:
    result = run(*command, "--help")
    assert result.code == 0
    assert f"    argosy {' '.join(command)}" in result.out


@pytest.mark.parametrize("command", [(), ("cluster",)])
def test_help_lists_the_commands(run: Run, command: tuple[str, ...]) -> None:
    result = run(*command, "--help")
    assert result.code == 0
    for name in COMMANDS:
        if name[:-1] == command:
            assert f"\n  {name[-1]} " in result.out
    assert "..." not in result.out.split("Commands:")[1]


@pytest.mark.parametrize("command", CALLS)
def test_json_is_versioned(run: Run, command: str) -> None:
    document = json.loads(run(*CALLS[command], "--json").out)
    assert document["version"] == 1
    assert document["command"] == command
    assert list(document) == sorted(document)


@pytest.mark.parametrize("command", CALLS)
def test_output_fits_80_columns(run: Run, command: str) -> None:
    result = run(*CALLS[command])
    assert result.code == 0
    lines = [line for line in result.out.splitlines() if not line.startswith("wrote")]
    assert max(map(len, lines), default=0) <= 80


def test_version(run: Run) -> None:
    assert run("--version").out.startswith("argosy 0.")


def test_devices(run: Run) -> None:
    assert (
        "V100-32GB           32 GiB   900 GB/s   15.7      -    125      -      -"
        in run("devices").out
    )
    kinds = json.loads(run("devices", "--json").out)["devices"]
    assert all(kind["source"] for kind in kinds)


def test_models(run: Run) -> None:
    listed = [line.split()[0] for line in run("models").out.splitlines()[1:]]
    assert listed == preset_names()


def test_cluster_show(run: Run) -> None:
    out = run("cluster", "show", "geo-8").out
    assert "east0  4x A100-40GB  nvlink 300 GB/s      3.125 GB/s" in out
    assert "wan   east0 and west0   625 MB/s    30 ms" in out
    assert "what changes" in out
    assert "what changes" not in run("cluster", "show", "two-cards").out


def test_cluster_check(run: Run, tmp_path: Path) -> None:
    assert (
        run("cluster", "check", "two-cards").out
        == "two-cards: 2x RTX-A6000 + 2x RTX-2080Ti in 1 node: fine\n"
    )
    (tmp_path / "bad.toml").write_text(
        'name = "x"\n[[nodes]]\nname = "a"\ndevices = { kind = "A101" }\nnics = 1\n'
    )
    result = run("cluster", "check", "bad.toml")
    assert result.code == 2
    assert result.err.startswith("error: bad.toml:5: nodes[0].nics: found an unknown field")


def test_trace_writes_one_file_or_one_per_rank(run: Run, tmp_path: Path) -> None:
    assert run("trace", PLAN, "-o", "one.json.gz", "-q").out == (
        "wrote one.json.gz; open it at https://ui.perfetto.dev\n"
    )
    assert (
        json.loads(gzip.decompress((tmp_path / "one.json.gz").read_bytes()))["schemaVersion"] == 1
    )
    run("trace", PLAN, "-o", "one.json", "-q")
    assert json.loads((tmp_path / "one.json").read_text())["schemaVersion"] == 1
    assert "wrote 16 files to ranks" in run("trace", PLAN, "--per-rank", "ranks", "-q").out
    ranks = [
        json.loads(gzip.decompress(path.read_bytes())) for path in (tmp_path / "ranks").iterdir()
    ]
    assert sorted(document["distributedInfo"]["rank"] for document in ranks) == list(range(16))


def test_trace_of_a_timeline_is_that_of_its_plan(run: Run, tmp_path: Path) -> None:
    run("simulate", PLAN, "-o", "timeline.json", "-q")
    run("trace", "timeline.json", "-o", "one.json")
    run("trace", PLAN, "-o", "two.json", "-q")
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
