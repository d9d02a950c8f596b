"""The planner against an oracle that shares no code with it (``support.planner_oracle``).

The product is a command here: it reads the files that the oracle writes, and writes a plan.
"""

from __future__ import annotations

import ast
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from support import planner_oracle
from support.planner_oracle import best_plan
from support.planner_oracle.iteration import Iteration
from support.planner_oracle.plans import read_plan
from support.planner_oracle.prices import fits
from support.planner_oracle.problem import (
    Layer,
    Node,
    Problem,
    random_problem,
    short_of_memory,
)

from argosy.cli import main

SAME = 1e-9
"""Relative difference of times and bytes that sums in another order may have."""
LAYER = Layer(forward_flop=3e11, backward_flop=5e11, parameters=120_000_000, kept=2.1e9, output=1e8)
SMALL = Node(
    name="a",
    devices=1,
    flops=2e12,
    memory=4e9,
    memory_bandwidth=1e11,
    nic=1e9,
    nic_latency=0.001,
    bus=2e10,
    bus_latency=0.0,
)


def planned(problem: Problem, folder: Path, *options: str) -> str | None:
    """Return the file of the planner's plan, or None if it finds none."""
    with pytest.raises(SystemExit) as ended:
        main([*problem.write(folder), *options])
    assert ended.value.code in (0, 3)
    return (folder / "plan.json").read_text() if ended.value.code == 0 else None


@dataclass(frozen=True)
class Comparison:
    """The planner's plan beside all plans."""

    seconds: float
    """Predicted time of the planner's plan; infinity if it finds none."""
    least: float
    """Time of the fastest plan, if that is faster."""
    better: object
    enumerated: int
    simulated: int


def compared(problem: Problem, folder: Path) -> Comparison:
    """Check that both programs predict the same time and memory, and enumerate all plans."""
    text = planned(problem, folder, "--level", "2", "--gap", "0")
    if text is None:
        return Comparison(math.inf, *best_plan(problem, math.inf))
    plan, content = read_plan(text), json.loads(text)
    iteration = Iteration(problem, plan)
    predicted, certificate = content["predicted"], content["certificate"]
    seconds, bound = predicted["iteration_seconds"], certificate["lower_bound_seconds"]
    assert iteration.seconds == pytest.approx(seconds, rel=SAME)
    assert iteration.peaks() == pytest.approx(predicted["peak_memory_bytes"], rel=SAME)
    assert fits(problem, plan)
    assert bound <= seconds * (1 + SAME)
    assert certificate["gap"] == pytest.approx(seconds / bound - 1, abs=SAME)
    return Comparison(seconds, *best_plan(problem, seconds * (1 - SAME)))


@pytest.mark.parametrize("block", range(6))
def test_no_plan_of_an_independent_enumeration_is_faster(block: int, tmp_path: Path) -> None:
    """A certificate with a gap of 0 is a claim about all plans, so no plan may be faster."""
    results = [compared(random_problem(seed), tmp_path) for seed in range(block * 8, block * 8 + 8)]
    assert [result.better for result in results] == [None] * len(results)
    assert sum(result.enumerated for result in results) > 1000
    assert sum(result.simulated for result in results) > 50


@pytest.mark.exhaustive
def test_plans_with_other_shares_are_seldom_and_little_faster(tmp_path: Path) -> None:
    """Certificates exclude shares other than by speed; docs/limits.md states these figures."""
    results = [compared(short_of_memory(seed), tmp_path) for seed in range(3000, 3120)]
    faster = sorted(result.seconds / result.least - 1 for result in results if result.better)
    assert len(faster) <= 4
    assert faster[-1] == pytest.approx(0.032, abs=0.001)


def test_samples_are_shared_by_memory_if_shares_by_speed_do_not_fit(tmp_path: Path) -> None:
    """By speed the faster device takes two of three samples, and it has memory for one."""
    problem = Problem(
        layers=(LAYER,),
        nodes=(SMALL, replace(SMALL, name="b", flops=1e12, memory=4e10)),
        global_batch=3,
        schedules=(("1f1b", 1),),
    )
    assert compared(problem, tmp_path).better is None
    (stage,) = read_plan((tmp_path / "plan.json").read_text()).stages
    assert dict(zip(stage.devices, stage.samples, strict=True)) == {"a0.0": 1, "b0.0": 2}


def test_the_oracle_shares_no_code_with_the_product() -> None:
    for file in Path(planner_oracle.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith("argosy"), file
            elif isinstance(node, ast.Import):
                assert not any(alias.name.startswith("argosy") for alias in node.names), file
