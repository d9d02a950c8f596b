"""Gravity: particles per second per core at GADGET-4's accuracy or better, against a direct sum and
pytreegrav.

The box is the shared one of 32^3 particles at z = 0 where it is to be had, with exact Ewald sums;
else a 2LPT box, whose errors are not measured. One thread, CPU time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np

from argosy.nbody.compiled import compiled
from argosy.nbody.force.gravity import compute_forces
from argosy.nbody.force.hilbert import hilbert_keys
from argosy.nbody.force.pairs import BLOCK, sum_far
from argosy.nbody.force.settings import Cloud, GravitySettings
from argosy.nbody.force.split import ForceSplit
from argosy.nbody.initial.conditions import initial_conditions
from argosy.nbody.planning.balance import run_totals
from argosy.solve.search.chain import cut_chain
from benchmarks.registry import Benchmark, Row, cpu_seconds

ANCHOR = Path(__file__).parents[2] / "shared" / "data" / "nbody" / "anchor_l50n32.npz"
SETTINGS = GravitySettings(mesh_cells=64, softening=0.05, threads=1)
PAIR_FLOP = 40


def measure() -> list[Row]:
    positions, content = evolved_box()
    rows = _against_others(positions)
    for cloud in (Cloud.PCS, Cloud.CIC):
        settings = GravitySettings(mesh_cells=64, softening=0.05, cloud=cloud, threads=1)
        seconds = cpu_seconds(lambda s=settings: compute_forces(positions, 50.0, 1.0, s), repeats=5)
        target = ">= 150 (GADGET-4: 40-95)" if cloud is Cloud.PCS else ""
        rows.append(
            Row(
                what=f"full force, {cloud}",
                value=len(positions) / seconds / 1e3,
                unit="k particles/s/core",
                target=target,
            )
        )
        if content is not None:
            rows += _errors(positions, content, settings)
    return [*rows, *_kernel(), *_growth(), *_cuts(positions)]


def evolved_box() -> tuple[np.ndarray, dict[str, Any] | None]:
    """Positions of 32^3 particles in 50 Mpc/h, and exact forces where they are known."""
    if not ANCHOR.exists():
        return initial_conditions(
            box=50.0, per_side=32, redshift=0.5, seed=1
        ).particles.positions, None
    with np.load(ANCHOR) as file:
        content = {name: file[name] for name in ("z0_pos", "ewald_idx", "ewald_sum")}
    return np.mod(content["z0_pos"].astype(np.float64), 50.0), content


def _errors(positions: np.ndarray, content: dict[str, Any], settings: GravitySettings) -> list[Row]:
    exact = content["ewald_sum"]
    found = compute_forces(positions, 50.0, 1.0, settings).total[content["ewald_idx"]]
    errors = 100 * np.linalg.norm(found - exact, axis=1) / np.linalg.norm(exact, axis=1)
    name = f"error against Ewald, {settings.cloud}"
    return [
        Row(what=f"{name}, median", value=float(np.median(errors)), unit="%", target="<= 0.15"),
        Row(
            what=f"{name}, 99th percentile",
            value=float(np.percentile(errors, 99)),
            unit="%",
            target="<= 1.2",
        ),
    ]


def _against_others(positions: np.ndarray) -> list[Row]:
    """Both compute open boundaries, which is less work than a periodic box."""
    count = len(positions)
    part = positions[:2048]
    direct = _cpu(lambda: _direct(part, positions)) * count / len(part)
    rows = [
        Row(
            what="direct sum in numba, float64",
            value=count / direct / 1e3,
            unit="k particles/s/core",
        )
    ]
    try:
        import pytreegrav
    except ModuleNotFoundError:
        return rows
    mass, soft = np.ones(count), np.full(count, 0.14)
    tree = _cpu(
        lambda: pytreegrav.Accel(positions, mass, soft, method="tree", parallel=False, theta=0.7)
    )
    return [
        *rows,
        Row(
            what="pytreegrav, theta 0.7, open box",
            value=count / tree / 1e3,
            unit="k particles/s/core",
        ),
    ]


def _cpu(work: Callable[[], object]) -> float:
    work()
    begin = time.process_time()
    work()
    return time.process_time() - begin


@compiled
def _direct(targets: np.ndarray, sources: np.ndarray) -> np.ndarray:
    force = np.zeros_like(targets)
    for i in range(targets.shape[0]):
        x = y = z = 0.0
        for j in range(sources.shape[0]):
            dx, dy, dz = (
                sources[j, 0] - targets[i, 0],
                sources[j, 1] - targets[i, 1],
                sources[j, 2] - targets[i, 2],
            )
            r2 = dx * dx + dy * dy + dz * dz + 0.0025
            w = 1.0 / (r2 * math.sqrt(r2))
            x += w * dx
            y += w * dy
            z += w * dz
        force[i, 0], force[i, 1], force[i, 2] = x, y, z
    return force


@numba.njit(error_model="numpy", fastmath={"contract"})
def _multiply_adds(values: np.ndarray, times: int) -> None:
    """Independent chains of fused multiply-adds: what the core can do at most in float32. None may
    be folded."""
    a, b = np.float32(0.999), np.float32(0.001)
    for _ in range(times):
        for i in range(values.shape[0]):
            v = values[i]
            v = v * a + b
            v = v * a + b
            v = v * a + b
            v = v * a + b
            v = v * a + b
            v = v * a + b
            v = v * a + b
            v = v * a + b
            values[i] = v


def multiply_add_peak() -> float:
    """FLOP/s of a core in float32 multiply-adds."""
    values = np.random.default_rng(1).uniform(0, 1, 4096).astype(np.float32)
    _multiply_adds(values, 1)
    return 4096 * 2000 * 16 / cpu_seconds(lambda: _multiply_adds(values, 2000), repeats=5)


def _kernel() -> list[Row]:
    """The pair kernel alone, on data in the first-level cache, against the core's measured
    multiply-add rate."""
    random = np.random.default_rng(1)
    targets = random.uniform(-0.3, 0.3, (3, 32)).astype(np.float32)
    sources = random.uniform(-0.3, 0.3, (10, BLOCK)).astype(np.float32)
    poly = ForceSplit(scale=1.0, cutoff=5.5, softening=0.05).coefficients
    total = np.zeros((32, 3))

    def pairs() -> None:
        for _ in range(200):
            sum_far(targets, sources, BLOCK, poly, total)

    pairs()
    rate = 200 * 32 * BLOCK / cpu_seconds(pairs, repeats=5)
    peak = multiply_add_peak()
    return [
        Row(what="pair kernel", value=rate / 1e6, unit="M pairs/s/core"),
        Row(what="measured multiply-add peak, float32", value=peak / 1e9, unit="GFLOP/s/core"),
        Row(
            what="pair kernel, 40 FLOP a pair, of that peak",
            value=100 * rate * PAIR_FLOP / peak,
            unit="%",
            target="PHoToNs: 74",
        ),
    ]


def _growth() -> list[Row]:
    rows = []
    for side in (16, 32, 64, 128):
        box = initial_conditions(box=1.5 * side, per_side=side, redshift=0.5, seed=1)
        settings = GravitySettings(mesh_cells=2 * side, softening=0.05, threads=1)
        work = lambda b=box, s=settings: compute_forces(b.particles.positions, b.size, 1.0, s)  # noqa: E731
        seconds = cpu_seconds(work, repeats=1 if side > 64 else 3)
        rows.append(
            Row(
                what=f"2LPT box of {side}^3, z = 0.5",
                value=seconds / side**3 * 1e6,
                unit="us per particle",
            )
        )
    return rows


def _cuts(positions: np.ndarray) -> list[Row]:
    """Slowest over ideal for three ways to cut the curve."""
    work = compute_forces(positions, 50.0, 1.0, SETTINGS).work[
        np.argsort(hilbert_keys(positions, 50.0))
    ]
    rows = []
    for speeds in ((8.0, 4.0, 2.0, 1.0), (10.0, 10.0, 3.0, 3.0, 1.0, 1.0, 1.0, 1.0)):
        rate = np.array(speeds)
        ideal = work.sum() / rate.sum()

        def by_count(share: np.ndarray) -> tuple[int, ...]:
            return tuple(np.rint(np.cumsum(share) / np.sum(share) * len(work)).astype(int))

        cuts = (
            ("equal counts", by_count(np.ones(len(rate)))),
            ("counts by speed", by_count(rate)),
            ("work by speed", cut_chain(work, rate).ends),
        )
        for name, ends in cuts:
            slowest = float((run_totals(work, ends) / rate).max() / ideal)
            label = ":".join(f"{speed:g}" for speed in speeds)
            rows.append(Row(what=f"speeds {label}, {name}", value=slowest, unit="slowest / ideal"))
    return rows


BENCHMARK = Benchmark(
    name="gravity",
    shows="forces of 32^3 particles in a periodic box at z = 0; accuracy, speed, growth, balance",
    measure=measure,
)
