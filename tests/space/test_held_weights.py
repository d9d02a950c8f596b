"""What ranges of layers hold, as a table, in a stage and in what moves: against weights that are
counted one by one."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.cluster.file import build_cluster
from argosy.cost.compute import ComputeModel
from argosy.cost.memory import stage_parameters
from argosy.cost.moving import migration
from argosy.document import parse_toml
from argosy.dtype import Dtype
from argosy.plan.plan import ClusterRef, ModelRef, Plan, Replica, Stage
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.space.price import Prices
from argosy.workload.chain import Chain, Layer
from argosy.workload.load import load_model

CLUSTER = build_cluster(
    parse_toml(
        'name = "one"\n[[nodes]]\nname = "n"\ndevices = { kind = "A100-80GB", count = 3 }\n'
        'intra = [{ medium = "nvlink", bandwidth = "300 GB/s" }]\n',
        file="one.toml",
    ),
    folder=Path(),
)


def chain_of(layers: list[tuple[int, int | None, int]]) -> Chain:
    """(weights, tied to, how many of them)."""
    built = tuple(
        Layer(
            name=f"layer{index}",
            kind="layer",
            forward_flop=1.0,
            backward_flop=2.0,
            parameters=own,
            activation_bytes=1.0,
            output_bytes=1.0,
            tied_to=partner,
            tied_parameters=tied,
        )
        for index, (own, partner, tied) in enumerate(layers)
    )
    return Chain(name="drawn", layers=built, sequence_length=1, dtype=Dtype.BF16)


@st.composite
def tied_chains(draw: st.DrawFn) -> Chain:
    """Up to three layers whose weights others use, all of them or some, before them or behind."""
    count = draw(st.integers(2, 9))
    own = [draw(st.integers(0, 9)) for _ in range(count)]
    homes = draw(st.sets(st.integers(0, count - 1), max_size=3))
    layers: list[tuple[int, int | None, int]] = []
    for index in range(count):
        is_tied = homes and index not in homes and draw(st.booleans())
        partner = draw(st.sampled_from(sorted(homes))) if is_tied else None
        layers.append(
            (own[index], partner, 0 if partner is None else draw(st.integers(0, own[partner])))
        )
    return chain_of(layers)


def weights_of(chain: Chain, first: int, end: int) -> set[tuple[int, int]]:
    """The plain recount: every weight by the layer that it belongs to, and its number there."""
    found = set()
    for index in range(first, end):
        layer = chain.layers[index]
        found |= {(index, number) for number in range(layer.parameters)}
        if layer.tied_to is not None:
            found |= {(layer.tied_to, number) for number in range(layer.tied_parameters)}
    return found


def stage_of(first: int, end: int, device: str = "n0.0") -> Stage:
    return Stage(first=first, end=end, replicas=(Replica(devices=(device,), samples=1),))


@given(tied_chains())
def test_every_range_holds_each_of_its_weights_once(chain: Chain) -> None:
    held = Prices(chain, (), ComputeModel()).held
    for first in range(len(chain.layers)):
        for end in range(first + 1, len(chain.layers) + 1):
            count = len(weights_of(chain, first, end))
            assert stage_parameters(chain, stage_of(first, end)) == count
            assert held[first, end] == count


@pytest.mark.parametrize("name", ["t5-base", "gpt2", "llama-3-8b", "mixtral-8x7b"])
def test_the_table_of_a_search_is_what_stages_hold(name: str) -> None:
    chain = load_model(name)
    held = Prices(chain, (), ComputeModel()).held
    for first in range(len(chain.layers)):
        for end in range(first + 1, len(chain.layers) + 1):
            assert held[first, end] == stage_parameters(chain, stage_of(first, end))


@given(tied_chains(), st.data())
def test_a_move_brings_each_weight_that_a_device_lacks_once(
    chain: Chain, data: st.DataObject
) -> None:
    old, new = (drawn_plan(chain, data) for _ in range(2))
    received = migration(old, new, chain, CLUSTER).received
    for device in CLUSTER.devices:
        before, after = (
            {weight for stage in plan.stages if device.name in stage.devices
             for weight in weights_of(chain, stage.first, stage.end)}
            for plan in (old, new)
        )  # fmt: skip
        lacking = len(after - before) * (4 + 8)  # fp32 weights and two moments
        assert received.get(device.name, 0.0) == pytest.approx(lacking)


def drawn_plan(chain: Chain, data: st.DataObject) -> Plan:
    """Stages of any layers on any devices; a device may have several."""
    size = len(chain.layers)
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, size - 1), max_size=3))), size]
    names = [device.name for device in CLUSTER.devices]
    stages = [
        stage_of(first, end, data.draw(st.sampled_from(names)))
        for first, end in itertools.pairwise(cuts)
    ]
    return Plan(
        model=ModelRef(name=chain.name, sequence_length=1, dtype=chain.dtype),
        cluster=ClusterRef.of(CLUSTER),
        global_batch=4,
        micro_batch_size=1,
        num_micro_batches=4,
        schedule=ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B),
        stages=tuple(stages),
    )
