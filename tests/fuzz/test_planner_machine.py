"""A planner whose cluster, batch and settings change between searches.

Whatever happens, a search ends with a plan that the checker accepts or says that nothing fits; its
bound is below its time; and where devices were only added, nothing that fitted stops fitting, no
bound rises above a plan that is known, and the plan is no slower than the one before beyond the gap
that is stated.
"""

from __future__ import annotations

from typing import Any

import pytest
from fuzz.fuzz_machines import machine_test
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.planning_cases import cluster_of
from support.strategies import chains

from argosy.cluster.topology import Cluster
from argosy.errors import InfeasibleError
from argosy.plan.check import check_plan
from argosy.plan.file import dumps_plan, loads_plan
from argosy.plan.plan import Plan
from argosy.planner import Settings, find_plan
from argosy.sim.simulate import simulate
from argosy.workload.chain import Chain

KINDS = {"A100-80GB": 1.0, "V100-16GB": 0.9, "RTX-2080Ti": 1.0}
RATES = ("1 Gbit/s", "10 Gbit/s", "100 Gbit/s")
MOST_DEVICES = 6
GAP = 0.01
ROUNDING = 1e-6
FOLDING = 0.25
"""How far a folded simulation, which predicts, may be from the whole plan's, as in
``test_planner``."""


class PlannerMachine(RuleBasedStateMachine):
    """Nodes of one to three devices on one switch."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[dict[str, Any]] = []
        self.names = 0
        self.batch = 4
        self.exact = True
        self.best: Plan | None = None
        """The last plan, while all that happened since was that devices came."""

    @initialize(chain=chains(max_layers=4), kind=st.sampled_from(sorted(KINDS)))
    def begin(self, chain: Chain, kind: str) -> None:
        self.chain = chain
        self.add_node(kind, 1, "10 Gbit/s")

    @property
    def cluster(self) -> Cluster:
        return cluster_of({"name": "changing", "nodes": self.nodes})

    @property
    def num_devices(self) -> int:
        return sum(node["devices"]["count"] for node in self.nodes)

    @precondition(lambda self: self.num_devices < MOST_DEVICES)
    @rule(kind=st.sampled_from(sorted(KINDS)), count=st.integers(1, 2), rate=st.sampled_from(RATES))
    def add_node(self, kind: str, count: int, rate: str) -> None:
        self.nodes.append(
            {
                "name": f"n{self.names}x",
                "devices": {"kind": kind, "count": count, "efficiency": KINDS[kind]},
                "intra": [{"medium": "pcie", "bandwidth": "12 GB/s", "latency": "10 us"}],
                "nic": {"bandwidth": rate, "latency": "20 us"},
            }
        )
        self.names += 1

    @precondition(lambda self: self.num_devices < MOST_DEVICES)
    @rule(data=st.data())
    def add_device(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from(self.nodes))
        node["devices"]["count"] += 1

    @precondition(lambda self: len(self.nodes) > 1)
    @rule(data=st.data())
    def lose_node(self, data: st.DataObject) -> None:
        self.nodes.remove(data.draw(st.sampled_from(self.nodes)))
        self.best = None

    @rule(data=st.data(), rate=st.sampled_from(RATES))
    def change_link(self, data: st.DataObject, rate: str) -> None:
        data.draw(st.sampled_from(self.nodes))["nic"]["bandwidth"] = rate
        self.best = None

    @precondition(lambda self: len(self.nodes) > 1)
    @rule(data=st.data())
    def cut_link(self, data: st.DataObject) -> None:
        """A node that nothing reaches any more."""
        data.draw(st.sampled_from(self.nodes)).pop("nic", None)
        for node in self.nodes:
            node.setdefault(
                "nic",
                {"bandwidth": "1 Gbit/s"} if node is self.nodes[0] else {"bandwidth": "1 kB/s"},
            )
        self.best = None

    @rule(batch=st.sampled_from((1, 2, 3, 4, 6, 8)))
    def change_batch(self, batch: int) -> None:
        self.best = None if batch != self.batch else self.best
        self.batch = batch

    @rule(
        asked=st.sampled_from(
            (
                Settings(level=2, gap=GAP),
                Settings(level=1),
                Settings(level=1, runnable=True),
                Settings(level=1, even_shares=True),
                Settings(level=2, gap=GAP, mixed=False),
            )
        )
    )
    def plan(self, asked: Settings) -> None:
        cluster, before = self.cluster, self.best
        exact = asked == Settings(level=2, gap=GAP)
        try:
            found = find_plan(self.chain, cluster, global_batch=self.batch, settings=asked)
        except InfeasibleError:
            assert before is None or not exact, "it fitted before devices were added"
            return
        check_plan(found, self.chain, cluster)
        assert loads_plan(dumps_plan(found)) == found
        assert found.predicted is not None and found.certificate is not None
        seconds, bound = found.predicted.iteration_seconds, found.certificate.lower_bound_seconds
        assert 0 < bound <= seconds * (1 + ROUNDING)
        played = simulate(found, self.chain, cluster).iteration_seconds[0]
        assert played == pytest.approx(seconds, rel=FOLDING)
        if before is not None and exact:
            assert before.predicted is not None
            known = before.predicted.iteration_seconds
            assert bound <= known * (1 + ROUNDING), "a bound above a plan that is still there"
            assert seconds <= known * (1 + max(GAP, found.certificate.gap) + ROUNDING), (
                "slower for having more"
            )
        if exact and (
            before is None
            or before.predicted is None
            or seconds <= before.predicted.iteration_seconds
        ):
            self.best = found


TestPlanner = machine_test(PlannerMachine, 5, 8)
TestPlannerForLong = pytest.mark.exhaustive(machine_test(PlannerMachine, 300, 12))
