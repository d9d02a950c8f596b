"""The planner against an oracle that shares no code with it (``support.planner_oracle``).

The product is a command here: it reads the files that the oracle writes, and writes a plan.
"""

from __future__ import annotations

import ast
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from support import planner_oracle
from support.planner_oracle import (
    Iteration,
    Layer,
    Node,
    Problem,
    best_plan,
    fits,
    random_problem,
    read_plan,
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


def check(problem: Problem, folder: Path) -> tuple[int, int]:
    """Compare a proven plan with all plans; return how many there are and were simulated."""
    text = planned(problem, folder, "--level", "2", "--gap", "0")
    if text is None:
        seconds, plan, *counts = best_plan(problem, math.inf)
        assert plan is None, f"the planner finds no plan, but one of {seconds} s fits"
        return counts[0], counts[1]
    plan, content = read_plan(text), json.loads(text)
    iteration = Iteration(problem, plan)
    predicted, certificate = content["predicted"], content["certificate"]
    seconds = predicted["iteration_seconds"]
    assert iteration.seconds == pytest.approx(seconds, rel=SAME)
    assert iteration.peaks() == pytest.approx(predicted["peak_memory_bytes"], rel=SAME)
    assert fits(problem, plan)
    bound = certificate["lower_bound_seconds"]
    assert certificate["gap"] == pytest.approx(seconds / bound - 1, abs=SAME)
    least, better, *counts = best_plan(problem, seconds * (1 - SAME))
    assert least >= bound * (1 - 2 * SAME), f"faster than the certificate allows: {better}"
    assert better is None, f"{least} s, the planner's plan takes {seconds} s: {better}"
    return counts[0], counts[1]


@pytest.mark.parametrize("block", range(6))
def test_no_plan_of_an_independent_enumeration_is_faster(block: int, tmp_path: Path) -> None:
    counts = [check(random_problem(seed), tmp_path) for seed in range(block * 8, block * 8 + 8)]
    enumerated, simulated = (sum(column) for column in zip(*counts, strict=True))
    assert enumerated > 1000
    assert simulated > 50


def test_samples_are_shared_by_memory_if_shares_by_speed_do_not_fit(tmp_path: Path) -> None:
    """By speed the faster device takes two of three samples, and it has memory for one."""
    problem = Problem(
        layers=(LAYER,),
        nodes=(SMALL, replace(SMALL, name="b", flops=1e12, memory=4e10)),
        global_batch=3,
        schedules=(("1f1b", 1),),
    )
    check(problem, tmp_path)
    (stage,) = read_plan((tmp_path / "plan.json").read_text()).stages
    assert dict(zip(stage.devices, stage.samples, strict=True)) == {"a0.0": 1, "b0.0": 2}


def test_the_oracle_shares_no_code_with_the_product() -> None:
    source = ast.parse(Path(planner_oracle.__file__).read_text())
    imports = [node for node in ast.walk(source) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in imports for alias in node.names}
    names |= {node.module or "" for node in imports if isinstance(node, ast.ImportFrom)}
    assert not any("argosy" in name for name in names)
