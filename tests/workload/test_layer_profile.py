"""Measured profiles: look-ups, and the JSON form both ways."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.dtype import Dtype
from argosy.errors import InputError
from argosy.workload.chain import Layer
from argosy.workload.load import load_model
from argosy.workload.profile import Profile, ProfileRow
from argosy.workload.profile_file import dump_profile, parse_profile, read_profile, write_profile


def row(
    layer: str = "block", micro_batch: int = 1, forward: float = 1.0, **others: object
) -> ProfileRow:
    fixed: dict[str, object] = {
        "tensor_width": 1,
        "dtype": Dtype.BF16,
        "backward_seconds": 2 * forward,
    }
    return ProfileRow(
        layer=layer, micro_batch=micro_batch, forward_seconds=forward, **(fixed | others)
    )  # type: ignore[arg-type]


BLOCK = Layer(
    name="block.0",
    kind="block",
    forward_flop=0.0,
    backward_flop=0.0,
    parameters=10,
    activation_bytes=8.0,
    output_bytes=4.0,
)
HEAD = replace(
    BLOCK, name="head", kind="head", forward_flop=5.0, parameters=0, tied_to=0, tied_parameters=4
)
MEASURED = Profile(
    device="A100-80GB",
    model="toy",
    rows=(
        row(micro_batch=1, forward=1.0),
        row(micro_batch=8, forward=6.0, peak_bytes=5e9),
        row(micro_batch=2, forward=1.5),
        row("head", micro_batch=4, forward=0.4),
        row(micro_batch=2, forward=0.9, tensor_width=2),
    ),
    layers=(BLOCK, HEAD),
    sequence_length=128,
)


def test_measured_micro_batches_are_exact_and_others_linear() -> None:
    assert [MEASURED.forward_seconds("block", n) for n in (1, 2, 5, 8)] == [1.0, 1.5, 3.75, 6.0]
    assert MEASURED.backward_seconds("block", 5) == 7.5
    assert MEASURED.forward_seconds("block", 2, tensor_width=2) == 0.9


def test_a_single_measurement_scales_with_the_micro_batch() -> None:
    assert MEASURED.forward_seconds("head", 1) == pytest.approx(0.1)
    assert MEASURED.backward_seconds("head", 16) == pytest.approx(3.2)


@given(st.integers(1, 7), st.integers(1, 7))
def test_growing_measurements_give_growing_times(low: int, step: int) -> None:
    high = min(8, low + step)
    assert MEASURED.forward_seconds("block", low) <= MEASURED.forward_seconds("block", high)


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (
            ("block", 16),
            "micro_batch: found 16, expected 1 to 8 samples, as measured for block of toy on A100-80GB",
        ),
        (
            ("blok", 1),
            'layer: found "blok", expected a measured layer of toy on A100-80GB (block, head); did you mean "block"?',
        ),
        (
            ("block", 1, 4),
            "tensor_width: found 4, expected a measured tensor width of block of toy on A100-80GB in bf16 (1, 2)",
        ),
        (
            ("block", 1, 1, Dtype.FP32),
            'dtype: found "fp32", expected a measured dtype of toy (bf16)',
        ),
    ],
)
def test_what_was_not_measured_is_refused_by_name(
    question: tuple[object, ...], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        MEASURED.forward_seconds(*question)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_a_dtype_must_be_named_where_several_were_measured() -> None:
    both = replace(MEASURED, rows=(row(), row(forward=3.0, dtype=Dtype.FP32)))
    assert both.forward_seconds("block", 1, dtype=Dtype.FP32) == 3.0
    with pytest.raises(InputError) as caught:
        both.forward_seconds("block", 1)
    assert str(caught.value) == "dtype: expected a measured dtype of toy (bf16, fp32)"


def test_rows_go_by_name_before_kind() -> None:
    assert MEASURED.row_name(BLOCK) == "block"
    assert replace(MEASURED, rows=(row("block"), row("block.0"))).row_name(BLOCK) == "block.0"
    assert replace(MEASURED, rows=(row("block"),)).row_name(HEAD) is None


def test_json_reads_back_what_was_written(tmp_path: Path) -> None:
    assert parse_profile(dump_profile(MEASURED), file="p.json") == MEASURED
    write_profile(MEASURED, tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json") == MEASURED


def test_json_has_a_version_and_sorted_keys() -> None:
    content = json.loads(dump_profile(MEASURED))
    assert content["version"] == 1
    assert list(content) == sorted(content)
    assert list(content["rows"][0]) == sorted(content["rows"][0])


times = st.floats(0, 1e3, allow_subnormal=False)
rows = st.builds(
    ProfileRow,
    layer=st.sampled_from(["embedding", "block", "head"]),
    micro_batch=st.integers(1, 64),
    tensor_width=st.sampled_from([1, 2, 4]),
    dtype=st.sampled_from(Dtype),
    forward_seconds=times,
    backward_seconds=times,
    peak_bytes=st.none() | st.floats(0, 1e12),
)


def question(row: ProfileRow) -> tuple[object, ...]:
    return row.layer, row.micro_batch, row.tensor_width, row.dtype


@given(st.lists(rows, min_size=1, max_size=8, unique_by=question))
def test_any_profile_survives_json(drawn: list[ProfileRow]) -> None:
    profile = Profile(device="V100-16GB", model="any", rows=tuple(drawn))
    assert parse_profile(dump_profile(profile), file="p.json") == profile


def test_a_profile_with_layers_is_a_model(tmp_path: Path) -> None:
    write_profile(MEASURED, tmp_path / "toy.json")
    chain = load_model(tmp_path / "toy.json", optimizer="sgd")
    assert chain.layers == MEASURED.layers
    assert (chain.name, chain.sequence_length, chain.dtype, chain.optimizer) == (
        "toy",
        128,
        Dtype.BF16,
        "sgd",
    )
    assert chain.parameters == 10


def test_repr_is_for_people() -> None:
    assert repr(MEASURED) == "toy on A100-80GB: 5 rows, 2 layers"


def test_a_profile_without_rows_is_none() -> None:
    text = dump_profile(replace(MEASURED, rows=()))
    with pytest.raises(InputError, match=r"p.json:\d+: rows: .*expected at least one row"):
        parse_profile(text, file="p.json")
