"""Small jobs on equal devices, drawn at random."""

from __future__ import annotations

import random

from argosy.baselines import PlanningJob
from argosy.cost.compute import ComputeModel
from argosy.dtype import Dtype
from argosy.workload.chain import Chain, Layer
from argosy.workload.profile import Profile, ProfileRow
from benchmarks.dapple import equal_cluster


def random_job(seed: int, sizes: tuple[int, ...], *, layers: int, batch: int) -> PlanningJob:
    """A chain with measured times, every sample costing the same."""
    rng = random.Random(seed)
    chain = Chain(
        name="random",
        layers=tuple(
            Layer(
                name=f"l{index}",
                kind=f"l{index}",
                forward_flop=0.0,
                backward_flop=0.0,
                parameters=rng.randrange(1, 40) * 1_000_000,
                activation_bytes=1e6,
                output_bytes=rng.choice([1e5, 1e6, 1e7]),
            )
            for index in range(layers)
        ),
        sequence_length=1,
        dtype=Dtype.FP32,
    )
    rows = [(layer.name, rng.uniform(1e-3, 8e-3)) for layer in chain.layers]
    profile = Profile(
        device="V100-16GB",
        model="random",
        rows=tuple(
            ProfileRow(
                layer=name,
                micro_batch=1,
                tensor_width=1,
                dtype=Dtype.FP32,
                forward_seconds=seconds,
                backward_seconds=2 * seconds,
            )
            for name, seconds in rows
        ),
    )
    cluster = equal_cluster(sizes, rng.choice([0.5, 3.0]))
    return PlanningJob(
        chain=chain,
        cluster=cluster,
        global_batch=batch,
        model=ComputeModel(profiles={"V100-16GB": profile}),
    )
