"""Sailor's measurements: the published ones, where they are at hand, and small broken ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from argosy.cluster.catalogue import device_kind
from argosy.dtype import Dtype
from argosy.errors import InputError
from argosy.workload.profile import Profile
from argosy.workload.profile_file import dump_profile, parse_profile
from argosy.workload.sailor import (
    CATALOGUE_NAMES,
    DeviceGroup,
    read_sailor,
    read_sailor_bandwidths,
    read_sailor_measured,
)

SAILOR = Path(__file__).resolve().parents[3] / "shared" / "data" / "sailor"
needs_data = pytest.mark.skipif(not SAILOR.is_dir(), reason=f"no data of {SAILOR.name} beside the repository")
MODELS = ("OPT-350", "GPT-Neo-2.7", "OPT-30", "LLAMA-3-8")
RUNS = sorted(SAILOR.glob("measured/*/*.json"))


@needs_data
@pytest.mark.parametrize(
    ("model", "layers", "parameters", "length", "kinds", "rows"),
    [
        ("OPT-350", 26, 407_431_168, 2048, 7, 3354),
        ("GPT-Neo-2.7", 34, 2_651_673_600, 2048, 4, 1904),
        ("OPT-30", 50, 30_335_334_400, 2048, 2, 850),
        ("LLAMA-3-8", 35, 8_797_954_048, 8192, 3, 385),
    ],
)
def test_totals(model: str, layers: int, parameters: int, length: int, kinds: int, rows: int) -> None:
    chain, profiles = read_sailor(SAILOR, model)
    assert (len(chain.layers), chain.parameters, chain.sequence_length) == (layers, parameters, length)
    assert (chain.dtype, chain.optimizer) == (Dtype.FP32, "adam")
    assert len(profiles) == kinds
    assert sum(len(profile.rows) for profile in profiles.values()) == rows


@needs_data
@pytest.mark.parametrize("model", MODELS)
def test_every_published_time_is_found_again(model: str) -> None:
    chain, profiles = read_sailor(SAILOR, model)
    published = json.loads((SAILOR / "layer-times.json").read_text())[model]
    for kind, batches in published.items():
        profile = profiles[CATALOGUE_NAMES[kind]]
        for batch, widths in batches.items():
            for width, layers in widths.items():
                for layer, (forward, backward, _) in layers.items():
                    question = (chain.layers[int(layer)].name, int(batch), int(width))
                    assert profile.forward_seconds(*question) == forward
                    assert profile.backward_seconds(*question) == backward


@needs_data
def test_spot_values() -> None:
    chain, profiles = read_sailor(SAILOR, "OPT-350")
    assert [layer.name for layer in chain.layers[:2]] == ["embedding.0", "block.1"]
    block, head = chain.layers[1], chain.layers[25]
    assert (block.parameters, block.activation_bytes, block.output_bytes) == (12_596_224, 360_726_528, 2048 * 1024 * 4)
    assert (head.name, head.output_bytes, head.max_tensor_width) == ("head.25", 0, 8)
    assert profiles["A100-40GB"].forward_seconds("block.2", 4, 2) == 0.005121
    assert profiles["GH200-96GB"].backward_seconds("head.25", 128, 4) == 0.102021
    assert [layer.kind for layer in read_sailor(SAILOR, "LLAMA-3-8")[0].layers[32:]] == ["block", "norm", "head"]


@needs_data
def test_names_are_the_catalogues_and_so_is_the_memory() -> None:
    nodes = json.loads((SAILOR / "nodes.json").read_text())
    for name, known in CATALOGUE_NAMES.items():
        assert nodes[name]["mem_per_gpu"] == pytest.approx(device_kind(known).memory, rel=0.02)


@needs_data
def test_the_rtx_2080_is_a_ti() -> None:
    """An update reads and writes memory only; the chip of a plain RTX 2080 has two thirds of the speed of a Titan RTX's."""
    times = json.loads((SAILOR / "layer-times.json").read_text())["OPT-350"]
    measured = times["Titan-RTX"]["1"]["1"]["1"][2] / times["RTX-2080"]["1"]["1"]["1"][2]
    titan = device_kind("Titan-RTX").memory_bandwidth
    assert measured == pytest.approx(device_kind("RTX-2080Ti").memory_bandwidth / titan, rel=0.03)
    assert measured > 1.3 * device_kind("RTX-2080").memory_bandwidth / titan


