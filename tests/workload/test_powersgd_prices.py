"""PowerSGD is planned and priced: elements by hand, seconds by arithmetic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from argosy.cluster.file import build_cluster
from argosy.cluster.topology import Cluster
from argosy.cost.memory import state_bytes
from argosy.cost.planned import planned_memory
from argosy.document import parse_json, parse_toml
from argosy.errors import InputError
from argosy.plan.check import check_plan
from argosy.plan.file import dumps_plan, plan_from_document
from argosy.plan.model import planned_chain
from argosy.planner import Settings, find_plan
from argosy.sim.simulate import simulate
from argosy.workload.load import load_model

RANK = 4
SITES = """
name = "sites"
[[nodes]]
name = "x"
count = 2
devices = { kind = "A100-80GB", count = 1 }
nic = { bandwidth = "1 Gbit/s", latency = "0 ms" }
"""


def sites() -> Cluster:
    return build_cluster(parse_toml(SITES, file="sites.toml"), folder=Path())


def by_hand() -> int:
    """Elements that stand for the gradients of gpt2: tables of 50257 and 1024 rows, twelve blocks
    of four square matrices and two of 768 x 3072; biases and norms as they are."""
    width, inner = 768, 3072
    tables = RANK * (50257 + width) + RANK * (1024 + width)
    block = 4 * RANK * 2 * width + 2 * RANK * (width + inner)
    vectors = 4 * width + inner + width + 4 * width  # of attention, feed-forward and two norms
    return tables + 12 * (block + vectors) + 2 * width


def test_the_elements_of_a_model_are_those_of_its_matrices() -> None:
    chain = load_model("gpt2", powersgd=RANK)
    assert sum(layer.summed_parameters or 0 for layer in chain.layers) == by_hand()
    assert chain.parameters == load_model("gpt2").parameters


def test_a_sum_takes_what_its_elements_take_and_errors_take_memory() -> None:
    """Two devices, twice around: once all elements through each NIC, in 4 bytes."""
    chain, where = load_model("gpt2", dtype="bf16", powersgd=RANK), sites()
    plan = find_plan(chain, where, global_batch=64, settings=Settings(replicas=2))
    assert len(plan.devices) == 2 and plan.stages[0].zero == 0
    assert plan.certificate is not None and f"PowerSGD of rank {RANK}" in plan.certificate.scope
    assert plan.certificate.lower_bound_seconds <= simulate(plan, chain, where).iteration_ends[0]
    whole = load_model("gpt2", dtype="bf16")
    seconds = [simulate(plan, one, where, iterations=1).iteration_ends[0] for one in (chain, whole)]
    assert plan.predicted is not None and plan.predicted.iteration_seconds == pytest.approx(
        seconds[0]
    )
    factors = (
        8
        * 4
        * chain.parameters
        / (where.devices[0].efficiency * where.devices[0].kind.memory_bandwidth)
    )
    saved = (2 * whole.parameters - 4 * by_hand()) / 125e6 - factors
    assert seconds[1] - seconds[0] == pytest.approx(saved, rel=1e-3)
    held, before = (state_bytes(one, plan.stages[0], 1.0).total for one in (chain, whole))
    assert held - before == 4 * chain.parameters


def test_a_plan_file_says_how_gradients_are_summed() -> None:
    chain = load_model("gpt2", powersgd=RANK)
    plan = find_plan(chain, sites(), global_batch=8)
    again = plan_from_document(parse_json(dumps_plan(plan), file="plan.json"))
    assert again == plan and planned_chain(again.model) == chain
    broken = replace(plan, stages=tuple(replace(stage, zero=1) for stage in plan.stages))
    with pytest.raises(InputError, match="zero 0 with PowerSGD"):
        check_plan(broken, chain, sites())


def test_planned_memory_contains_the_errors() -> None:
    """Each of two devices keeps an error of 4 bytes for every element of a compressed matrix."""
    chain, whole = (load_model("gpt2", dtype="bf16", powersgd=rank) for rank in (RANK, None))
    plan = find_plan(chain, sites(), global_batch=64, settings=Settings(replicas=2))
    more = planned_memory(plan, chain)
    for device, held in planned_memory(plan, whole).items():
        assert more[device] - held == pytest.approx(state_bytes(chain, plan.stages[0], 1.0).errors)
        assert more[device] - held > 4 * 0.9 * whole.parameters
