"""No pipeline is faster than what all devices together can do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.planning_cases import Recipe, complete_plans, random_case

from argosy.cluster.file import load_cluster
from argosy.cost.compute import ComputeModel
from argosy.dtype import Dtype
from argosy.plan.plan import Recompute
from argosy.planner import find_plan
from argosy.space.rate import throughput_bound
from argosy.workload.chain import Chain, Layer
from argosy.workload.profile import Profile, ProfileRow


@pytest.mark.parametrize("seed", range(30))
def test_throughput_bounds_every_plan(seed: int) -> None:
    case = random_case(seed, Recipe(max_devices=5, max_layers=3, batches=(2, 4)))
    for shape in case.shapes[:2]:
        bound = shape.num_micro_batches * throughput_bound(case.prices, shape.micro_batch_size)
        plans = list(
            complete_plans(case, shape, case.options(shape.micro_batch_size, case.scope(zero=(1,))))
        )[:2000]
        if plans:
            assert min(case.seconds(shape, plans)) >= bound * (1 - 1e-9)


def test_one_layer_on_one_device_reaches_it() -> None:
    """The bound is then the time, less the update."""
    case = random_case(0, Recipe(max_devices=1, max_layers=1, batches=(1,), tight=False))
    shape = case.shapes[0]
    options = case.options(1, case.scope(recompute=(Recompute.NONE,)))
    (plan,) = complete_plans(case, shape, options)
    assert throughput_bound(case.prices, 1) == pytest.approx(
        sum(plan[0].option.seconds(0, 1)), rel=1e-12
    )


def test_a_measured_model_without_flop_and_weights_is_planned() -> None:
    """A profile may tell of nothing but times."""
    layer = Layer(
        name="0",
        kind="l",
        forward_flop=0.0,
        backward_flop=0.0,
        parameters=0,
        activation_bytes=1.0,
        output_bytes=1.0,
    )
    layers = tuple(replace(layer, name=str(index)) for index in range(3))
    row = ProfileRow(
        layer="l",
        micro_batch=1,
        tensor_width=1,
        dtype=Dtype.FP16,
        forward_seconds=1.0,
        backward_seconds=2.0,
    )
    cluster = load_cluster("mixed-8")
    profiles = {
        kind: Profile(device=kind, model="m", rows=(row,)) for kind in ("RTX-A6000", "RTX-2080Ti")
    }
    chain = Chain(name="m", layers=layers, sequence_length=1, dtype=Dtype.FP16)
    plan = find_plan(chain, cluster, global_batch=8, model=ComputeModel(profiles=profiles))
    assert plan.predicted is not None and plan.certificate is not None
    assert (
        plan.certificate.lower_bound_seconds
        <= plan.predicted.iteration_seconds
        == pytest.approx(9.0, rel=1e-3)
    )
