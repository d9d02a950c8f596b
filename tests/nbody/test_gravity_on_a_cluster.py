"""Gravity and cluster files: runs that keep to a cluster's memory and begin at its speeds, plans
that can be played."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from nbody.boxes import clustered
from nbody.emulated import EmulatedClock
from nbody.thread_ranks import ThreadRanks, on_threads

from argosy.cli import main
from argosy.cluster.file import load_cluster
from argosy.cluster.topology import Cluster
from argosy.errors import InfeasibleError
from argosy.nbody.files.snapshot import read_snapshot
from argosy.nbody.force.settings import GravitySettings
from argosy.nbody.particles import Particles
from argosy.nbody.planning.placement import place_as_planned, plan_on
from argosy.nbody.processes.shared import PARTICLE_BYTES, SharedGravity

FOUR = load_cluster("two-cards")
PAIR = """
name = "pair"
[[nodes]]
name = "box"
devices = [{ kind = "CPU-core", count = 1 }, { kind = "CPU-core", count = 1, efficiency = 0.4 }]
intra = [{ medium = "nvlink", bandwidth = "600 GB/s", latency = "1 us" }]
"""


@pytest.fixture
def pair(tmp_path: Path) -> Cluster:
    (tmp_path / "pair.toml").write_text(PAIR)
    return load_cluster(tmp_path / "pair.toml")


def argosy(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--quiet"])
    return int(stop.value.code or 0)


def with_memory(cluster: Cluster, *sizes: float) -> Cluster:
    pairs = zip(cluster.devices, sizes, strict=True)
    return replace(
        cluster,
        devices=tuple(
            replace(device, kind=replace(device.kind, memory=size)) for device, size in pairs
        ),
    )


def held_after(
    cluster: Cluster, speeds: list[float], forces: int, *, planned: tuple[int, int] = (4000, 32)
) -> list[list[int]]:
    """Particles on each of two ranks, force after force, from the domains of a box with these
    numbers of particles and of mesh cells per side."""
    positions = clustered(4000, 10.0, seed=7)
    begin = place_as_planned(plan_on(cluster, *planned), *planned)

    def work(ranks: ThreadRanks, mesh_ranks: ThreadRanks) -> list[int]:
        mine = np.flatnonzero(np.arange(len(positions)) % 2 == ranks.rank)
        particles = Particles(positions=positions[mine], momenta=np.zeros((len(mine), 3)), ids=mine)
        engine = SharedGravity(
            size=10.0,
            strength=1.0,
            settings=GravitySettings(
                mesh_cells=32, softening=0.01, threads=1, cell_size=64, leaf_size=16
            ),
            ranks=ranks,
            mesh_ranks=mesh_ranks,
            parts=begin.parts,
            planes=begin.planes if begin.planes[-1] == 32 else (),
            balancer=replace(begin.balancer),
            clock=EmulatedClock(speeds),
        )
        counts = []
        for _ in range(forces):
            particles, _ = engine.forces(particles)
            counts.append(len(particles))
        return counts

    return on_threads(2, work)


def test_a_run_begins_by_speed_and_goes_on_by_measurement(pair: Cluster) -> None:
    # For a few thousand particles the slower core's messages would take longer than they save.
    fast, slow = held_after(pair, [1.0, 4.0], 6, planned=(64**3, 128))
    assert fast[0] > slow[0], "the faster core begins with more"
    assert fast[-1] < slow[-1], "but turned out to be the slower one"


def test_memory_of_the_cluster_binds_whatever_the_speed(pair: Cluster) -> None:
    mesh = 48.0 * 32**3
    small = (mesh + 1000 * PARTICLE_BYTES) / 0.9
    no_mesh = 4000 * 500 / 0.9  # all particles and their halos, but then no mesh
    first, second = held_after(with_memory(pair, small, no_mesh), [16.0, 1.0], 6)
    limit = 0.9 * small / PARTICLE_BYTES
    assert max(first) <= limit
    assert first[-1] + second[-1] == 4000
    with pytest.raises(InfeasibleError, match="do not fit into the memory of pair"):
        plan_on(with_memory(pair, 1e5, 1e5), 4000, 32)


def test_a_run_on_a_cluster_is_the_same_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    initial, alone, together = tmp_path / "ic.hdf5", tmp_path / "alone", tmp_path / "together"
    assert (
        argosy("nbody", "ic", "--box", "50", "--per-side", "16", "-z", "24", "-o", str(initial))
        == 0
    )
    common = ("nbody", "run", str(initial), "--steps", "4")
    assert argosy(*common, "-o", str(alone)) == 0
    assert argosy(*common, "-o", str(together), "--cluster", "two-cards") == 0
    one, other = (
        read_snapshot(folder / "snapshot_000.hdf5").particles for folder in (alone, together)
    )
    np.testing.assert_array_equal(other.positions, one.positions)
    capfd.readouterr()
    plan, no = tmp_path / "gravity.json", str(tmp_path / "no")
    mesh = ("--mesh", "32")
    planning = ("nbody", "plan", "-c", "two-cards", "-n", "16^3", *mesh, "--steps", "1")
    assert argosy(*planning, "-o", str(plan)) == 0
    content = json.loads(plan.read_text())
    items = content["compared"][0]["ends"][-1]
    divided = {"ends": [items // 2, items // 2, items - 9, items], "planes": [8, 0, 0, 24]}
    plan.write_text(json.dumps(content | {"plan": {"name": "three of four", **divided}}))
    planned = tmp_path / "planned"
    assert argosy(*common, "-o", str(planned), "--plan", str(plan), *mesh) == 0
    parts = list((planned / "restart").rglob("*.hdf5"))
    assert len(parts) == 3, "one process for each device that has work"
    assert (planned / "snapshot_000.hdf5").read_bytes() == (
        together / "snapshot_000.hdf5"
    ).read_bytes()
    assert argosy(*common, "-o", no, "--plan", str(plan), "--cluster", "two-cards") == 2
    assert "--cluster cannot be combined with --plan" in capfd.readouterr().err
    assert argosy(*common, "-o", no, "--plan", str(plan), *mesh, "--processes", "4") == 2
    expected = "one for each of the 3 devices of two-cards that have work"
    message = f'error: --processes: found "4 processes", expected {expected}'
    assert capfd.readouterr().err.strip() == message
    assert argosy(*common, "-o", str(tmp_path / "no"), "--device", "cuda:7") == 2
    assert "--device" in capfd.readouterr().err
    assert not (tmp_path / "no").exists()


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan for a box that is too large for one card."""
    path = tmp_path_factory.mktemp("gravity") / "gravity.json"
    assert argosy("nbody", "plan", "-c", "two-cards", "--particles", "448^3", "-o", str(path)) == 0
    return path


