"""Sailor's measurements: the published ones, where they are at hand, and small broken ones."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from argosy.cluster.catalogue import device_kind
from argosy.dtype import Dtype
from argosy.errors import InputError
from argosy.workload.imports.sailor import (
    CATALOGUE_NAMES,
    SailorGroup,
    read_sailor,
    read_sailor_bandwidths,
)
from argosy.workload.imports.sailor_runs import SailorReplica, read_sailor_measured
from argosy.workload.profile import Profile, ProfileRow
from argosy.workload.profile_file import dump_profile, parse_profile

SAILOR = Path(__file__).resolve().parents[3] / "shared" / "data" / "sailor"
needs_data = pytest.mark.skipif(
    not SAILOR.is_dir(), reason=f"no data of {SAILOR.name} beside the repository"
)
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
def test_totals(
    model: str, layers: int, parameters: int, length: int, kinds: int, rows: int
) -> None:
    chain, profiles = read_sailor(SAILOR, model)
    assert (len(chain.layers), chain.parameters, chain.sequence_length) == (
        layers,
        parameters,
        length,
    )
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
    assert (block.parameters, block.activation_bytes, block.output_bytes) == (
        12_596_224,
        360_726_528,
        2048 * 1024 * 4,
    )
    assert (head.name, head.output_bytes, head.max_tensor_width) == ("head.25", 0, 8)
    assert profiles["A100-40GB"].forward_seconds("block.1", 4, 2) == 0.005044
    assert profiles["GH200-96GB"].backward_seconds("head.25", 128, 4) == 0.102021
    assert [layer.kind for layer in read_sailor(SAILOR, "LLAMA-3-8")[0].layers[32:]] == [
        "block",
        "norm",
        "head",
    ]


@needs_data
def test_names_are_the_catalogues_and_so_is_the_memory() -> None:
    nodes = json.loads((SAILOR / "nodes.json").read_text())
    for name, known in CATALOGUE_NAMES.items():
        assert nodes[name]["mem_per_gpu"] == pytest.approx(device_kind(known).memory, rel=0.02)


@needs_data
def test_the_rtx_2080_is_a_ti() -> None:
    """An update reads and writes memory only; a plain RTX 2080 has two thirds of a Titan RTX's
    speed."""
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
        for one, next_one in pairwise(blocks):
            if (one.layer, one.tensor_width) != (next_one.layer, next_one.tensor_width):
                continue
            assert one.micro_batch < next_one.micro_batch
            assert one.forward_seconds <= next_one.forward_seconds
            if (kind, one.layer, one.tensor_width, one.micro_batch) != (
                "GH200-96GB",
                "block.1",
                4,
                1,
            ):
                assert one.backward_seconds < next_one.backward_seconds


PEAK = {
    "GH200-96GB": Dtype.TF32,
    "A100-40GB": Dtype.TF32,
    "A100-80GB": Dtype.TF32,
    "RTX-3090": Dtype.TF32,
}


@needs_data
@pytest.mark.parametrize(
    ("model", "hidden"), [("OPT-350", 1024), ("GPT-Neo-2.7", 2560), ("OPT-30", 7168)]
)
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
            "tensor_width: found 1, expected a measured tensor width of block.1 of OPT-30 on V100-16GB in fp32 "
            "(4, 7, 8)",
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
        group = SailorGroup(kind="GH200-96GB", num_devices=count, zone="us-central1-a")
        assert found.between_nodes(group, group) == pytest.approx(gigabytes * 1e9, rel=2e-3)
        assert found.between_nodes(group, group) <= count * 25e9
    titan = SailorGroup(kind="Titan-RTX", num_devices=2, zone="us-central1-a")
    ti = SailorGroup(kind="RTX-2080Ti", num_devices=2, zone="us-central1-a")
    assert found.between_nodes(titan, ti) == pytest.approx(2.858e9, rel=1e-3)
    eight = [replace(group, num_devices=8) for group in (titan, ti)]
    others = SailorGroup(kind="RTX-3090", num_devices=8, zone="us-central1-a")
    copied = found.between_nodes(eight[1], others)
    assert found.between_nodes(*eight) == copied == pytest.approx(0.115e9, rel=1e-2)
    assert found.between_nics(*eight) == found.between_nics(*eight[::-1])
    assert found.between_nics(*eight) == pytest.approx(2.858e9, rel=1e-3)
    assert found.between_nics(eight[1], others) == pytest.approx(0.115e9, rel=2e-2)
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
        assert pair.bandwidth < inside.get(
            (pair.sender.kind, pair.sender.num_devices), float("inf")
        )


@needs_data
def test_measured_runs() -> None:
    assert len(RUNS) == 18
    run = read_sailor_measured(SAILOR / "measured" / "mixed-rtx" / "plan_config_N3_D1.json")
    assert [(stage.layers[0], stage.layers[-1]) for stage in run.stages] == [
        (0, 7),
        (8, 16),
        (17, 25),
    ]
    assert [str(replica.groups[0]) for stage in run.stages for replica in stage.replicas] == [
        "8 x RTX-3090 in us-central1-a",
        "8 x RTX-2080Ti in us-central1-a",
        "8 x Titan-RTX in us-central1-a",
    ]
    assert (run.micro_batch, run.global_batch, run.num_micro_batches) == (2, 144, 72)
    assert (run.iteration_seconds, run.peak_bytes) == (59.45533, 6305087488)


@needs_data
@pytest.mark.parametrize("path", RUNS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_no_run_is_much_faster_than_its_layers(path: Path) -> None:
    """The slowest stage computes all its micro-batches one after the other; measured layers may be
    a little slow."""
    chain, profiles = read_sailor(SAILOR, "OPT-350")
    run = read_sailor_measured(path)
    assert sum(len(stage.layers) for stage in run.stages) == len(chain.layers)
    computing = max(
        run.num_micro_batches
        * _stage_seconds(profiles[replica.groups[0].kind], stage.layers, run.micro_batch, replica)
        for stage in run.stages
        for replica in stage.replicas
    )
    assert 0.65 < computing / run.iteration_seconds < 1.2


def _stage_seconds(
    profile: Profile, layers: tuple[int, ...], samples: int, replica: SailorReplica
) -> float:
    names = [profile.layers[layer].name for layer in layers]
    width = replica.tensor_width
    return sum(
        profile.forward_seconds(name, samples, width)
        + profile.backward_seconds(name, samples, width)
        for name in names
    )


def _question(row: ProfileRow) -> tuple[str, int, int]:
    return row.layer, row.micro_batch, row.tensor_width


AMOUNTS = {
    "params_floats": 10,
    "params_bytes": 40,
    "act_input_floats": 8,
    "act_input_bytes": 36,
    "act_output_bytes": 64,
    "act_mem_bytes": 96,
}
TIMES = {"0": [0.001, 0.0, 0.01], "1": [0.01, 0.02, 0.01], "2": [0.03, 0.04, 0.01]}
GROUP = [[["GH-96", 2, "here"]], 2]
RUN = {
    "pipeline_list": [
        {
            "num_stages": 2,
            "layers_per_stage": [[0], [1, 2]],
            "tmp_per_stage": [[GROUP, GROUP], [GROUP, GROUP]],
            "dp": [2, 2],
        }
    ],
    "mbs": 4,
    "gbs": 16,
    "real": 1.5,
    "red_grads": 0.25,
    "max_mem": 1000,
}


def write(path: Path, content: object, place: str = "", value: object = None) -> None:
    """``content`` as JSON, with ``value`` at ``place``, or without the place where the value is
    None."""
    content = json.loads(json.dumps(content))
    *path_to, last = place.split("/")
    table: Any = content
    for name in path_to:
        table = table[int(name) if isinstance(table, list) else name]
    if place and value is None:
        del table[last]
    elif place:
        table[int(last) if isinstance(table, list) else last] = value
    path.write_text(json.dumps(content, indent=1))


def folder(path: Path, file: str = "", place: str = "", value: object = None) -> Path:
    """A folder of measurements of a small model with a change in one file."""
    contents = {
        "layer-times.json": {
            "toy": {
                "A100-40": {"1": {"1": TIMES}, "4": {"1": TIMES, "2": TIMES}},
                "TPU": {"8": {"1": TIMES}},
            }
        },
        "models.json": {"toy": {"1": {str(layer): AMOUNTS for layer in range(3)}}},
        "intra_node_bandwidths.json": {"A100-40": {"2": [[1, 2, 3], 2e11]}},
        "multizone_bandwidths_het.json": {
            "a": {"A100-40": {"1": {"b": {"TPU": {"2": [[1, 2, 3], 1e9]}}}}}
        },
    }
    for name, content in contents.items():
        write(path / name, content, *((place, value) if name == file else ()))
    return path


def message(error: pytest.ExceptionInfo[InputError], path: Path) -> str:
    assert error.value.exit_code == 2
    return str(error.value).replace(f"{path}/", "")


def test_a_small_folder(tmp_path: Path) -> None:
    chain, profiles = read_sailor(folder(tmp_path), "toy")
    assert [layer.name for layer in chain.layers] == ["embedding.0", "block.1", "head.2"]
    assert [layer.output_bytes for layer in chain.layers] == [64, 64, 0]
    assert (chain.sequence_length, chain.parameters) == (2, 30)
    assert list(profiles) == ["A100-40GB", "TPU"]
    assert profiles["TPU"].forward_seconds("block.1", 4) == 0.005


def test_a_layer_missing_at_one_micro_batch_is_interpolated(tmp_path: Path) -> None:
    batches = {
        batch: {"1": {"0": [0, 0, 0], "1": [time, time, 0]}} for batch, time in (("2", 1), ("6", 5))
    }
    folder(tmp_path, "layer-times.json", "toy/A100-40", batches | {"4": {"1": {"0": [0, 0, 0]}}})
    _, profiles = read_sailor(tmp_path, "toy")
    assert profiles["A100-40GB"].forward_seconds("block.1", 4) == 3
    with pytest.raises(InputError) as caught:
        profiles["A100-40GB"].forward_seconds("head.2", 4)
    assert str(caught.value) == (
        'layer: found "head.2", expected a measured layer of toy on A100-40GB (block.1, embedding.0)'
    )


def test_a_training_config_states_the_sequence_length(tmp_path: Path) -> None:
    config = {"model": "toy", "sequence_length": 128, "num_all_layers": 3, "optimizer": "Adam"}
    write(folder(tmp_path) / "training_config_toy.json", config)
    assert read_sailor(tmp_path, "toy")[0].sequence_length == 128
    assert read_sailor(tmp_path, "toy", sequence_length=64)[0].sequence_length == 64
    write(tmp_path / "training_config_toy.json", config, "num_all_layers", 4)
    with pytest.raises(InputError) as caught:
        read_sailor(tmp_path, "toy")
    assert message(caught, tmp_path) == (
        "training_config_toy.json:4: num_all_layers: found 4, expected 3, the layers of toy in models.json"
    )
    write(tmp_path / "training_config_toy_2.json", config)
    with pytest.raises(InputError) as caught:
        read_sailor(tmp_path, "toy")
    assert message(caught, tmp_path) == (
        'training_config_toy_2.json:2: model: found "toy", expected a model that training_config_toy.json '
        "does not train"
    )


@pytest.mark.parametrize(
    ("file", "place", "value", "expected"),
    [
        (
            "layer-times.json",
            "toy",
            None,
            'layer-times.json: model: found "toy", expected a model of this file ()',
        ),
        (
            "layer-times.json",
            "toy/TPU/8/1",
            {},
            "layer-times.json:62: toy.TPU.8.1: found an empty table, expected a table of layers",
        ),
        (
            "layer-times.json",
            "toy/TPU",
            3,
            "layer-times.json:60: toy.TPU: found 3, expected a table of micro-batches",
        ),
        (
            "layer-times.json",
            "toy/TPU/8/1/7",
            [0, 0, 0],
            'layer-times.json:78: toy.TPU.8.1.7: found "8, 1, 7", expected micro-batch and tensor width from 1 '
            "and a layer of models.json, 0 to 2",
        ),
        (
            "layer-times.json",
            "toy/TPU/8/x",
            {"0": [0, 0, 0]},
            'layer-times.json:80: toy.TPU.8.x.0: found "8, x, 0", expected micro-batch and tensor width from 1 '
            "and a layer of models.json, 0 to 2",
        ),
        (
            "layer-times.json",
            "toy/A100-40/1/1/0",
            [1, -1, 1],
            "layer-times.json:6: toy.A100-40.1.1.0: found a list of 3, expected [forward, backward, update] "
            "in seconds, at least 0",
        ),
        (
            "layer-times.json",
            "toy/A100-40GB",
            {"1": {"1": TIMES}},
            'layer-times.json:3: toy.A100-40: found "A100-40", expected a kind that is not also called A100-40GB',
        ),
        (
            "models.json",
            "toy/1",
            None,
            "models.json:2: toy.1: expected the layers at tensor width 1",
        ),
        (
            "models.json",
            "toy/1/1",
            None,
            "models.json:3: toy.1: expected layer 1 among its 2 layers, counted from 0",
        ),
        (
            "models.json",
            "toy/1/1/act_mem_bytes",
            None,
            "models.json:12: toy.1.1.act_mem_bytes: expected a value: this field is required",
        ),
        (
            "models.json",
            "toy/1/2/params_bytes",
            20,
            "models.json:22: toy.1.2.params_bytes: found 20, expected 40, 4 per parameter",
        ),
        (
            "models.json",
            "toy/1/0/act_input_floats",
            9,
            "models.json:7: toy.1.0.act_input_floats: found 9 elements in 36 bytes, expected tokens, positions "
            "and a mask: no training config of this folder states the sequence length; pass sequence_length",
        ),
    ],
)
def test_broken_profiles(
    tmp_path: Path, file: str, place: str, value: object, expected: str
) -> None:
    with pytest.raises(InputError) as caught:
        read_sailor(folder(tmp_path, file, place, value), "toy")
    assert message(caught, tmp_path) == expected


def test_unknown_models_and_settings(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read_sailor(folder(tmp_path), "tyo")
    assert message(caught, tmp_path) == (
        'models.json: model: found "tyo", expected a model of this file (toy); did you mean "toy"?'
    )
    with pytest.raises(InputError) as caught:
        read_sailor(tmp_path, "toy", sequence_length=0, optimizer="adm")
    assert message(caught, tmp_path) == (
        "sequence_length: found 0, expected a whole number of tokens, at least 1\n"
        'optimizer: found "adm", expected one of the optimizers adamw, adam, lion, momentum, adamw8bit, adafactor, '
        'sgd; did you mean "adam"?'
    )


def test_bandwidths_of_a_small_folder(tmp_path: Path) -> None:
    found = read_sailor_bandwidths(folder(tmp_path))
    sender = SailorGroup(kind="A100-40GB", num_devices=1, zone="a")
    receiver = SailorGroup(kind="TPU", num_devices=2, zone="b")
    assert (found.within_node("A100-40GB", 2), found.between_nodes(sender, receiver)) == (2e11, 1e9)
    for question, expected in (
        (
            ("A100-40", 2),
            'kind: found "A100-40", expected a kind that was measured (A100-40GB); did you mean "A100-40GB"?',
        ),
        (
            ("A100-40GB", 8),
            "num_devices: found 8, expected a measured number of A100-40GB in a node (2)",
        ),
    ):
        with pytest.raises(InputError) as caught:
            found.within_node(*question)
        assert str(caught.value) == expected
    with pytest.raises(InputError) as caught:
        found.between_nodes(receiver, sender)
    assert (
        str(caught.value)
        == 'from 2 x TPU in b: found "1 x A100-40GB in a", expected a measured receiver (none)'
    )


@pytest.mark.parametrize(
    ("file", "place", "value", "expected"),
    [
        (
            "intra_node_bandwidths.json",
            "A100-40/2",
            [[1, 2, 3]],
            "intra_node_bandwidths.json:3: A100-40.2: found a list of 1, expected [curve, bytes/s above 0]",
        ),
        (
            "intra_node_bandwidths.json",
            "A100-40/two",
            [[1, 2, 3], 1],
            'intra_node_bandwidths.json:11: A100-40.two: found "A100-40, two", expected whole numbers of '
            "GPUs, at least 1",
        ),
        (
            "multizone_bandwidths_het.json",
            "a/A100-40/1/b/TPU",
            1e9,
            "multizone_bandwidths_het.json:6: a.A100-40.1.b.TPU: found 1000000000.0, expected a table of GPU counts",
        ),
    ],
)
def test_broken_bandwidths(
    tmp_path: Path, file: str, place: str, value: object, expected: str
) -> None:
    with pytest.raises(InputError) as caught:
        read_sailor_bandwidths(folder(tmp_path, file, place, value))
    assert message(caught, tmp_path) == expected


def test_a_small_run(tmp_path: Path) -> None:
    write(tmp_path / "run.json", RUN)
    run = read_sailor_measured(tmp_path / "run.json")
    assert [stage.layers for stage in run.stages] == [(0,), (1, 2)]
    group = SailorGroup(kind="GH200-96GB", num_devices=2, zone="here")
    assert run.stages[1].replicas == (SailorReplica(groups=(group,), tensor_width=2),) * 2
    assert (run.num_micro_batches, run.iteration_seconds) == (2, 1.5)


REPLICA = "[[[GPU kind, count, zone], ...], tensor width]"


@pytest.mark.parametrize(
    ("place", "value", "expected"),
    [
        ("real", None, "run.json: real: expected a value: this field is required"),
        (
            "gbs",
            12,
            "run.json:67: gbs: found 12, expected a multiple of 8, one micro-batch of each of 2 replicas",
        ),
        (
            "pipeline_list",
            [],
            "run.json:2: pipeline_list: found a list of 0, expected one pipeline",
        ),
        (
            "pipeline_list/0/dp",
            [2, 1],
            "run.json:60: pipeline_list[0].dp: found [2, 1], expected [2, 2], the replicas of each stage",
        ),
        (
            "pipeline_list/0/layers_per_stage/1",
            [2, 1],
            "run.json:5: pipeline_list[0].layers_per_stage: expected every layer once, in order, from 0, at least "
            "one per stage",
        ),
        (
            "pipeline_list/0/tmp_per_stage",
            [[GROUP, GROUP]],
            "run.json:14: pipeline_list[0].tmp_per_stage: found a list of 1, expected replicas for each of 2 stages\n"
            "run.json:38: pipeline_list[0].dp: found [2, 2], expected [2], the replicas of each stage",
        ),
        (
            "pipeline_list/0/tmp_per_stage/0/1",
            ["GH-96", 2],
            f"run.json:26: pipeline_list[0].tmp_per_stage[0][1]: found a list of 2, expected {REPLICA}",
        ),
        (
            "pipeline_list/0/tmp_per_stage/0/1",
            [[["GH-96", 0, "here"]], 0],
            f"run.json:26: pipeline_list[0].tmp_per_stage[0][1]: found a list of 3, expected {REPLICA}",
        ),
        (
            "pipeline_list/0/tmp_per_stage/0/1/1",
            4,
            "run.json:26: pipeline_list[0].tmp_per_stage[0][1]: found 4, expected a tensor width of 2, the GPUs of the "
            "replica",
        ),
    ],
)
def test_broken_runs(tmp_path: Path, place: str, value: object, expected: str) -> None:
    write(tmp_path / "run.json", RUN, place, value)
    with pytest.raises(InputError) as caught:
        read_sailor_measured(tmp_path / "run.json")
    assert message(caught, tmp_path) == expected
