"""A plan for a captured program has with it what its tensor-parallel groups do; a changed record is
refused."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from runtime.own_programs import PROGRAMS
from runtime.program_cases import captured, grouped, no_search

from argosy.errors import InputError
from argosy.plan.file import dumps_plan, loads_plan, plan_to_dict
from argosy.plan.plan import Plan
from argosy.runtime.graphs.cut import GraphCut, aligned
from argosy.runtime.processes.ranks import devices_by_rank
from argosy.runtime.sources.operations import forward_of
from argosy.runtime.sources.sharing import sharings
from argosy.runtime.stages import tensor_stage as tensorstage
from argosy.runtime.stages.tensor_stage import Sharing
from argosy.workload.capture.forward import Forward
from argosy.workload.capture.initial import build_fake

NAME = "clipped_policy"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return grouped(captured(NAME))


@cache
def forward() -> Forward:
    return forward_of(build_fake(PROGRAMS[NAME]))


def sharing_of(plan: Plan) -> Sharing:
    assert plan.cut is not None
    assert plan.operation_layers is not None
    cut = GraphCut(
        forward(), aligned(forward(), plan.cut), 1, aligned(forward(), plan.operation_layers)
    )
    return sharings(plan, cut, devices_by_rank(plan))[0, 0]


def test_a_plan_says_what_its_groups_do_and_they_do_it(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = loads_plan(dumps_plan(plan))
    assert read.programs == plan.programs
    (program,) = plan.programs
    assert any("dim" in weight.stored for weight in program.weights)
    assert any(
        operation.delivered for segment in program.segments for operation in segment.operations
    )
    searched = sharing_of(replace(plan, programs=())).steps(program.samples)
    monkeypatch.setattr(tensorstage, "tensor_program", no_search)
    sharing = sharing_of(read)
    steps = sharing.steps(program.samples)
    assert (steps.rows, steps.collectives) == (searched.rows, searched.collectives)
    assert sharing.stored == {value: searched.stored(value) for value in sharing.stored}


def test_equal_layers_are_written_once(plan: Plan) -> None:
    (program,) = plan.programs
    layers = [layer for segment in program.segments for layer in segment.layers]
    assert sorted(layers) == sorted(set(layers)), "a layer is in one segment"
    assert 0 < len(layers) <= plan.stages[-1].end
    assert len({segment.operations for segment in program.segments}) == len(program.segments)


def changed(plan: Plan, change: Any) -> Plan:
    document = plan_to_dict(plan)
    change(document["programs"][0])
    return loads_plan(json.dumps(document))


def operation_with(program: dict[str, Any], field: str) -> dict[str, Any]:
    return next(
        one for segment in program["segments"] for one in segment["operations"] if one.get(field)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda p: operation_with(p, "units").update(op="aten.sin.default"),
            "the next operation of the program",
        ),
        (
            lambda p: operation_with(p, "takes").update(takes=["dim one"]),
            "states taken|cut such as dim 1 / 8",
        ),
        (
            lambda p: operation_with(p, "units").update(leaves=["dim 9 / 4"]),
            "a cut of a tensor of|states taken",
        ),
        (
            lambda p: operation_with(p, "units").update(units=1),
            "a way to do it on parts of tensors",
        ),
        (lambda p: operation_with(p, "delivered").pop("delivered"), "which takes|a whole one"),
        (
            lambda p: operation_with(p, "delivered")["delivered"][0].update(way="by post"),
            'way "by post"',
        ),
        (lambda p: p["segments"][-1]["operations"].pop(), "no further operation"),
        (
            lambda p: p["weights"].update(ghost={"stored": "dim 0 / 8"}),
            "a weight that its layers do not have",
        ),
    ],
)
def test_a_changed_record_is_refused(plan: Plan, change: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        sharing_of(changed(plan, change)).steps(plan.programs[0].samples)
