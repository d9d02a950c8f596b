"""What a controller in a process of its own is told and what it may propose."""

from __future__ import annotations

import io
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runtime.adapting_cases import chain, cluster, compute_model, pipeline
from torch import nn

from argosy.adapt.advisor import Advisor, Brief, Mind, Observation, _messages
from argosy.adapt.controller import AdaptationLevel, ControllerLimits, Decision
from argosy.adapt.watch import World
from argosy.cluster.trace import Trace
from argosy.runtime.job.adapting import described
from argosy.runtime.sources.mixing import undivided

BRIEF = Brief(
    plan=pipeline(),
    chain=chain(),
    cluster=cluster(),
    model=compute_model(),
    limits=ControllerLimits(),
    roster=("a0.0", "b0.0"),
)


def test_nobody_waits_for_a_process_that_thinks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    thinker = tmp_path / "thinker"
    thinker.write_text("#!/bin/sh\nexec sleep 600\n")
    thinker.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(thinker))
    advisor: Any = Advisor(BRIEF)
    seen = Observation(step=0, plan=BRIEF.plan, seconds=1.0, bandwidths={}, speeds={}, steps_left=9)
    for _ in range(500):  # far more than a pipe holds
        advisor.tell(seen)
    assert not advisor.answers()
    advisor.close()
    advisor.tell(seen)


def test_an_answer_that_breaks_off_is_none() -> None:
    assert list(_messages(io.BytesIO(pickle.dumps(1) + pickle.dumps(["x"] * 50)[:-9]))) == [1]


def test_a_re_plan_does_not_divide_samples_that_a_layer_mixes() -> None:
    layers = [nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2)), nn.BatchNorm1d(2).eval()]
    assert undivided(layers) == (1,)
    assert len(Mind(BRIEF)._replan(BRIEF.cluster)[0].stages[0].replicas) == 2
    mind = Mind(replace(BRIEF, undivided=(3,)))
    for plan in mind._replan(BRIEF.cluster):
        (stage,) = (stage for stage in plan.stages if stage.first <= 3 < stage.end)
        assert len(stage.replicas) == 1


def test_a_link_that_was_down_at_the_start_can_be_told_of() -> None:
    down, *others = BRIEF.cluster.links
    links = (replace(down, bandwidth=Trace.constant(0.0)), *others)
    brief = replace(BRIEF, cluster=replace(BRIEF.cluster, links=links))
    world = World(bandwidths=((down.name, 5.0), (others[0].name, others[0].bandwidth.at(0))))
    decision = Decision(
        step=1, what=AdaptationLevel.K, plan=BRIEF.plan, before=2.0, after=1.0, world=world
    )
    assert described(decision, brief)["bandwidths"] == {down.name: 5.0}