def test_a_plan_is_played_like_any_other(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert argosy("simulate", str(plan_file), "--iterations", "3", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    steady = {run["name"]: run["step_seconds"] for run in told["runs"]}
    planned = told["runs"][0][
        "name"
    ]  # where tree and mesh on equal hosts decide, that of equal counts
    assert told["workload"] == "gravity" and set(steady) >= {
        planned,
        "equal counts",
        "counts by speed",
    }
    assert all(
        len(seconds) == 3 and seconds[0] == pytest.approx(seconds[2]) for seconds in steady.values()
    )
    assert min(steady, key=lambda name: steady[name][0]) == planned
    step = steady[planned][0]
    trace = tmp_path / "slow.csv"
    trace.write_text(f"seconds,speed\n0,1\n{2 * step},0.4\n")
    device = FOUR.devices[0].name
    slowed = ("--trace", f"{device}={trace}", "--iterations", "12", "--adapt", "full", "--json")
    assert argosy("simulate", str(plan_file), *slowed) == 0
    runs = {run["name"]: run for run in json.loads(capsys.readouterr().out)["runs"]}
    moved = runs[f"{planned}, re-balanced"]
    assert moved["moves"] >= 1
    assert sum(moved["step_seconds"]) < 0.9 * sum(runs[planned]["step_seconds"])
    assert argosy("simulate", str(plan_file), "--until", f"{5.5 * step} s", "--width", "100") == 0
    assert "counts by speed" in capsys.readouterr().out
    assert (
        argosy(
            "simulate", str(plan_file), "--until", f"{1e7 * step} s", "--trace", f"{device}={trace}"
        )
        == 2
    )
    assert (
        "expected a time in which fewer than 1,000,000 iterations begin" in capsys.readouterr().err
    )


def test_cuts_are_compared_like_plans(capsys: pytest.CaptureFixture[str]) -> None:
    assert argosy("compare", "-m", "gravity:128^3", "-c", "two-cards", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["name"] for row in rows] == ["argosy", "equal counts", "counts by speed"]
    assert all(rows[0]["iteration_seconds"] <= row["iteration_seconds"] for row in rows)
    assert rows[0]["samples_per_second"] == pytest.approx(128**3 / rows[0]["iteration_seconds"])
    assert argosy("compare", "-m", "gravity:128^3", "-c", "two-cards", "--width", "120") == 0
    assert "computes 1." in capsys.readouterr().out
    assert argosy("compare", "-m", "gravity:128^3", "-c", "two-cards", "--dtype", "fp16") == 2
    assert capsys.readouterr().err.strip() == "error: --dtype does not apply to gravity"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"planes": [1]},
            "plan.planes: found 1 numbers, expected 4 numbers, one for each device of two-cards",
        ),
        (
            {"ends": [5, 4, 4, 4]},
            "plan.ends: found a list of 4, expected numbers that never fall, up to 4096",
        ),
        ({"planes": [3, 4, 0, 0]}, "plan.planes: found 7 in all, expected 896 in all"),
        ({"colour": 1}, "plan.colour"),
    ],
)
def test_a_broken_plan_is_told(
    change: dict[str, object],
    message: str,
    plan_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    content = json.loads(plan_file.read_text())
    content["plan"] |= change
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps(content, indent=1))
    assert argosy("simulate", str(broken)) == 2
    told = capsys.readouterr().err
    assert message in told.replace('"', "")
    assert "broken.json" in told
