"""A controller that is told anything a job could measure, and things that none should.

Whatever it is told, it answers with a plan that the checker accepts, changes no more than it may
and no more often, and its numbers are numbers.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from fuzz.fuzz_machines import machine_test
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from support.planning_cases import cluster_of
from support.strategies import chains

from argosy.adapt.controller import AdaptationLevel, Controller, ControllerLimits, Decision
from argosy.adapt.watch import in_world
from argosy.cluster.topology import Cluster
from argosy.errors import InfeasibleError
from argosy.plan.check import check_plan
from argosy.plan.plan import Plan
from argosy.planner import Settings, find_plan
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.workload.chain import Chain

BATCH = 6
SCHEDULES = tuple(ScheduleSpec(kind=ScheduleKind.KFKB, k=k) for k in (1, 2, 3))
FACTORS = (0.0, 1e-9, 0.1, 0.5, 0.9, 1.0, 1.05, 2.0, 1e6)
"""Of a bandwidth or speed, as it is seen."""
PACES = (1e-6, 0.5, 1.0, 1.0, 1.0, 1.1, 4.0, 1e6)
"""Of a step, measured over predicted."""


def cluster() -> Cluster:
    nodes = [
        {
            "name": name,
            "devices": {"kind": kind, "count": 2},
            "intra": [{"medium": "pcie", "bandwidth": "12 GB/s", "latency": "10 us"}],
            "nic": {"bandwidth": "10 Gbit/s", "latency": "20 us"},
        }
        for name, kind in (("a", "A100-80GB"), ("b", "V100-32GB"))
    ]
    return cluster_of({"name": "watched", "nodes": nodes})


class ControllerMachine(RuleBasedStateMachine):
    """A job of two nodes that measures itself."""

    @initialize(
        chain=chains(max_layers=4),
        reach=st.sampled_from(AdaptationLevel),
        horizon=st.sampled_from((0, 10, 1000)),
    )
    def begin(self, chain: Chain, reach: AdaptationLevel, horizon: int) -> None:
        self.chain, self.cluster, self.step = chain, cluster(), 0
        self.limits = ControllerLimits(reach=reach, horizon=horizon)
        self.changed_at = -math.inf
        try:
            plan = find_plan(chain, self.cluster, global_batch=BATCH)
        except InfeasibleError:
            chain = replace(
                chain, layers=tuple(replace(layer, parameters=10**6) for layer in chain.layers)
            )
            plan = find_plan(chain, self.cluster, global_batch=BATCH)
            self.chain = chain
        self.controller = Controller(
            plan,
            self.chain,
            self.cluster,
            limits=self.limits,
            schedules=self._variants(plan),
            replan=self._replan,
            variants=self._variants,
        )

    def _replan(self, believed: Cluster) -> list[Plan]:
        return [find_plan(self.chain, believed, global_batch=BATCH, settings=Settings(level=1))]

    def _variants(self, plan: Plan) -> list[Plan]:
        fitting = [
            replace(plan, schedule=spec) for spec in SCHEDULES if spec.k <= plan.num_micro_batches
        ]
        return fitting or [plan]

    @rule(
        data=st.data(),
        pace=st.sampled_from(PACES),
        steps=st.integers(1, 3),
        in_force=st.sampled_from((True, True, False)),
    )
    def measure(self, data: st.DataObject, pace: float, steps: int, in_force: bool) -> None:
        """The same for some steps: a change is believed after two."""
        links = {link.name: link.bandwidth.at(0) for link in self.cluster.links}
        devices = {device.name: 1.0 for device in self.cluster.devices}
        seen = {
            name: nominal * data.draw(st.sampled_from(FACTORS))
            for name, nominal in (links | devices).items()
            if data.draw(st.booleans())
        }
        for _ in range(steps):
            predicted = self.controller.predictor.seconds(
                self.controller.plan, self.controller.watch.world
            )
            seconds = pace * (predicted if math.isfinite(predicted) else 1.0)
            before = self.controller.plan
            decision = self.controller.after_step(
                self.step,
                seconds,
                {name: rate for name, rate in seen.items() if name in links},
                {name: speed for name, speed in seen.items() if name in devices},
                in_force=in_force,
            )
            self._check(decision, before)
            self.step += 1

    def _check(self, decision: Decision, before: Plan) -> None:
        check_plan(decision.plan, self.chain, self.cluster)
        assert self.limits.reach.allows(decision.what)
        assert not any(map(math.isnan, (decision.before, decision.after, decision.moving)))
        assert decision.moving >= 0 and decision.step == self.step
        if decision.is_change:
            assert decision.why
            self.changed_at = self.step
            assert self.controller.plan == decision.plan
        else:
            assert decision.plan == before
        assert not any(math.isnan(regret.seconds) for regret in self.controller.regrets.values())
        in_world(self.cluster, self.controller.watch.world)


TestController = machine_test(ControllerMachine, 4, 8)
TestControllerForLong = pytest.mark.exhaustive(machine_test(ControllerMachine, 300, 15))
