"""Optimizer state that arrives during the first step after a move: what the step hides of it."""

from __future__ import annotations

import pytest
from cost.test_moving_price import halves, pair

from argosy.adapt.predictor import Predictor
from argosy.adapt.watch import World
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.cost.moving import Transfers, migration
from argosy.sim.engine.exact import simulate_exact
from argosy.sim.engine.graph import Flow, Task, TaskGraph
from argosy.sim.simulate import first_end
from argosy.sim.tasks.arriving import with_arriving
from argosy.timeline import SpanKind
from argosy.workload.load import load_model

RATE = 25e9 / 8


def world_of(cluster: Cluster, nic: float = RATE) -> World:
    rates = {link.name: link.bandwidth.at(0) for link in cluster.links}
    rates |= {name: nic for name in rates if name.startswith("b0.nic")}
    return World(
        bandwidths=tuple(rates.items()),
        speeds=tuple((device.name, 1.0) for device in cluster.devices),
    )


def work(kind: SpanKind, device: int, seconds: float, *after: int) -> Task:
    return Task(kind=kind, device=device, seconds=seconds, after=after)


@pytest.mark.parametrize(("seconds", "end"), [(1.0, 2.5), (2.0, 2.5), (5.0, 5.5)])
def test_an_update_waits_for_the_state_of_its_device_and_nothing_else_does(
    seconds: float, end: float
) -> None:
    """Two seconds of backward, half a second of update, on the device that receives."""
    cluster = pair()
    graph = TaskGraph(
        devices=("a0.0", "a0.1"),
        tasks=(
            work(SpanKind.BACKWARD, 0, 2.0),
            work(SpanKind.UPDATE, 0, 0.5, 0),
            work(SpanKind.BACKWARD, 1, 1.0),
            work(SpanKind.UPDATE, 1, 0.5, 2),
        ),
    )
    state = Transfers(direct=(("b0.0", "a0.0", seconds * RATE),))
    timeline = simulate_exact(with_arriving(graph, state), cluster)
    assert first_end(timeline) == pytest.approx(end, abs=1e-3)
    other = [span for span in timeline.spans if span.where == "a0.1"]
    assert other[-1].end == pytest.approx(1.5)


def test_bytes_that_are_passed_on_come_after_those_that_their_source_receives() -> None:
    cluster = pair()
    graph = TaskGraph(devices=("a0.1",), tasks=(work(SpanKind.UPDATE, 0, 1.0),))
    inside = 300e9
    state = Transfers(direct=(("b0.0", "a0.0", RATE),), passed_on=(("a0.0", "a0.1", 2 * inside),))
    assert first_end(simulate_exact(with_arriving(graph, state), cluster)) == pytest.approx(
        4.0, abs=1e-3
    )


def test_messages_of_the_step_share_the_link_with_the_state() -> None:
    """A message of one second and state of one second over the same link end together."""
    cluster = pair()
    sent = Task(kind=SpanKind.TRANSFER, flows=(Flow(1, 0, RATE),))
    graph = TaskGraph(devices=("a0.0", "b0.0"), tasks=(sent, work(SpanKind.UPDATE, 0, 0.0, 0)))
    state = Transfers(direct=(("b0.1", "a0.1", RATE),))
    assert first_end(simulate_exact(with_arriving(graph, state), cluster)) == pytest.approx(
        2.0, abs=1e-3
    )


@pytest.mark.parametrize("share", [1.0, 0.15])
@pytest.mark.parametrize("cut", [21, 28])
def test_a_step_hides_no_more_than_it_lasts_and_exposes_no_more_than_there_is(
    share: float, cut: int
) -> None:
    cluster, chain = pair(), load_model("gpt2-xl")
    predictor, world = Predictor(chain, cluster, ComputeModel()), world_of(cluster, share * RATE)
    old, new = halves(cluster, chain, 20, 0), halves(cluster, chain, cut, 0)
    state = migration(old, new, chain, cluster).state
    sent = sum(size for *_, size in state.direct) / (share * RATE)
    exposed = predictor.exposed(new, state, world)
    assert sent - predictor.seconds(new, world) <= exposed <= 1.02 * sent
    assert predictor.exposed(new, Transfers(), world) == 0
