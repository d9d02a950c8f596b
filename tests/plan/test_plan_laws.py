"""Plans: what is written reads back, equal plans are equal bytes, and what the checker passes has
no problem."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import resources
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.strategies import Problem, mutated_json, plans

from argosy.cluster.file import cluster_from_content
from argosy.cluster.topology import canonical
from argosy.document import Document, parse_json
from argosy.errors import InputError
from argosy.plan.check import RULES, check_devices, check_plan
from argosy.plan.file import dumps_plan, load_plan, loads_plan, plan_from_document, plan_to_dict
from argosy.plan.plan import (
    Algorithm,
    Certificate,
    Collective,
    CollectiveChoice,
    CostModelRef,
    LeftOut,
    Plan,
    PolicyRule,
    Predicted,
    RunnerUp,
    Search,
)
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.workload.profile_file import dump_profile, read_profile

BUNDLED = sorted(Path(str(resources.files("argosy"))).glob("data/plans/*.json"))

few = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
amounts = st.floats(0, 1e15)
words = st.text(max_size=8)
counts = st.integers(1, 99)
specs = st.builds(
    ScheduleSpec,
    kind=st.sampled_from(ScheduleKind),
    k=counts,
    depth=st.none() | st.lists(counts, max_size=4).map(tuple),
    chunks=counts,
)
tables = st.dictionaries(words, amounts, max_size=4).map(lambda table: tuple(table.items()))
constants = st.dictionaries(words, amounts | st.booleans(), max_size=4)
PROFILES = [
    json.loads(dump_profile(read_profile(name))) for name in ("h200-gpt2-xl", "h200-llama-3-8b")
]
tallies = st.dictionaries(words, st.integers(0, 99), max_size=4).map(
    lambda table: tuple(table.items())
)


@st.composite
def full_plans(draw: st.DrawFn) -> Plan:
    """Plans with everything that a file may hold, whether or not it makes sense."""
    stages = st.integers(0, 9)
    choices = st.builds(
        CollectiveChoice,
        collective=st.sampled_from(Collective),
        stage=stages,
        algorithm=st.sampled_from(Algorithm),
    )
    plan = draw(plans()).plan
    return replace(
        plan,
        model=draw(st.sampled_from((plan.model, of_operations(plan).model))),
        schedule=draw(specs),
        collectives=draw(few_of(choices)),
        policy=draw(few_of(st.builds(PolicyRule, edge=words, below=amounts, schedule=specs))),
        predicted=draw(
            st.none()
            | st.builds(
                Predicted,
                iteration_seconds=amounts,
                samples_per_second=amounts,
                peak_memory_bytes=tables,
                bottleneck=words,
            )
        ),
        certificate=draw(
            st.none()
            | st.builds(
                Certificate,
                lower_bound_seconds=amounts,
                gap=st.floats(-1, 1e6),
                granularity=counts,
                scope=words,
                cost_model=st.none() | words,
            )
        ),
        search=draw(
            st.none()
            | st.builds(
                Search, cpu_seconds=amounts, candidates=st.integers(0, 9**9), pruned=tallies
            )
        ),
        runner_ups=draw(
            few_of(st.builds(RunnerUp, description=words, iteration_seconds=amounts, reason=words))
        ),
        left_out=draw(few_of(st.builds(LeftOut, device=words, reason=words))),
        cost_model=draw(
            st.none() | st.builds(cost_model, constants, few_of(st.sampled_from(PROFILES)))
        ),
    )


def cost_model(constants: dict[str, float], profiles: tuple[dict[str, Any], ...]) -> CostModelRef:
    """A cost model with only the tables that are not empty, as plans record it."""
    content = {"constants": constants, "profiles": list(profiles)}
    return CostModelRef.of({name: table for name, table in content.items() if table})


def of_operations(plan: Plan) -> Plan:
    """The same plan as if its layers were segments of two operations each."""
    figures = {"kind": "segment", "parameters": 1, "activation_bytes": 1.0, "output_bytes": 1.0}
    layers = [
        {"name": str(at), "operations": [2 * at, 2 * at + 2], **figures}
        for at in range(plan.stages[-1].end)
    ]
    return replace(plan, model=replace(plan.model, content=canonical({"layers": layers})))


@few
@given(plans())
def test_every_operation_has_the_stage_whose_layers_it_is_in(case: Problem) -> None:
    plan = of_operations(case.plan)
    assert plan.cut == tuple(
        at for at, stage in enumerate(plan.stages) for _ in range(2 * (stage.end - stage.first))
    )
    assert loads_plan(dumps_plan(plan)) == plan
    assert case.plan.cut is None


def few_of(items: st.SearchStrategy) -> st.SearchStrategy:
    return st.lists(items, max_size=2).map(tuple)


@few
@given(full_plans())
def test_a_plan_reads_back_as_it_was_written(plan: Plan) -> None:
    assert loads_plan(dumps_plan(plan)) == plan


@few
@given(full_plans())
def test_what_was_read_back_is_written_in_the_same_bytes(plan: Plan) -> None:
    text = dumps_plan(plan)
    assert dumps_plan(loads_plan(text)) == text == dumps_plan(replace(plan))


@few
@given(full_plans(), st.randoms())
def test_the_order_of_names_in_a_file_means_nothing(plan: Plan, random: Random) -> None:
    assert loads_plan(json.dumps(shuffled(plan_to_dict(plan), random))) == plan


def shuffled(value: Any, random: Random) -> Any:
    """The same JSON with the names of every object in another order."""
    if isinstance(value, dict):
        names = list(value)
        random.shuffle(names)
        return {name: shuffled(value[name], random) for name in names}
    return [shuffled(item, random) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("path", BUNDLED, ids=lambda path: path.stem)
def test_a_bundled_plan_is_written_in_the_same_bytes(path: Path) -> None:
    assert dumps_plan(load_plan(path)) == path.read_text(encoding="utf-8")


@few
@given(plans())
def test_what_the_strategies_draw_passes_every_rule(problem: Problem) -> None:
    check_plan(problem.plan, problem.chain, problem.cluster)
    assert [
        found for rule in RULES for found in rule(problem.plan, problem.chain, problem.cluster)
    ] == []


@few
@given(plans())
def test_the_cluster_in_a_plan_is_the_cluster(problem: Problem) -> None:
    cluster = cluster_from_content(loads_plan(dumps_plan(problem.plan)).cluster.content)
    assert cluster.links == problem.cluster.links
    assert cluster.hash == problem.plan.cluster.hash


@few
@given(plans(), st.data())
def test_one_sample_too_many_is_found_at_its_line(problem: Problem, data: st.DataObject) -> None:
    content = plan_to_dict(problem.plan)
    index = data.draw(st.integers(0, len(problem.plan.stages) - 1))
    content["stages"][index]["replicas"][0]["samples"] += 1
    text = json.dumps(content, indent=1)
    document = parse_json(text, file="plan.json")
    with pytest.raises(InputError) as caught:
        check_plan(plan_from_document(document), problem.chain, problem.cluster, document=document)
    (found,) = caught.value.problems
    assert found.path == f"stages[{index}].replicas"
    assert '"replicas"' in text.splitlines()[found.line - 1]


@settings(few, max_examples=300)
@given(plans(), st.data())
def test_a_plan_with_a_random_mistake_is_refused_or_a_plan(
    problem: Problem, data: st.DataObject
) -> None:
    document = Document("plan.json", data.draw(mutated_json(plan_to_dict(problem.plan))), {})
    assume(isinstance(document.data, dict))
    try:
        plan = plan_from_document(document)
        check_plan(plan, problem.chain, problem.cluster, document=document)
    except InputError as error:
        assert all(found.file == "plan.json" for found in error.problems)
    else:
        assert loads_plan(dumps_plan(plan)) == plan


def test_every_unknown_device_is_named_and_the_first_few_with_what_may_be_meant() -> None:
    """A suggestion is looked for among all devices: one for each of thousands would take
    minutes."""
    plan = load_plan("llama-3-8b-on-mixed-16")
    cluster = cluster_from_content(plan.cluster.content.replace('"name":"a"', '"name":"b"'))
    with pytest.raises(InputError) as caught:
        check_devices(replace(plan, stages=plan.stages[:1] * 4), cluster)
    problems = caught.value.problems
    assert len(problems) == 4 * len(plan.stages[0].devices) > 8
    assert [problem.suggestion is not None for problem in problems] == [True] * 8 + [False] * (
        len(problems) - 8
    )
