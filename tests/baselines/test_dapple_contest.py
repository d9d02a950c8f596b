"""Ours against DAPPLE's and PipeDream's plans for DAPPLE's own models and clusters, in the exact simulator."""

from __future__ import annotations

from pathlib import Path

import pytest
from equal_cases import PROFILES, dapple_job

from argosy.baselines import BASELINES
from argosy.explain.contest import contest
from argosy.plan.check import check_plan
from argosy.plan.plan import Plan
from argosy.planner import find_plan

pytestmark = pytest.mark.skipif(not PROFILES.is_dir(), reason=f"no {PROFILES.name} beside the repository")


@pytest.mark.parametrize(("model", "config"), [("bert-48", "A"), ("bert-48", "C"), ("vgg-19", "C")])
def test_ours_is_never_slower(model: str, config: str, tmp_path: Path) -> None:
    job = dapple_job(model, config, tmp_path)
    plans = [("argosy", find_plan(job.chain, job.cluster, global_batch=job.global_batch, model=job.model))]
    for name in ("dapple", "pipedream"):
        plan = BASELINES[name](job)
        assert isinstance(plan, Plan), plan
        check_plan(plan, job.chain, job.cluster)
        plans.append((name, plan))
    ours, *others = contest(plans, job.chain, job.cluster, job.model)
    for other in others:
        assert ours.seconds <= other.seconds * (1 + 1e-9), other.name
