"""Cephalo's block latencies: the published ones, where they are at hand, and small broken ones."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from argosy.cluster.catalogue import device_kind
from argosy.dtype import Dtype
from argosy.errors import InputError
from argosy.workload.profile_file import dump_profile, parse_profile
from benchmarks.cephalo_profiles import CATALOGUE_NAMES, read_cephalo

CEPHALO = Path(__file__).resolve().parents[3] / "shared" / "data" / "cephalo"
needs_data = pytest.mark.skipif(
    not CEPHALO.is_dir(), reason=f"no data of {CEPHALO.name} beside the repository"
)
MODELS = (
    "deepspeedbert_large",
    "deepspeedgpt_6.7b",
    "deepspeedllama_13b",
    "deepspeedllama_7b",
    "deepspeedvit_e",
)
NAMES = {"float32": Dtype.FP32, "float16": Dtype.FP16}


@needs_data
@pytest.mark.parametrize(
    ("model", "layers", "parameters", "kinds", "rows"),
    [
        ("deepspeedbert_large", 24, 406_174_720, 8, 102),
        ("deepspeedgpt_6.7b", 32, 6_855_204_864, 9, 107),
        ("deepspeedllama_13b", 40, 13_191_500_800, 8, 128),
        ("deepspeedllama_7b", 32, 6_878_924_800, 12, 162),
        ("deepspeedvit_e", 56, 3_805_654_282, 9, 178),
    ],
)
def test_totals(model: str, layers: int, parameters: int, kinds: int, rows: int) -> None:
    chain, profiles = read_cephalo(CEPHALO, model)
    assert (len(chain.layers), chain.parameters) == (layers, parameters)
    assert (chain.dtype, chain.optimizer) == (Dtype.FP32, "adam")
    assert len(profiles) == kinds
    assert sum(len(profile.rows) for profile in profiles.values()) == rows


@needs_data
def test_every_published_time_is_found_again() -> None:
    stats = json.loads((CEPHALO / "model_stats.json").read_text())
    num_times = 0
    for model, kinds in json.loads((CEPHALO / "model_latencies.json").read_text()).items():
        for kind, lengths in kinds.items() if model in stats else ():
            for tokens, dtypes in lengths.items():
                for name, entry in dtypes.items():
                    if not isinstance(entry, list) or len(entry) != 4:
                        continue
                    _, profiles = read_cephalo(
                        CEPHALO, model, sequence_length=int(tokens), dtype=NAMES[name]
                    )
                    profile = profiles[CATALOGUE_NAMES.get(kind, kind)]
                    for samples, times in enumerate(zip(entry[2], entry[3], strict=True), start=1):
                        found = (
                            profile.forward_seconds("block", samples),
                            profile.backward_seconds("block", samples),
                        )
                        assert found == (times[0] / 1e3, times[1] / 1e3)
                        num_times += 2
    assert num_times == 6352


@needs_data
def test_spot_values() -> None:
    chain, profiles = read_cephalo(
        CEPHALO, "deepspeedllama_13b", sequence_length=1024, dtype=Dtype.FP16
    )
    assert profiles["A100-40GB"].forward_seconds("block", 1) == pytest.approx(3.874e-3, abs=5e-7)
    assert chain.layers[5].output_bytes == chain.layers[5].activation_bytes == 1024 * 5120 * 2
    assert chain.layers[-1].output_bytes == 0
    assert chain.layers[0].parameters - chain.layers[5].parameters == pytest.approx(
        49152 * 5120, rel=1e-4
    )
    assert {(layer.kind, layer.forward_flop, layer.reduced_bytes) for layer in chain.layers} == {
        ("block", 0, 0)
    }


@needs_data
def test_a_fit_alone_is_its_values_from_1_to_5_samples() -> None:
    _, profiles = read_cephalo(CEPHALO, "deepspeedbert_large")
    (ahead, start), (back, begin) = _entry("deepspeedbert_large", "t4", "512", "float32")
    for samples in (1, 2, 3, 4, 5):
        assert profiles["T4"].forward_seconds("block", samples) == pytest.approx(
            (ahead * samples + start) / 1e3
        )
        assert profiles["T4"].backward_seconds("block", samples) == pytest.approx(
            (back * samples + begin) / 1e3
        )
    with pytest.raises(InputError) as caught:
        profiles["T4"].forward_seconds("block", 6)
    assert str(caught.value) == (
        "micro_batch: found 6, expected 1 to 5 samples, as measured for block of deepspeedbert_large on T4"
    )


@needs_data
def test_kinds_without_a_forward_of_their_own_are_named() -> None:
    chain, profiles = read_cephalo(CEPHALO, "deepspeedgpt_1.3b", dtype=Dtype.FP16)
    assert list(profiles) == ["L4", "RTX-A6000", "p100", "p40"]
    assert chain.source.endswith(
        "omitted because forward and backward were not separated: rtx3090, v100x32"
    )


@needs_data
@pytest.mark.parametrize(("model", "hidden"), [("deepspeedvit_g", 1664), ("deepspeedvit_e", 1792)])
def test_an_image_is_197_tokens(model: str, hidden: int) -> None:
    """Outside its blocks: patches of 16 x 16 in 3 colours, positions, a class token, a norm and 10
    classes."""
    chain, _ = read_cephalo(CEPHALO, model)
    rest = chain.parameters - len(chain.layers) * chain.layers[1].parameters
    assert (
        rest == (3 * 16 * 16 + 1) * hidden + 197 * hidden + hidden + 2 * hidden + 10 * hidden + 10
    )
    assert chain.sequence_length == 197
    assert chain.layers[1].output_bytes == 197 * hidden * 4


@needs_data
@pytest.mark.parametrize("name", ["float32", "float16"])
def test_no_block_beats_its_device(name: str) -> None:
    """The products with the weights alone, which attention and norms only add to."""
    for model in MODELS[:4]:
        chain, profiles = read_cephalo(CEPHALO, model, dtype=NAMES[name])
        flop = 2 * chain.layers[1].parameters * chain.sequence_length
        for kind in set(profiles) & set(CATALOGUE_NAMES.values()):
            best = max(flop * row.micro_batch / row.forward_seconds for row in profiles[kind].rows)
            assert best < device_kind(kind).peak(NAMES[name])
            assert name == "float16" or best > 0.2 * device_kind(kind).peak(Dtype.FP32)


@needs_data
def test_newer_is_faster() -> None:
    _, profiles = read_cephalo(
        CEPHALO, "deepspeedllama_13b", sequence_length=1024, dtype=Dtype.FP16
    )
    order = ["H100-NVL", "A100-40GB", "RTX-A6000", "A10G", "p40"]
    times = [profiles[kind].forward_seconds("block", 4) for kind in order]
    assert times == sorted(times)
    _, profiles = read_cephalo(CEPHALO, "deepspeedllama_7b")
    for samples in range(1, 6):
        assert profiles["A100-40GB"].forward_seconds("block", samples) < profiles[
            "V100-16GB"
        ].forward_seconds("block", samples)


@needs_data
@pytest.mark.parametrize("kind", ["A100-40GB", "A100-80GB", "RTX-A6000", "A10G", "L40S"])
@pytest.mark.parametrize("model", MODELS)
def test_time_grows_with_the_micro_batch(model: str, kind: str) -> None:
    """On P40, T4 and L4 it now and then does not."""
    _, profiles = read_cephalo(CEPHALO, model)
    for one, more in pairwise(profiles[kind].rows if kind in profiles else ()):
        assert one.micro_batch < more.micro_batch
        assert one.forward_seconds < more.forward_seconds
        assert one.backward_seconds < more.backward_seconds


@needs_data
@pytest.mark.parametrize("model", MODELS)
def test_profiles_survive_json(model: str) -> None:
    for profile in read_cephalo(CEPHALO, model)[1].values():
        assert parse_profile(dump_profile(profile), file="p.json") == profile


@needs_data
def test_names_are_the_catalogues() -> None:
    for known in CATALOGUE_NAMES.values():
        assert device_kind(known).name == known


def _entry(*place: str) -> list[list[float]]:
    table = json.loads((CEPHALO / "model_latencies.json").read_text())
    for name in place:
        table = table[name]
    assert isinstance(table, list)
    return table


STATS = {"hidden_size": 8, "num_layers": 3, "parameters_per_layer": 100, "total_parameters": 341}
FITS = [[1.0, 0.5], [2.0, 1.0]]


def folder(path: Path, kinds: dict[str, object], **changes: object) -> Path:
    """A folder with the times of a small model on some kinds of GPU."""
    (path / "model_stats.json").write_text(json.dumps({"toy": STATS | changes}, indent=1))
    (path / "model_latencies.json").write_text(json.dumps({"toy": kinds}, indent=1))
    return path


def entry(value: object) -> dict[str, object]:
    return {"512": {"float32": value}}


def test_a_small_folder(tmp_path: Path) -> None:
    kinds = {
        "t4": entry([*FITS, [1.5, 2.5], [3.0, 5.0]]),
        "tpu": entry(FITS),
        "l4": {"512": {"float16": FITS}},
    }
    chain, profiles = read_cephalo(folder(tmp_path, kinds), "toy")
    assert [layer.parameters for layer in chain.layers] == [121, 100, 120]
    assert list(profiles) == ["T4", "tpu"]
    assert profiles["T4"].backward_seconds("block", 2) == 5e-3
    assert profiles["tpu"].forward_seconds("block", 3) == 3.5e-3
    assert chain.source == "blocks measured by Cephalo (benson-guo/cephalo)"


FORM = "[[slope, intercept], [slope, intercept]] and, per micro-batch, two lists of milliseconds"


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (
            {"t4": entry([*FITS, [1.5, 2.5], [3.0]])},
            f"model_latencies.json:5: toy.t4.512.float32: found a list of 4, expected {FORM}",
        ),
        (
            {"t4": entry([*FITS, [1.5, -2.5], [3.0, 5.0]])},
            f"model_latencies.json:5: toy.t4.512.float32: found a list of 4, expected {FORM}",
        ),
        (
            {"t4": entry([[1.0, -2.0], [2.0, 1.0]])},
            f"model_latencies.json:5: toy.t4.512.float32: found a list of 2, expected {FORM}",
        ),
        (
            {"t4": entry("fast")},
            f'model_latencies.json:5: toy.t4.512.float32: found "fast", expected {FORM}',
        ),
        (
            {"t4": 3},
            "model_latencies.json:3: toy.t4.512: found 3, expected tables: tokens, and in them dtypes",
        ),
        (
            {"v100": entry(FITS), "v100x16": entry(FITS)},
            'model_latencies.json:19: toy.v100x16.512.float32: found "v100x16", expected one entry for V100-16GB',
        ),
        (
            {"t4": entry([1.0, 0.5]), "l4": {"1024": {"float16": FITS}}},
            "model_latencies.json:2: toy: expected forward and backward times for 512 tokens in float32; the file has "
            "1024 float16, 512 float32",
        ),
    ],
)
def test_broken_latencies(tmp_path: Path, kinds: dict[str, object], expected: str) -> None:
    assert message(folder(tmp_path, kinds)) == expected


def test_broken_statistics(tmp_path: Path) -> None:
    kinds: dict[str, object] = {"t4": entry(FITS)}
    assert message(folder(tmp_path, kinds, total_parameters=299)) == (
        "model_stats.json:6: toy.total_parameters: found 299, expected at least 3 blocks of 100"
    )
    assert message(folder(tmp_path, kinds, num_layers=0, hiden_size=4)) == (
        "model_stats.json:4: toy.num_layers: found 0, expected a whole number, at least 1\n"
        "model_stats.json:7: toy.hiden_size: found an unknown field, expected one of the fields hidden_size, "
        'num_layers, parameters_per_layer, total_parameters; did you mean "hidden_size"?'
    )
    assert message(tmp_path, "toi") == (
        'model_stats.json: model: found "toi", expected a model of this file (toy); did you mean "toy"?'
    )
    with pytest.raises(
        InputError, match="sequence_length: found 0, expected a whole number of tokens, at least 1"
    ):
        read_cephalo(tmp_path, "toy", sequence_length=0)
    assert message(tmp_path / "nowhere") == "model_stats.json: there is no such file"


def message(path: Path, model: str = "toy") -> str:
    """What reading the folder says, without where it lies."""
    with pytest.raises(InputError) as caught:
        read_cephalo(path, model)
    assert caught.value.exit_code == 2
    return str(caught.value).replace(f"{path}/", "")
