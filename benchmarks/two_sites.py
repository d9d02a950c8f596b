"""How far level 2 proves its plans on ten clusters of two sites: ``python -m
benchmarks.two_sites``.

The clusters are drawn by seed: nodes of one kind on each side, and one line between the sites.
Those of ``KNOWN`` may be looked at while the planner is changed; those of ``APART`` are only
measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random

from argosy.cluster.file import build_cluster
from argosy.cluster.topology import Cluster
from argosy.document import Document
from argosy.planner import Settings, find_plan
from argosy.workload.load import load_model
from benchmarks.registry import Benchmark, Row

KNOWN = tuple(range(5))
APART = tuple(range(100, 105))
SECONDS = 60.0
"""CPU time of a search."""
_KINDS = ("A100-40GB", "V100-16GB", "RTX-3090", "L4")
_MODELS = {"gpt2-medium": 0.36e9, "gpt2-xl": 1.6e9, "llama-3-8b": 8e9}
"""Names, and numbers of weights."""
_BYTES = 32
"""Of memory for a weight, with optimizer state and activations: so much of a model is sure to
fit."""


def drawn(seed: int) -> tuple[str, Cluster]:
    """The same model and cluster for the same seed."""
    random = Random(seed)
    nodes = [
        {
            "name": name,
            "count": random.choice((1, 2)),
            "devices": {"kind": kind, "count": random.choice((2, 4, 8))},
            "intra": [
                {
                    "medium": "bus",
                    "bandwidth": f"{random.choice((12, 50, 300))} GB/s",
                    "latency": "5 us",
                }
            ],
            "nic": {"bandwidth": f"{random.choice((10, 25, 100))} Gbit/s", "latency": "20 us"},
        }
        for name, kind in zip(("east", "west"), random.sample(_KINDS, 2), strict=True)
    ]
    line = {
        "name": "line",
        "between": ["east*", "west*"],
        "bandwidth": f"{_between(random, 0.5, 20):.2f} Gbit/s",
        "latency": f"{_between(random, 1, 80):.1f} ms",
    }
    content = {"name": f"two-sites-{seed}", "nodes": nodes, "links": [line]}
    cluster = build_cluster(Document("cluster", content, {}), folder=Path())
    room = sum(device.kind.memory for device in cluster.devices) / _BYTES
    return random.choice([model for model, weights in _MODELS.items() if weights < room]), cluster


def _between(random: Random, low: float, high: float) -> float:
    """Drawn evenly on a logarithmic scale."""
    return float(low * (high / low) ** random.random())


def measure(seeds: Iterable[int] = (*KNOWN, *APART), seconds: float = SECONDS) -> list[Row]:
    """The certified gap of every cluster, and the medians of both halves."""
    gaps: dict[int, float] = {}
    rows = []
    for seed in seeds:
        model, cluster = drawn(seed)
        chain = load_model(model, sequence_length=1024, dtype="fp16")
        settings = Settings(level=2, gap=0.02, time_budget=seconds)
        plan = find_plan(chain, cluster, global_batch=64, settings=settings)
        assert plan.certificate is not None and plan.search is not None
        gaps[seed] = 100 * plan.certificate.gap
        units = plan.certificate.granularity
        label = f"{model} on {cluster!r}, seed {seed}, units of {units}"
        rows.append(Row(what=label, value=gaps[seed], unit="%", target="<= 3"))
        print(
            f"  {label}: {gaps[seed]:.2f} % after {plan.search.cpu_seconds:.0f} s",
            file=sys.stderr,
            flush=True,
        )
    for name, half in (("known", KNOWN), ("kept apart", APART)):
        if some := [gaps[seed] for seed in half if seed in gaps]:
            rows.append(
                Row(what=f"median of those {name}", value=statistics.median(some), unit="%")
            )
    return rows


BENCHMARK = Benchmark(
    name="two-sites",
    shows="certified gaps of level 2 on ten clusters of two sites, in 60 s each",
    measure=measure,
)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.two_sites", description=__doc__)
    parser.add_argument(
        "seeds", nargs="*", type=int, default=[*KNOWN, *APART], help="by default all ten"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="CPU time of a search")
    options = parser.parse_args(arguments)
    for row in measure(options.seeds, options.seconds):
        print(f"{row.what:<70} {row.value:>8.2f} {row.unit}")


if __name__ == "__main__":
    main()
