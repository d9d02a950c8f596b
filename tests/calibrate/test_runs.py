"""A user's own runs state their system, and each wrong run is reported with its place."""

import json
from pathlib import Path
from typing import Any

import pytest

from argosy.calibrate.file import read_runs
from argosy.cluster.catalogue import catalogue, device_kind
from argosy.cost.calibration import Calibration
from argosy.cost.calibration_file import read_calibration
from argosy.cost.compute import ComputeModel, Portion, layer_seconds
from argosy.cost.memory import state_bytes
from argosy.dtype import Dtype
from argosy.errors import InputError
from argosy.workload.systems import Selective

RUN = {
    "model": "gpt2",
    "cluster": "mixed-8",
    "dtype": "fp16",
    "micro_batch": 1,
    "global_batch": 8,
    "data": 2,
    "pipeline": 2,
    "seconds": 1.0,
}


def written(folder: Path, *runs: dict[str, Any]) -> Path:
    path = folder / "runs.json"
    path.write_text(json.dumps({"version": 1, "runs": list(runs)}, indent=1))
    return path


@pytest.mark.parametrize("system", ["megatron", "torchtitan", "deepspeed", "torch"])
def test_a_system_sets_what_its_calibration_has(tmp_path: Path, system: str) -> None:
    (run,) = read_runs(written(tmp_path, RUN | {"system": system})).runs
    assert run.under(Calibration()) == read_calibration(system)


def test_settings_of_a_run_prevail_over_those_of_its_system(tmp_path: Path) -> None:
    stated = {"system": "megatron", "selective": "products", "tuned_kernels": False}
    (run,) = read_runs(written(tmp_path, RUN | stated)).runs
    found = run.under(Calibration())
    assert found.selective is Selective.PRODUCTS and not found.tuned_kernels
    assert found.gradient_dtype is Dtype.FP32


def test_a_wrong_run_is_reported_with_its_place_and_once(tmp_path: Path) -> None:
    path = written(
        tmp_path, RUN, RUN | {"model": "mixtral-8x7b", "expert": 3}, RUN | {"global_batch": 7}
    )
    with pytest.raises(InputError, match=r"runs.json:\d+: runs\[1\]\..*expert") as caught:
        read_runs(path)
    assert len(caught.value.problems) == 2
    measured = read_runs(path, partly=True)
    assert [run.row for run in measured.runs] == [0]
    first, second = measured.left_out
    assert "runs[1]" in first and "runs[2].global_batch" in second


def test_a_dtype_that_a_device_lacks_is_reported_with_its_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"runs\[0\]\.dtype: found .fp8."):
        read_runs(written(tmp_path, RUN | {"dtype": "fp8"}))


def test_hybrid_sharding_divides_state_over_its_shard(tmp_path: Path) -> None:
    whole = RUN | {"pipeline": 1, "data": 4, "zero": 3}
    runs = read_runs(written(tmp_path, whole, whole | {"shard": 2})).runs
    held = [
        state_bytes(run.under(Calibration()).chain(run.chain), run.plan.stages[0], 1.0).total
        for run in runs
    ]
    assert held[1] == pytest.approx(2 * held[0])
    with pytest.raises(InputError, match="a divisor of data = 4"):
        read_runs(written(tmp_path, whole | {"shard": 3}))


def test_tuned_kernels_have_constants_of_their_own_where_they_were_measured(
    tmp_path: Path,
) -> None:
    assert device_kind("H100-80GB").tuned.attention > device_kind("H100-80GB").reached.attention
    for kind in catalogue():
        assert kind.tuned.error == kind.reached.error
    (run,) = read_runs(written(tmp_path, RUN)).runs
    device, layer = run.cluster.devices[0], run.chain.layers[1]
    portion = Portion(device=device, samples=1)
    same = device.kind.tuned == device.kind.reached
    plain, tuned = (
        layer_seconds(ComputeModel(tuned_kernels=tuned), run.chain, layer, portion)
        for tuned in (False, True)
    )
    assert (plain == tuned) is same
