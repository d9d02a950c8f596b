"""Synchronous plans and island plans on two and three sites, over links of 0.1, 1 and 10 Gbit/s:
who is faster where.

``python -m benchmarks.islands_table``: gpt2-xl in bf16 with 256 samples a step on sites of 8 A100
each, 20 ms apart, predicted by the simulator.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

from argosy.choose.islands import IslandOptions, find_island_plan
from argosy.cluster.file import build_cluster
from argosy.cluster.topology import Cluster
from argosy.document import parse_toml
from argosy.plan.islands import Compression, IslandPlan
from argosy.planner import find_plan
from argosy.sim.islands import play_islands
from argosy.workload.chain import Chain
from argosy.workload.load import load_model

RATES = ("0.1", "1", "10", "100")
"""Gbit/s between sites."""
OPTIONS = {
    "H auto": IslandOptions(),
    "overlapped": IslandOptions(overlaps=True, fragments=2),
    "overlapped, int8": IslandOptions(overlaps=True, fragments=2, compression=Compression.INT8),
}


def sites(count: int, rate: str) -> Cluster:
    nodes = "".join(
        f'[[nodes]]\nname = "{"xyz"[at]}"\ndevices = {{ kind = "A100-80GB", count = 8 }}\n'
        'intra = [{ medium = "nvlink", bandwidth = "300 GB/s", latency = "3 us" }]\n'
        f'nic = {{ bandwidth = "{rate} Gbit/s", latency = "10 ms" }}\n'
        for at in range(count)
    )
    return build_cluster(
        parse_toml(f'name = "sites-{count}"\n{nodes}', file="sites.toml"), folder=Path()
    )


def described(plan: IslandPlan) -> str:
    assert plan.predicted is not None
    late = f", {plan.overlap} late" if plan.overlap else ""
    return f"{plan.predicted.step_seconds:.2f} s (H = {plan.sync_every}{late})"


def crossing(plan: IslandPlan, chain: Chain, synchronous: float) -> float:
    """Gbit/s from which on an island plan is faster than a synchronous plan on one site, which
    needs no link."""
    slow, fast = 0.01, 10.0
    for _ in range(12):
        middle = math.sqrt(slow * fast)
        seconds = play_islands(
            plan, chain, sites(len(plan.islands), f"{middle:.6f}"), steps=400
        ).step_seconds
        slow, fast = (slow, middle) if seconds < synchronous else (middle, fast)
    return fast


def crossings(chain: Chain) -> None:
    """With exchanges every 100 steps, the limit of ``--sync-every auto``."""
    alone = find_plan(chain, sites(1, "1"), global_batch=256).predicted
    assert alone is not None
    for count in (2, 3):
        options = IslandOptions(count=count, sync_every=100)
        blocking = find_island_plan(chain, sites(count, "1"), global_batch=256, options=options)
        late = replace(blocking, fragments=2, overlap=49)
        plans = (blocking, late, replace(late, compression=Compression.INT8))
        found = [f"{crossing(plan, chain, alone.iteration_seconds):.2f}" for plan in plans]
        texts = [
            f"{plan.algorithm}: {rate} Gbit/s" for plan, rate in zip(plans, found, strict=True)
        ]
        sys.stdout.write("\n".join(texts) + "\n")


def main() -> None:
    chain = load_model("gpt2-xl", dtype="bf16")
    sys.stdout.write(f"| sites | Gbit/s | synchronous | {' | '.join(OPTIONS)} |\n")
    sys.stdout.write(f"| --- | --- | --- |{' --- |' * len(OPTIONS)}\n")
    for count in (2, 3):
        for rate in RATES:
            where = sites(count, rate)
            best = find_plan(chain, where, global_batch=256)
            assert best.predicted is not None
            used = f"{best.predicted.iteration_seconds:.2f} s ({len(best.devices)} of {8 * count} devices)"
            cells = [
                described(find_island_plan(chain, where, global_batch=256, options=options))
                for options in (
                    IslandOptions(**{**vars(asked), "count": count}) for asked in OPTIONS.values()
                )
            ]
            sys.stdout.write(f"| {count} | {rate} | {used} | {' | '.join(cells)} |\n")
            sys.stdout.flush()
    crossings(chain)


if __name__ == "__main__":
    main()
