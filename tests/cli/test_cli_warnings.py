"""A plan on another cluster than its own is played, and told so."""

from __future__ import annotations

import json
from pathlib import Path

from cli.command_result import PLAN, Run

from argosy.plan.file import read_plan

WARNING = "warning: the plan was made for mixed-16 as it was"


def test_the_plans_own_cluster_needs_no_warning(run: Run) -> None:
    assert run("simulate", PLAN, "-q").err == ""
    assert run("simulate", PLAN, "-q", "--trace", "none").err == ""


def test_another_cluster_of_the_same_name_is_warned_of(run: Run, tmp_path: Path) -> None:
    content = read_plan(PLAN).data["cluster"]["content"]
    content["nodes"][0]["nic"]["latency"] = "11 us"
    plan = {**read_plan(PLAN).data}
    plan["cluster"] = {**plan["cluster"], "content": content}
    (tmp_path / "edited.json").write_text(json.dumps(plan))
    for command in ("simulate", "explain"):
        result = run(command, "edited.json", "-q")
        assert result.code == 0
        assert result.err.startswith(WARNING)
        assert "may not hold here" in result.err
