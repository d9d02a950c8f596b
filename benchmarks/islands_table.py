"""Synchronous plans and island plans on two and three sites, over links of 0.1, 1 and 10 Gbit/s: who is faster where.

``python -m benchmarks.islands_table``: gpt2-xl in bf16 with 256 samples a step on sites of 8 A100 each, 20 ms apart,
predicted by the simulator.
"""

from __future__ import annotations

import sys
from pathlib import Path

from argosy.choose.islands import IslandOptions, find_island_plan
from argosy.cluster.file import build_cluster
from argosy.cluster.topology import Cluster
from argosy.document import parse_toml
from argosy.plan.islands import Compression, IslandPlan
from argosy.planner import find_plan
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
    return build_cluster(parse_toml(f'name = "sites-{count}"\n{nodes}', file="sites.toml"), folder=Path())


def described(plan: IslandPlan) -> str:
    assert plan.predicted is not None
    late = f", {plan.overlap} late" if plan.overlap else ""
    return f"{plan.predicted.step_seconds:.2f} s (H = {plan.sync_every}{late})"


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
                for options in (IslandOptions(**{**vars(asked), "count": count}) for asked in OPTIONS.values())
            ]
            sys.stdout.write(f"| {count} | {rate} | {used} | {' | '.join(cells)} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
