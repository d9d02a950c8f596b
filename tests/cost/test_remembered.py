"""The cost model of a plan: what is recorded rebuilds the same times, and a cluster keeps its
calibration."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.cluster.file import load_cluster, with_changes
from argosy.cluster.topology import Cluster
from argosy.cost.calibration import Calibration
from argosy.cost.compute import ComputeModel, Portion, layer_seconds
from argosy.cost.remembered import (
    CostModel,
    cost_model_ref,
    remembered,
    with_cost_model,
    with_what_holds,
)
from argosy.dtype import Dtype
from argosy.errors import InputError
from argosy.plan.file import dumps_plan, load_plan, loads_plan
from argosy.plan.plan import Certificate, CostModelRef, Plan
from argosy.planner import find_plan
from argosy.workload.chain import Chain
from argosy.workload.load import load_model
from argosy.workload.profile_file import dump_profile, profile_names, read_profile
from argosy.workload.systems import Buffers, Selective

CLUSTER = """
name = "pair"
[[nodes]]
name = "h"
count = 2
devices = { kind = "H200", count = 2 }
intra = [{ medium = "nvlink", bandwidth = "300 GB/s" }]
nic = { bandwidth = "100 Gbit/s" }
"""
shares = st.floats(0.01, 1.0)
amounts = st.floats(0.0, 1e-2)
calibrations = st.builds(
    Calibration,
    forward_peak=shares,
    backward_peak=shares,
    passes=st.floats(0.1, 9.0),
    forward_floor=amounts,
    backward_floor=amounts,
    split_launches=st.floats(0.5, 4.0),
    gathered=st.floats(0.0, 4.0),
    forward_start=amounts,
    backward_start=amounts,
    bandwidth=shares,
    latency=amounts,
    reduction=shares,
    blocking=st.booleans(),
    process_bytes=st.floats(0.0, 1e9),
    activation_factor=st.floats(0.5, 4.0),
)


def pair(folder: Path) -> Cluster:
    (folder / "pair.toml").write_text(CLUSTER)
    return load_cluster(folder / "pair.toml")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return load_plan("gpt2-xl-on-two-cards")


def chain_of(plan: Plan) -> Chain:
    ref = plan.model
    return load_model(ref.name, sequence_length=ref.sequence_length, dtype=ref.dtype)


@settings(max_examples=60, deadline=None)
@given(calibrations)
def test_constants_that_were_recorded_are_rebuilt(calibration: Calibration) -> None:
    plan = load_plan("gpt2-xl-on-two-cards")
    chain, cluster = (
        calibration.chain(chain_of(plan)),
        calibration.cluster(load_cluster("two-cards")),
    )
    made = with_cost_model(plan, chain, cluster, calibration.compute_model())
    read = loads_plan(dumps_plan(made))
    assert read == made
    assert remembered(read) == CostModel(calibration=calibration)


def test_the_default_cost_model_is_not_recorded(plan: Plan) -> None:
    made = with_cost_model(plan, chain_of(plan), load_cluster("two-cards"), ComputeModel())
    assert made == plan
    assert remembered(made) == CostModel()


@pytest.mark.parametrize("name", profile_names())
def test_recorded_times_are_those_of_the_profile(name: str, tmp_path: Path, plan: Plan) -> None:
    cluster, profile = pair(tmp_path), read_profile(name)
    model = ComputeModel(
        profiles={"H200": profile, "A100-80GB": replace(profile, device="A100-80GB")}
    )
    chain = load_model(profile.model, sequence_length=profile.sequence_length, dtype="bf16")
    read = loads_plan(dumps_plan(with_cost_model(plan, chain, cluster, model)))
    (kept,) = remembered(read).profiles
    assert kept.device == "H200" and len(kept.rows) <= len(profile.rows)
    rebuilt = remembered(read).compute_model
    for layer in chain.layers:
        row_name = profile.row_name(layer)
        assert row_name is not None
        for row in profile.rows:
            if (row.layer, row.dtype) == (row_name, chain.dtype):
                width = row.tensor_width
                portion = Portion(
                    device=cluster.devices[0], samples=row.micro_batch, share=1 / width, width=width
                )
                assert layer_seconds(rebuilt, chain, layer, portion) == layer_seconds(
                    model, chain, layer, portion
                )
    assert read.cost_model is not None
    assert len(read.cost_model.content) < len(dump_profile(profile))


def test_a_record_does_not_grow_when_it_is_recorded_again(tmp_path: Path) -> None:
    cluster, profile = pair(tmp_path), read_profile("h200-gpt2-xl")
    chain = load_model("gpt2-xl", sequence_length=1024, dtype="bf16")
    first = find_plan(
        chain, cluster, global_batch=8, model=ComputeModel(profiles={"H200": profile})
    )
    again = find_plan(chain, cluster, global_batch=8, model=remembered(first).compute_model)
    assert (again.cost_model, again.predicted) == (first.cost_model, first.predicted)
    assert first.certificate is not None and first.cost_model is not None
    assert first.certificate.cost_model == f"profile of H200 ({first.cost_model.hash[:8]})"


def test_constants_that_were_set_in_python_are_recorded(tmp_path: Path) -> None:
    cluster, model = pair(tmp_path), ComputeModel(forward_peak=0.2, blocking=True)
    chain = load_model("gpt2-xl", sequence_length=1024, dtype="bf16")
    plan = find_plan(chain, cluster, global_batch=8, model=model)
    assert plan.cost_model is not None
    assert plan.cost_model.content == '{"constants":{"blocking":true,"forward_peak":0.2}}'
    assert remembered(plan).compute_model == model


def test_what_was_said_under_another_cost_model_does_not_hold(plan: Plan) -> None:
    chain, cluster = chain_of(plan), load_cluster("two-cards")
    certificate = Certificate(lower_bound_seconds=2.0, gap=0.5, granularity=1, scope="all")
    made = with_cost_model(replace(plan, certificate=certificate), chain, cluster, ComputeModel())
    assert made.certificate is not None and made.certificate.cost_model == "default cost model"
    assert with_what_holds(made, chain, cluster, ComputeModel()) == made
    assert with_what_holds(made, chain, cluster, ComputeModel(passes=1.0)).certificate is None
    slower = Calibration(bandwidth=0.5)
    assert with_what_holds(made, chain, slower.cluster(cluster), ComputeModel()).certificate is None


@settings(max_examples=30, deadline=None)
@given(calibrations)
def test_other_changes_over_time_keep_the_calibration(calibration: Calibration) -> None:
    cluster = load_cluster("mixed-16")
    changes = [{"link": "v0.nic", "steps": [["1 s", "1 Gbit/s"]]}]
    calibrated = calibration.cluster(cluster)
    assert with_changes(calibrated, changes) == calibration.cluster(with_changes(cluster, changes))
    assert with_changes(calibrated, changes).fit == calibrated.fit


@pytest.mark.parametrize(
    ("constants", "told"),
    [
        (
            {"pases": 2.0},
            "cost_model.content.constants.pases: found an unknown field, expected one of the fields ",
        ),
        (
            {"passes": -1.0},
            "cost_model.content.constants.passes: found -1.0, expected a finite number above 0",
        ),
    ],
)
def test_constants_that_make_no_sense_are_refused_by_name(
    plan: Plan, constants: dict[str, float], told: str
) -> None:
    ref = CostModelRef.of({"constants": constants})
    with pytest.raises(InputError) as caught:
        remembered(loads_plan(dumps_plan(replace(plan, cost_model=ref))))
    assert told in str(caught.value)


def test_every_constant_of_a_calibration_is_recorded() -> None:
    chain, cluster = chain_of(load_plan("gpt2-xl-on-two-cards")), load_cluster("two-cards")
    others = {
        "selective": Selective.ATTENTION,
        "buffers": Buffers.TORCHTITAN,
        "gradient_dtype": Dtype.FP32,
        "reduce_dtype": Dtype.FP32,
        "shard": 2,
    }
    others |= {
        "forward_peak": 0.5,
        "backward_peak": 0.5,
        "attention_peak": 0.5,
        "passes": 2.0,
        "nic_bandwidth": 0.5,
    }
    for name, value in asdict(Calibration()).items():
        changed = (
            others[name]
            if name in others
            else not value
            if isinstance(value, bool)
            else value / 2 + 1e-3
        )
        other = replace(Calibration(), **{name: changed})
        ref = cost_model_ref(other.chain(chain), other.cluster(cluster), other.compute_model())
        assert ref is not None and f'"{name}"' in ref.content