SLOWER_ON_A100 = {
    ("GPT-Neo-2.7", "head.33", 1, 2),
    ("GPT-Neo-2.7", "head.33", 1, 4),
    ("GPT-Neo-2.7", "embedding.0", 2, 1),
    ("OPT-350", "embedding.0", 1, 4),
}
"""Layers without a matrix product, where a millisecond goes to launching kernels."""


@needs_data
@pytest.mark.parametrize("model", MODELS)
def test_an_a100_is_faster_than_a_v100(model: str) -> None:
    _, profiles = read_sailor(SAILOR, model)
    slow = {_question(row): row for row in profiles["V100-16GB"].rows}
    slower = set()
    for kind in ("A100-40GB", "A100-80GB"):
        for row in profiles[kind].rows if kind in profiles else ():
            other = slow.get(_question(row))
            if other and row.forward_seconds > other.forward_seconds:
                slower.add((model, *_question(row)))
            if other and row.backward_seconds > 10e-6:
                assert row.backward_seconds < other.backward_seconds
    assert slower == {exception for exception in SLOWER_ON_A100 if exception[0] == model}


@needs_data
@pytest.mark.parametrize("model", MODELS)
def test_blocks_take_longer_with_more_samples(model: str) -> None:
    _, profiles = read_sailor(SAILOR, model)
    for kind, profile in profiles.items():
        blocks = [row for row in profile.rows if row.layer.startswith("block")]
        for one, next_one in zip(blocks, blocks[1:], strict=False):
            if (one.layer, one.tensor_width) != (next_one.layer, next_one.tensor_width):
                continue
            assert one.micro_batch < next_one.micro_batch
            assert one.forward_seconds < next_one.forward_seconds
            if (kind, one.layer, one.tensor_width, one.micro_batch) != ("GH200-96GB", "block.1", 4, 1):
                assert one.backward_seconds < next_one.backward_seconds


PEAK = {"GH200-96GB": Dtype.TF32, "A100-40GB": Dtype.TF32, "A100-80GB": Dtype.TF32, "RTX-3090": Dtype.TF32}


@needs_data
@pytest.mark.parametrize(("model", "hidden"), [("OPT-350", 1024), ("GPT-Neo-2.7", 2560), ("OPT-30", 7168)])
def test_no_block_beats_its_device(model: str, hidden: int) -> None:
    chain, profiles = read_sailor(SAILOR, model)
    length = chain.sequence_length
    flop = 24 * length * hidden**2 + 4 * length**2 * hidden
    for kind, profile in profiles.items():
        rows = [row for row in profile.rows if row.layer == "block.2"]
        best = max(flop * row.micro_batch / row.tensor_width / row.forward_seconds for row in rows)
        peak = device_kind(kind).peak(PEAK.get(kind, Dtype.FP32))
        assert 0.1 * peak < best < peak


@needs_data
def test_opt_30_on_an_a100_ran_in_plain_fp32() -> None:
    _, profiles = read_sailor(SAILOR, "OPT-30")
    flop = 24 * 2048 * 7168**2 + 4 * 2048**2 * 7168
    rate = flop / profiles["A100-40GB"].forward_seconds("block.1", 1)
    assert 0.9 < rate / device_kind("A100-40GB").peak(Dtype.FP32) < 1


@needs_data
@pytest.mark.parametrize("model", MODELS)
def test_profiles_survive_json(model: str) -> None:
    for profile in read_sailor(SAILOR, model)[1].values():
        assert parse_profile(dump_profile(profile), file="p.json") == profile


