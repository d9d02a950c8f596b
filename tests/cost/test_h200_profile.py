"""The shipped H200 profiles: whole, read by name, planned with, and what the cost model makes of
the same rows."""

from __future__ import annotations

import numpy as np
import pytest

from argosy.cost.calibration_file import calibration_names, read_calibration
from argosy.dtype import Dtype
from argosy.errors import InputError
from argosy.workload.load import load_model, preset_names
from argosy.workload.profile_file import profile_names, read_profile
from benchmarks import h200


@pytest.mark.parametrize("name", profile_names())
def test_a_shipped_profile_is_of_a_preset_and_says_when_and_with_what(name: str) -> None:
    profile = read_profile(name)
    assert name == f"h200-{profile.model}"
    assert profile.model in preset_names()
    assert profile.device == "H200"
    assert "2026-11-15 on an NVIDIA H200" in profile.measured
    assert "torch 2." in profile.measured
    assert all(row.forward_seconds > 0 and row.backward_seconds > 0 for row in profile.rows)


def test_unknown_names_are_refused_with_a_suggestion() -> None:
    with pytest.raises(InputError, match='did you mean "h200-llama-2-7b"'):
        read_profile("h200-llama-2-7")


def test_micro_batches_are_interpolated_within_five_percent() -> None:
    alone = [h200.with_device_seconds(row) for row in h200.blocks()]
    assert len({row["model"] for row in alone}) >= 3
    assert h200.by_profile(alone, alone).median < 0.05
    assert h200.by_profile(h200.blocks(), h200.blocks(above_floor=True)).median < 0.05


def test_kept_bytes_are_those_of_the_chain() -> None:
    found = [h200.kept_bytes(row) / row["kept_bytes"] for row in h200.blocks()]
    assert np.median(np.abs(np.array(found) - 1)) < 0.01
    assert len(found) > 200


def test_peaks_are_within_five_percent_on_models_not_fitted_on() -> None:
    pairs = h200.left_out(h200.blocks(), h200.MEMORY_CONSTANTS, h200.peak_bytes, h200.measured_peak)
    off = [abs(guess / truth - 1) for truth, guess in pairs]
    assert np.median(off) < 0.05


def test_seconds_are_those_of_a_device_of_this_speed() -> None:
    found = read_profile("h200-llama-2-7b").forward_seconds("block", 2, 1, Dtype.BF16)
    layer = load_model("llama-2-7b", sequence_length=4096).layers[1]
    assert 0.3 < 2 * layer.forward_flop / found / 989.5e12 < 1


def test_the_roofline_is_within_five_percent_on_shapes_not_fitted_on() -> None:
    assert h200.by_roofline(h200.blocks(above_floor=True), h200.by_halves).median < 0.05


@pytest.mark.parametrize("name", [name for name in calibration_names() if name.startswith("h200")])
def test_shipped_constants_are_those_of_the_rows(name: str) -> None:
    """Read by name; off by no more than the note says of constants that never saw the row."""
    model = read_calibration(name).compute_model()
    mine = [
        row for row in h200.blocks(above_floor=True) if row["dtype"] == name.removeprefix("h200-")
    ]
    off = [abs(h200.predicted_seconds(row, model) / h200.as_they_come(row) - 1) for row in mine]
    assert np.median(off) < 0.06 and len(off) > 40


def test_constants_that_do_not_exist_are_refused_by_name() -> None:
    with pytest.raises(
        InputError,
        match=r'found "h200-bf15", expected a file, or one of .*did you mean "h200-bf16"',
    ):
        read_calibration("h200-bf15")
