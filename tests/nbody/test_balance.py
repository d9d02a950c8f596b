"""Re-balancing by measured work and speed: how fast it evens out, when it stays still, and that
memory binds."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from nbody.balance_worker import balance_series
from nbody.thread_ranks import on_threads

from argosy.errors import InfeasibleError
from argosy.nbody.planning.balance import Balancer, BalanceSample, Leaves, Rules, run_totals

HERE = Path(__file__).parent


def check(found: dict[str, list[float]]) -> None:
    assert found["start"][0] > 2.0, "equal counts on unequal devices are far from even"
    assert max(found["start"][3:]) <= 1.05
    assert found["slowed"][0] > 1.3
    assert max(found["slowed"][3:]) <= 1.05
    assert found["difference"][0] <= 1e-5


def test_four_unequal_ranks_even_out() -> None:
    results = on_threads(4, lambda ranks, mesh: balance_series(ranks, mesh, count=6000, steps=6))
    assert all(result["start"] == results[0]["start"] for result in results)
    check(results[0])


def test_four_unequal_processes_even_out() -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, *launch, str(HERE / "balance_worker.py"), "6000", "6"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    check(json.loads(done.stdout.splitlines()[-1]))


def look(
    work: list[float], ends: tuple[int, ...], seconds: list[float], mesh: list[float] | None = None
) -> BalanceSample:
    leaves = Leaves(
        work=np.array(work), bytes=np.full(len(work), 100.0), sent=np.full(len(work), 100.0)
    )
    still = np.zeros(len(seconds)) if mesh is None else np.array(mesh)
    return BalanceSample(
        leaves=leaves, ends=ends, tree_seconds=np.array(seconds), mesh_seconds=still
    )


def test_a_cut_follows_the_measured_speed() -> None:
    balancer = Balancer(capacity=(math.inf, math.inf))
    assert balancer.decide(look([1.0] * 12, (6, 12), [2.0, 6.0])) == (9, 12)
    assert balancer.decide(look([1.0] * 12, (9, 12), [3.0, 3.0])) is None
    assert balancer.moves == 1


def test_time_on_the_mesh_is_time_not_on_the_tree() -> None:
    balancer = Balancer(capacity=(math.inf, math.inf))
    ends = balancer.decide(look([1.0] * 100, (50, 100), [50.0, 50.0], [20.0, 0.0]))
    assert ends is not None
    totals = run_totals(np.ones(100), ends) + np.array([20.0, 0.0])
    assert totals.max() == 60.0


def test_small_gains_and_dear_moves_are_left_alone() -> None:
    slightly = look([1.0] * 100, (51, 100), [51.0, 49.0])
    assert Balancer(capacity=(math.inf, math.inf)).decide(slightly) is None
    clearly = look([1.0] * 100, (60, 100), [60.0, 40.0])
    assert Balancer(capacity=(math.inf, math.inf)).decide(clearly) == (50, 100)
    dear = Balancer(capacity=(math.inf, math.inf), rules=Rules(bandwidth=10.0, horizon=1))
    assert dear.decide(clearly) is None  # 1,000 bytes take 100 s, and gain 10 s
    patient = Balancer(capacity=(math.inf, math.inf), rules=Rules(bandwidth=10.0, horizon=20))
    assert patient.decide(clearly) == (50, 100)


def test_noise_does_not_make_it_swing() -> None:
    """Speeds measured with 5 % noise: after the first moves there are hardly any more."""
    random = np.random.default_rng(3)
    balancer, ends, speeds = (
        Balancer(capacity=(math.inf,) * 4),
        (25, 50, 75, 100),
        np.array([4.0, 3.0, 2.0, 1.0]),
    )
    work = random.uniform(0.5, 1.5, 100)
    moved_at = []
    for step in range(60):
        seconds = run_totals(work, ends) / speeds * random.normal(1, 0.02, 4)
        fresh = balancer.decide(look(work.tolist(), ends, seconds.tolist()))
        if fresh is not None:
            moved_at.append(step)
            ends = fresh
    assert (run_totals(work, ends) / speeds).max() <= 1.1 * work.sum() / speeds.sum()
    assert len([step for step in moved_at if step > 5]) <= 20


def true_imbalances(
    noise: float, *, steps: int = 12, first: tuple[float, ...] = (1.0, 1.0, 1.0)
) -> list[float]:
    """Slowest over ideal, without noise, of speeds 4:2:1 whose measured seconds have noise."""
    random, speeds = np.random.default_rng(8), np.array([4.0, 2.0, 1.0])
    work, per_plane = random.uniform(0.5, 1.5, 600), 2.5
    balancer, ends, planes = Balancer(capacity=(math.inf,) * 3), (200, 400, 600), (0, 42, 85, 128)
    ideal = (work.sum() + 128 * per_plane) / speeds.sum()
    found = []
    for step in range(steps):
        tree, mesh = run_totals(work, ends) / speeds, np.diff(planes) * per_plane / speeds
        found.append(float((tree + mesh).max() / ideal))
        seen = [part * random.lognormal(0, noise, 3) for part in (tree, mesh)]
        if step == 0:
            seen = [part * np.array(first) for part in seen]
        sample = look(work.tolist(), ends, seen[0].tolist(), seen[1].tolist())
        sample = replace(sample, planes=planes)
        planes = balancer.slabs(sample)
        ends = balancer.decide(sample, planes) or ends
    return found


def test_particles_and_planes_even_out_together() -> None:
    found = true_imbalances(0.0)
    assert found[0] > 2
    assert max(found[1:]) <= 1.02, "both cuts expect the other"


def test_a_slow_first_force_is_forgotten() -> None:
    found = true_imbalances(0.0, first=(2.5, 2.5, 8.0))
    assert found[1] > 1.1
    assert max(found[2:]) <= 1.02


def test_noise_is_averaged() -> None:
    """Measurements that scatter by 15 % leave less than that in the division."""
    assert np.mean(true_imbalances(0.15, steps=40)[8:]) <= 1.06


def test_a_speed_that_changes_is_followed_after_two_steps() -> None:
    balancer, ends = Balancer(capacity=(math.inf, math.inf)), (60, 120)
    for _ in range(6):
        assert balancer.decide(look([1.0] * 120, ends, [6.0, 6.0])) is None
    halved = look([1.0] * 120, ends, [12.0, 6.0])
    assert balancer.decide(halved) is None, "one odd measurement may be noise"
    assert balancer.decide(halved) == (40, 120)
    assert balancer.decide(look([1.0] * 120, (40, 120), [8.0, 8.0])) is None


def test_memory_binds() -> None:
    balancer = Balancer(capacity=(400.0, math.inf))
    assert balancer.decide(look([1.0] * 12, (4, 12), [0.1, 8.0])) is None  # the fast one is full
    with pytest.raises(InfeasibleError):
        Balancer(capacity=(400.0, 400.0)).decide(look([1.0] * 12, (6, 12), [6.0, 6.0]))


def slabs_after(capacity: float, planes: tuple[int, ...], seconds: list[float]) -> tuple[int, ...]:
    """Three ranks with 400 bytes of particles each and planes of 10 bytes."""
    balancer = Balancer(capacity=(capacity,) * 3, plane_bytes=10.0)
    return balancer.slabs(replace(look([1.0] * 12, (4, 8, 12), [1.0] * 3, seconds), planes=planes))


def test_slabs_follow_the_mesh_speed_as_far_as_memory_goes() -> None:
    assert slabs_after(math.inf, (0, 16, 32, 32), [1.0, 3.0, 0.0]) == (0, 24, 32, 32)
    assert slabs_after(math.inf, (0, 24, 32, 32), [1.5, 1.5, 0.0]) == (0, 24, 32, 32)
    assert slabs_after(600.0, (0, 16, 32, 32), [1.0, 3.0, 0.0]) == (0, 20, 32, 32)
    assert slabs_after(500.0, (0, 16, 32, 32), [1.0, 3.0, 0.0]) == (0, 16, 32, 32), (
        "nothing fits: left as it is"
    )


def test_planes_leave_less_room_for_particles() -> None:
    measured = replace(look([1.0] * 12, (4, 12), [1.0, 8.0]), planes=(0, 30, 32))
    roomy = Balancer(capacity=(1100.0, math.inf), plane_bytes=0.0).decide(measured)
    tight = Balancer(capacity=(1100.0, math.inf), plane_bytes=20.0).decide(measured)
    assert roomy == (10, 12)
    assert tight == (5, 12), "30 planes of 20 bytes leave 500 of 1,100"