@needs_data
@pytest.mark.parametrize(
    ("model", "kind", "question", "message"),
    [
        (
            "OPT-30",
            "V100-16GB",
            ("block.1", 1, 1),
            "tensor_width: found 1, expected a measured tensor width of block.1 of OPT-30 on V100-16GB in fp32 (4, 7, 8)",
        ),
        (
            "OPT-350",
            "V100-16GB",
            ("block.1", 8, 1),
            "micro_batch: found 8, expected 1 to 4 samples, as measured for block.1 of OPT-350 on V100-16GB",
        ),
    ],
)
def test_published_holes_are_refused_by_name(
    model: str, kind: str, question: tuple[str, int, int], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        read_sailor(SAILOR, model)[1][kind].forward_seconds(*question)
    assert str(caught.value) == message


@needs_data
def test_bandwidths() -> None:
    found = read_sailor_bandwidths(SAILOR)
    assert (len(found.nodes), len(found.pairs)) == (17, 1016)
    assert found.within_node("A100-40GB", 4) == 243214602913.50012
    assert found.within_node("RTX-3090", 2) == pytest.approx(49.77e9, rel=1e-3)
    for count, gigabytes in ((1, 22.9), (2, 45.7), (4, 92.6)):
        group = DeviceGroup(kind="GH200-96GB", num_devices=count, zone="us-central1-a")
        assert found.between_nodes(group, group) == pytest.approx(gigabytes * 1e9, rel=2e-3)
        assert found.between_nodes(group, group) <= count * 25e9
    titan = DeviceGroup(kind="Titan-RTX", num_devices=2, zone="us-central1-a")
    ti = DeviceGroup(kind="RTX-2080Ti", num_devices=2, zone="us-central1-a")
    assert found.between_nodes(titan, ti) == pytest.approx(2.858e9, rel=1e-3)
    with pytest.raises(InputError) as caught:
        found.between_nodes(ti, titan)
    assert str(caught.value) == (
        'from 2 x RTX-2080Ti in us-central1-a: found "2 x Titan-RTX in us-central1-a", expected a measured receiver '
        "(2 x RTX-2080Ti in us-central1-a, 2 x RTX-3090 in us-central1-a)"
    )


@needs_data
def test_leaving_a_node_is_slower_than_staying() -> None:
    found = read_sailor_bandwidths(SAILOR)
    inside = {(node.kind, node.num_devices): node.bandwidth for node in found.nodes}
    for pair in found.pairs:
        assert pair.bandwidth < inside.get((pair.sender.kind, pair.sender.num_devices), float("inf"))


@needs_data
def test_measured_runs() -> None:
    assert len(RUNS) == 18
    run = read_sailor_measured(SAILOR / "measured" / "mixed-rtx" / "plan_config_N3_D1.json")
    assert [(stage.layers[0], stage.layers[-1]) for stage in run.stages] == [(0, 7), (8, 16), (17, 25)]
    assert [str(replica.groups[0]) for stage in run.stages for replica in stage.replicas] == [
        "8 x RTX-3090 in us-central1-a",
        "8 x RTX-2080Ti in us-central1-a",
        "8 x Titan-RTX in us-central1-a",
    ]
    assert (run.micro_batch, run.global_batch, run.num_micro_batches) == (2, 144, 72)
    assert (run.iteration_seconds, run.gradient_seconds, run.peak_bytes) == (59.45533, 5.4637, 6305087488)


@needs_data
@pytest.mark.parametrize("path", RUNS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_no_run_is_much_faster_than_its_layers(path: Path) -> None:
    """The slowest stage computes all its micro-batches one after the other; measured layers may be a little slow."""
    chain, profiles = read_sailor(SAILOR, "OPT-350")
    run = read_sailor_measured(path)
    assert sum(len(stage.layers) for stage in run.stages) == len(chain.layers)
    computing = max(
        run.num_micro_batches * _stage_seconds(profiles[replica.groups[0].kind], stage.layers, run.micro_batch, replica)
        for stage in run.stages
        for replica in stage.replicas
    )
    assert 0.35 < computing / run.iteration_seconds < 1.25


def _stage_seconds(profile: Profile, layers: tuple[int, ...], samples: int, replica: Any) -> float:
    names = [profile.layers[layer].name for layer in layers]
    width = replica.tensor_width
    return sum(
        profile.forward_seconds(name, samples, width) + profile.backward_seconds(name, samples, width)
        for name in names
    )


def _question(row: Any) -> tuple[str, int, int]:
    return row.layer, row.micro_batch, row.tensor_width
