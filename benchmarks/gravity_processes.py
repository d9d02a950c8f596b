"""A force on several processes of this machine: CPU time, balance on unequal cores, and the price.

    python -m benchmarks.gravity_processes --side 64 --processes 1 2 3 4
    python -m benchmarks.gravity_processes --side 64 --shares 0.4 0.2 0.1
    python -m benchmarks.gravity_processes --side 128 --gpus 1 --cores 3

The first form compares the CPU time of all processes, in the kernel too, with that of one process
without exchanges; the efficiency is their ratio. The second gives each process a share of a core
(control groups, as a lab does) and prints, force after force, the slowest process over an ideal
division, from equal counts on; then a planned division, with its price and its measured time. The
third gives the first ranks the GPU and the others a core each, in a planned division. The boxes are 2LPT boxes at z = 0.5, with a mesh of twice the particles per side.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from argosy.cluster.file import load_cluster
from argosy.cluster.topology import Cluster
from argosy.lab.system import CoreShare
from argosy.nbody.force.gravity import compute_forces
from argosy.nbody.force.settings import GravitySettings
from argosy.nbody.gpu.force import GpuTree, for_gpu
from argosy.nbody.initial.conditions import initial_conditions
from argosy.nbody.particles import Box, wrapped
from argosy.nbody.planning.balance import Balancer
from argosy.nbody.planning.plan import plan_step
from argosy.nbody.planning.pricing import typical_box
from argosy.nbody.processes.shared import Effort, ForcePhase, SharedGravity, even_planes
from argosy.nbody.ranks import TorchRanks, gather_equal, join_processes, leave_processes
from benchmarks.gravity import multiply_add_peak
from benchmarks.registry import cpu_seconds

FORCES, ROUNDS = 8, 2


def settings_of(side: int) -> GravitySettings:
    return GravitySettings(mesh_cells=2 * side, softening=0.05, threads=1)


def box_of(side: int) -> Box:
    return initial_conditions(box=1.5 * side, per_side=side, redshift=0.5, seed=1)


def engine_of(gpus: int, device: str, ranks: TorchRanks, **options: Any) -> SharedGravity:
    """The engine of a rank, as ``nbody.run`` builds it; the first ``gpus`` ranks have the GPU."""
    if gpus == ranks.size:
        from argosy.nbody.gpu.shared import SharedGpuGravity

        options["settings"] = for_gpu(options["settings"])
        return SharedGpuGravity(ranks=ranks, device=device, **options)
    engine = SharedGravity(ranks=ranks, **options)
    if ranks.rank < gpus:
        engine.sum_tree = GpuTree(device)
    return engine


def measure_rank(
    side: int, parts: list[float], planes: list[int], gpus: int, device: str, *, balanced: bool
) -> None:
    """One process: forces between which everything moves a little; the first rank prints rows."""
    ranks, mesh_ranks = join_processes()
    box = box_of(side)
    rows = np.arange(ranks.rank, len(box.particles), ranks.size)
    particles = replace(box.particles.taken(rows), ids=rows)
    engine = engine_of(
        gpus,
        device,
        ranks,
        size=box.size,
        strength=1.0,
        settings=settings_of(side),
        mesh_ranks=mesh_ranks,
        balancer=Balancer(capacity=(math.inf,) * ranks.size) if balanced else None,
        parts=tuple(parts),
        planes=tuple(planes),
    )
    raw: dict[str, float] = {}

    def keep(phase: ForcePhase, _rank: int, effort: Effort) -> float:
        raw[phase] = effort.seconds
        return effort.seconds

    engine.clock = keep
    moved = 0.002 * np.random.default_rng(5).standard_normal((len(box.particles), 3))
    for _ in range(FORCES):
        ranks.barrier()
        raw.clear()
        begin, wall = time.process_time(), time.perf_counter()
        used = engine.planes or even_planes(engine.settings.mesh_cells, ranks.size)
        particles, _ = engine.forces(particles)
        ranks.barrier()
        spent = time.process_time() - begin, time.perf_counter() - wall, len(particles)
        table = np.stack(gather_equal(ranks, np.array(spent, np.float64)))
        if ranks.rank == 0:
            seconds = engine.seconds.tolist()
            content = {"cpu": table[:, 0].tolist(), "wall": table[:, 1].max()}
            content |= {"tree_mesh": seconds, "particles": table[:, 2].tolist()}
            content |= {"phases": dict(raw), "planes": np.diff(used).tolist()}
            sys.stdout.write(json.dumps(content) + "\n")
        positions = wrapped(particles.positions + moved[particles.ids], box.size)
        particles = replace(particles, positions=positions)
    leave_processes()


def run_ranks(
    side: int,
    count: int,
    *,
    parts: Any = (),
    planes: Any = (),
    groups: Any = (),
    gpus: int = 0,
    device: str = "cuda",
    balanced: bool,
) -> list[dict[str, Any]]:
    """Start the processes; return the rows of the first."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    job = json.dumps([side, list(parts), list(planes), gpus, device, balanced])
    workers = []
    for rank in range(count):
        own = {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        if groups:
            own["ARGOSY_LAB_THREADS"] = str(groups[rank].threads)
        command = [sys.executable, "-m", "benchmarks.gravity_processes", "--rank", job]
        workers.append(subprocess.Popen(command, env=os.environ | own, stdout=subprocess.PIPE))
    output = workers[0].communicate()[0]
    codes = [worker.wait() for worker in workers]
    assert not any(codes), codes
    return [json.loads(line) for line in output.splitlines()]


def efficiency(side: int, counts: list[int]) -> None:
    """Rounds of one process and of several in turn, since other work on the machine costs CPU
    time too; the least of each."""
    box, settings = box_of(side), settings_of(side)
    positions = box.particles.positions
    compute_forces(positions, box.size, 1.0, settings)
    alone, used = math.inf, dict.fromkeys(counts, math.inf)
    for _ in range(ROUNDS):
        alone = min(alone, cpu_seconds(lambda: compute_forces(positions, box.size, 1.0, settings)))
        for count in counts:
            rows = run_ranks(side, count, balanced=True)[2:]
            used[count] = min(used[count], *(sum(row["cpu"]) for row in rows))
    print(f"{side}^3, one process without exchanges: {alone:.3f} s of CPU")
    for count, seconds in used.items():
        print(f"{count} processes: {seconds:.3f} s of CPU, {alone / seconds:.2f} efficient")


def here(shares: list[float], gpus: int, folder: Path) -> Cluster:
    """A cluster of this machine: H200s first, then devices with these shares of a core."""
    peak = multiply_add_peak()
    print(f"a core's multiply-adds: {peak / 1e9:.0f} GFLOP/s")
    devices = [f'{{ kind = "H200", count = {gpus} }}'] if gpus else []
    devices += [f'{{ kind = "here-core", count = 1, efficiency = {share} }}' for share in shares]
    path = folder / "here.toml"
    path.write_text(
        'name = "here"\n[[kinds]]\nname = "here-core"\nvendor = "this machine"\n'
        'memory = "4 GiB"\nmemory_bandwidth = "10 GB/s"\n'
        f'flops = {{ fp32 = "{peak / 1e9:.1f} GFLOP/s" }}\nsource = "measured"\n'
        f'[[nodes]]\nname = "here"\ndevices = [{", ".join(devices)}]\n'
        'intra = [{ medium = "pcie", bandwidth = "2 GB/s", latency = "20 us" }]\n'
    )
    return load_cluster(path)


def planned(
    side: int, shares: list[float], *, gpus: int = 0, device: str = "cuda", groups: Any = ()
) -> None:
    """A planned division: its price, and its measured time."""
    with tempfile.TemporaryDirectory() as folder:
        cluster = here(shares, gpus, Path(folder))
    box = typical_box(side**3)
    best = plan_step(cluster, box).best
    parts = [end / len(box.interactions) for end in best.domains.ends]
    planes = np.cumsum([0, *best.domains.planes]).tolist()
    count = gpus + len(shares)
    division: dict[str, Any] = {"parts": parts, "planes": planes, "groups": groups}
    rows = run_ranks(side, count, **division, gpus=gpus, device=device, balanced=False)[2:]
    for name in ("tree", "pair", "mesh", "busy"):
        print(f"priced, {name}: {np.round(getattr(best, f'{name}_seconds'), 3).tolist()} s")
    cpu = np.median([row["cpu"] for row in rows], axis=0)
    busy = np.median([np.sum(row["tree_mesh"], axis=1) for row in rows], axis=0)
    wall = sorted(row["wall"] for row in rows)
    print(f"particles {rows[-1]['particles']}, planes {best.domains.planes}")
    print(f"measured: {np.round(busy, 3).tolist()} s by the run's clock")
    print(f"measured: {np.round(cpu / [*[1.0] * gpus, *shares], 3).tolist()} s of CPU over share")
    print(f"first rank's phases: {[row['phases'] for row in rows][-1]}")
    print(f"step: priced {best.step_seconds:.3f} s, measured {wall[0]:.3f} to {wall[-1]:.3f} s")


def prefer(group: CoreShare) -> None:
    """Let a control group go before other work on the machine, up to its share of a core."""
    name, weight = ("cpu.shares", 262_144) if group.is_first else ("cpu.weight", 10_000)
    (group.folder / name).write_text(str(weight))


def unequal(side: int, shares: list[float]) -> None:
    """Balance from equal counts, and a planned division with its price."""
    groups = [CoreShare(f"argosy-gravity-{os.getpid()}-{rank}") for rank in range(len(shares))]
    for group, share in zip(groups, shares, strict=True):
        group.create()
        group.set(share)
        prefer(group)
    try:
        for number, row in enumerate(run_ranks(side, len(shares), groups=groups, balanced=True)):
            seconds = np.array(row["tree_mesh"]).sum(axis=1)
            slowest = seconds.max() * sum(shares) / (seconds * shares).sum()
            work = np.array(row["cpu"]) / shares
            true = work.max() * sum(shares) / sum(row["cpu"])
            print(
                f"force {number}: slowest over ideal {slowest:.3f} by its own clock, "
                f"{true:.3f} by CPU time over share; {row['wall']:.2f} s",
                flush=True,
            )
        planned(side, shares, groups=groups)
    finally:
        for group in groups:
            group.remove()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--processes", type=int, nargs="*", default=[])
    parser.add_argument("--shares", type=float, nargs="*", default=[])
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--cores", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        side, parts, planes, gpus, device, balanced = json.loads(options.rank)
        measure_rank(side, parts, planes, gpus, device, balanced=balanced)
        return 0
    if options.processes:
        efficiency(options.side, options.processes)
    if options.gpus:
        planned(options.side, [1.0] * options.cores, gpus=options.gpus, device=options.device)
    if options.shares:
        unequal(options.side, options.shares)
    return 0


if __name__ == "__main__":
    sys.exit(main())
