"""Small jobs on equal devices, drawn at random, and DAPPLE's own cases."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from argosy.baselines import Job
from argosy.cluster.file import load_cluster
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.dtype import Dtype
from argosy.workload.chain import Chain, Layer
from argosy.workload.dapple import read_dapple
from argosy.workload.profile import Profile, ProfileRow

PROFILES = Path(__file__).resolve().parents[3] / "shared" / "data" / "dapple-profiles"
DAPPLE_MODELS = {"bert-48": (2, 64), "vgg-19": (32, 2048), "gnmt-16": (64, 1024)}
"""Profile batch and global batch."""
DAPPLE_CLUSTERS = {"A": ((8, 8), 3.0), "B": ((1,) * 16, 3.0), "C": ((1,) * 16, 1.2)}
"""Devices of every server, and GB/s between servers."""


def equal_cluster(folder: Path, sizes: tuple[int, ...], between: float, inside: float = 25.0) -> Cluster:
    """Servers with V100 that differ in their number only; GB/s, next to no latency."""
    nodes = "".join(
        f'[[nodes]]\nname = "v{chr(97 + at)}"\ndevices = {{ kind = "V100-16GB", count = {size} }}\n'
        f'nic = {{ bandwidth = "{between} GB/s", latency = "1 us" }}\n'
        + (f'intra = [{{ medium = "nvlink", bandwidth = "{inside} GB/s", latency = "1 us" }}]\n' if size > 1 else "")
        for at, size in enumerate(sizes)
    )
    file = folder / "equal.toml"
    file.write_text(f'name = "equal"\n{nodes}')
    return load_cluster(file)


def random_job(seed: int, folder: Path, sizes: tuple[int, ...], *, layers: int, batch: int) -> Job:
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
    cluster = equal_cluster(folder, sizes, rng.choice([0.5, 3.0]))
    return Job(chain=chain, cluster=cluster, global_batch=batch, model=ComputeModel(profiles={"V100-16GB": profile}))


def dapple_job(model: str, config: str, folder: Path) -> Job:
    """A model of DAPPLE's on one of its three configurations."""
    profile_batch, batch = DAPPLE_MODELS[model]
    chain, profile = read_dapple(PROFILES / f"{model}-pbs-{profile_batch}.txt")
    sizes, between = DAPPLE_CLUSTERS[config]
    cluster = replace(equal_cluster(folder, sizes, between), name=config)
    return Job(chain=chain, cluster=cluster, global_batch=batch, model=ComputeModel(profiles={profile.device: profile}))
