"""What shares a link or cannot be active together: NICs, buses, uplinks, parallel edges, conflict
sets."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim.critical import critical_shares
from support.strategies import cluster_of

from argosy.cluster.topology import Cluster
from argosy.dtype import Dtype
from argosy.plan.check import check_plan
from argosy.plan.plan import ClusterRef, ModelRef, Plan, Replica, Stage
from argosy.schedule import ScheduleSpec
from argosy.sim.engine.exact import simulate_exact
from argosy.sim.engine.graph import Flow, Task, TaskGraph
from argosy.sim.tasks.compile import compile_plan
from argosy.timeline import Span, SpanKind
from argosy.workload.chain import Chain, Layer


def node(name: str, count: int = 1, **fields: Any) -> dict[str, Any]:
    return {"name": name, "devices": {"kind": "A100-80GB", "count": count}, **fields}


def nic(bandwidth: int) -> dict[str, str]:
    return {"bandwidth": f"{bandwidth} B/s"}


def medium(name: str, bandwidth: int, **fields: Any) -> dict[str, Any]:
    return {"medium": name, "bandwidth": f"{bandwidth} B/s", **fields}


def cluster(*nodes: dict[str, Any], **fields: Any) -> Cluster:
    return cluster_of({"name": "small", "nodes": list(nodes), **fields})


def play(on: Cluster, *flows: tuple[float, str, str, float]) -> list[Span]:
    """The spans of flows (start, from, to, bytes), in the order given; equal starts are asked for
    in that order."""
    tasks: list[Task] = []
    for number, (start, source, target, size) in enumerate(flows):
        at = on.device_index[source]
        tasks.append(Task(kind=SpanKind.UPDATE, device=at, seconds=start))
        flow = Flow(at, on.device_index[target], size)
        tasks.append(
            Task(kind=SpanKind.TRANSFER, flows=(flow,), after=(2 * number,), micro_batch=number)
        )
    timeline = simulate_exact(
        TaskGraph(devices=tuple(d.name for d in on.devices), tasks=tuple(tasks)), on
    )
    assert timeline.stalled is None
    moved = [span for span in timeline.spans if span.kind is SpanKind.TRANSFER]
    return sorted(moved, key=lambda span: span.micro_batch or 0)


def ends(spans: list[Span]) -> list[float]:
    return [span.end for span in spans]


# Shared capacities


def test_two_devices_of_one_host_get_half_of_its_nic_each() -> None:
    small = cluster(
        node("a", 2, nic=nic(4), intra=[medium("bus", 9)]),
        node("b", nic=nic(9)),
        node("c", nic=nic(9)),
    )
    assert ends(play(small, (0, "a0.0", "b0.0", 8))) == [2]
    assert ends(play(small, (0, "a0.0", "b0.0", 8), (0, "a0.1", "c0.0", 8))) == [4, 4]
    # The second finds the first half done: 4 of its 8 bytes share, the other 4 are alone.
    assert ends(play(small, (0, "a0.0", "b0.0", 8), (1, "a0.1", "c0.0", 8))) == [3, 4]


def test_a_nic_is_full_duplex() -> None:
    small = cluster(node("a", nic=nic(4)), node("b", nic=nic(4)))
    assert ends(play(small, (0, "a0.0", "b0.0", 8), (0, "b0.0", "a0.0", 8))) == [2, 2]


def test_receivers_share_too_and_what_one_cannot_use_another_gets() -> None:
    """Two senders of 1 and 9 bytes/s into a NIC of 6: the slow one keeps its 1, the fast one gets
    5."""
    small = cluster(node("a", nic=nic(1)), node("b", nic=nic(9)), node("c", nic=nic(6)))
    spans = play(small, (0, "a0.0", "c0.0", 10), (0, "b0.0", "c0.0", 50))
    assert ends(spans) == [10, 10]


def test_a_shared_medium_is_one_capacity_and_a_switched_one_is_per_device() -> None:
    flows = [(0, "a0.0", "a0.1", 6), (0, "a0.2", "a0.3", 6), (0, "a0.1", "a0.0", 6)]
    switched = cluster(node("a", 4, intra=[medium("bus", 3)]))
    shared = cluster(node("a", 4, intra=[medium("bus", 3, shared=True)]))
    assert ends(play(switched, *flows)) == [2, 2, 2]
    assert ends(play(shared, *flows)) == [6, 6, 6]


def test_a_shared_entry_caps_the_sum_of_its_edges() -> None:
    nodes = [node(name, nic=nic(2)) for name in "abcd"]
    flows = [(0, "a0.0", "c0.0", 6), (0, "b0.0", "d0.0", 6)]
    assert ends(play(cluster(*nodes), *flows)) == [3, 3]
    root = {"name": "root", "edges": ["a0.nic", "b0.nic"], "bandwidth": "3 B/s"}
    assert ends(play(cluster(*nodes, shared=[root]), *flows)) == [4, 4]
    assert ends(play(cluster(*nodes, shared=[root]), flows[0])) == [3]


def test_racks_share_their_uplink_and_not_what_stays_inside() -> None:
    rack = {"name": "rack", "nodes": ["a*"], "uplink": {"bandwidth": "4 B/s"}}
    small = cluster(
        {**node("a", nic=nic(10)), "count": 3},
        {**node("b", nic=nic(10)), "count": 2},
        switches=[rack],
    )
    assert ends(play(small, (0, "a0.0", "b0.0", 20), (0, "a1.0", "b1.0", 20))) == [10, 10]
    assert ends(play(small, (0, "a0.0", "a1.0", 20), (0, "a2.0", "b1.0", 20))) == [2, 5]
    assert ends(play(small, (0, "b0.0", "a0.0", 20), (0, "a1.0", "b1.0", 20))) == [5, 5]


def test_racks_under_one_pod_meet_there() -> None:
    switches = [
        {"name": "pod", "uplink": {"bandwidth": "1 B/s"}},
        {"name": "left", "nodes": ["a*"], "parent": "pod", "uplink": {"bandwidth": "4 B/s"}},
        {"name": "right", "nodes": ["b*"], "parent": "pod", "uplink": {"bandwidth": "2 B/s"}},
    ]
    small = cluster(*(node(name, nic=nic(10)) for name in "abc"), switches=switches)
    assert ends(play(small, (0, "a0.0", "b0.0", 8))) == [4]  # up to the pod at 4, down at 2
    assert ends(play(small, (0, "a0.0", "c0.0", 8))) == [8]  # out of the pod at 1
    assert play(small, (0, "a0.0", "c0.0", 8))[0].via == (
        "a0.nic.out",
        "left.uplink.out",
        "pod.uplink.out",
        "c0.nic.in",
    )


def test_parallel_links_carry_two_transfers_at_a_time() -> None:
    wires = [
        {"name": name, "between": ["a*", "b*"], "bandwidth": f"{rate} B/s", "bypasses_nic": True}
        for name, rate in [("red", 3), ("blue", 2)]
    ]
    small = cluster(node("a"), node("b"), links=wires)
    spans = play(small, (0, "a0.0", "b0.0", 12), (0, "a0.0", "b0.0", 12))
    assert [(span.via, span.end) for span in spans] == [
        (("red.forward",), 4.0),
        (("blue.forward",), 6.0),
    ]


def test_a_third_transfer_takes_the_link_that_is_less_loaded() -> None:
    wires = [
        {"name": name, "between": ["a*", "b*"], "bandwidth": f"{rate} B/s", "bypasses_nic": True}
        for name, rate in [("red", 9), ("blue", 2)]
    ]
    small = cluster(node("a"), node("b"), links=wires)
    spans = play(small, *[(0, "a0.0", "b0.0", 9)] * 3)
    assert [span.via for span in spans] == [
        ("red.forward",)
    ] * 3  # a third of 9 is still more than 2
    assert ends(spans) == [3, 3, 3]


def test_replicas_on_one_host_send_at_half_speed_and_on_two_hosts_at_full() -> None:
    """The gradients and activations of a data-parallel stage: one NIC of 1 GB/s against two."""

    def transfer_seconds(devices: tuple[str, str]) -> set[float]:
        host = node(
            "a", 2, nic={"bandwidth": "1 GB/s"}, intra=[{"medium": "bus", "bandwidth": "100 GB/s"}]
        )
        targets = [node(name, nic={"bandwidth": "1 GB/s"}) for name in "cd"]
        small = cluster({**host, "count": 2}, *targets)
        layers = tuple(
            Layer(
                name=f"layer{index}",
                kind="block",
                forward_flop=1e12,
                backward_flop=2e12,
                parameters=0,
                activation_bytes=1e6,
                output_bytes=1e9,
            )
            for index in range(2)
        )
        chain = Chain(name="two", layers=layers, sequence_length=1, dtype=Dtype.BF16)
        stages = [
            Stage(
                first=at,
                end=at + 1,
                replicas=tuple(Replica(devices=(name,), samples=1) for name in names),
            )
            for at, names in enumerate([devices, ("c0.0", "d0.0")])
        ]
        plan = Plan(
            model=ModelRef(name="two", sequence_length=1, dtype=Dtype.BF16),
            cluster=ClusterRef.of(small),
            global_batch=2,
            micro_batch_size=2,
            num_micro_batches=1,
            schedule=ScheduleSpec(),
            stages=tuple(stages),
        )
        check_plan(plan, chain, small)
        timeline = simulate_exact(compile_plan(plan, chain, small), small)
        return {round(span.seconds, 9) for span in timeline.spans if span.kind is SpanKind.TRANSFER}

    assert transfer_seconds(("a0.0", "a0.1")) == {2.0}
    assert transfer_seconds(("a0.0", "a1.0")) == {1.0}


# Edges in conflict


def pair(*, nvlink: int, pcie: int, conflict: bool, count: int = 2) -> Cluster:
    media = [medium("nvlink", nvlink), medium("pcie", pcie)]
    return cluster(
        node("a", count, intra=media, conflicts=[["nvlink", "pcie"]] if conflict else [])
    )


def test_the_other_route_is_taken_where_nothing_forbids_it() -> None:
    spans = play(pair(nvlink=4, pcie=3, conflict=False), *[(0, "a0.0", "a0.1", 12)] * 2)
    assert [(span.via[0], span.end) for span in spans] == [
        ("a0.0.nvlink.out", 3.0),
        ("a0.0.pcie.out", 4.0),
    ]


def test_conflicting_media_are_not_active_together() -> None:
    """The second shares the first one's medium, because the other must rest."""
    spans = play(pair(nvlink=4, pcie=3, conflict=True), *[(0, "a0.0", "a0.1", 12)] * 2)
    assert [(span.via[0], span.end) for span in spans] == [("a0.0.nvlink.out", 6.0)] * 2


def test_other_devices_are_free_to_use_the_other_medium() -> None:
    """A conflict is a device's own: between two other devices nothing is forbidden."""
    small = pair(nvlink=4, pcie=3, conflict=True, count=4)
    spans = play(small, (0, "a0.0", "a0.1", 12), (0, "a0.2", "a0.3", 12))
    assert ends(spans) == [3, 3]


def wan_or_nic() -> Cluster:
    """From a to b over a wire, to c over the NIC, and never both at once."""
    wire = {"name": "wan", "between": ["a*", "b*"], "bandwidth": "1 B/s", "bypasses_nic": True}
    nodes = [node(name, nic=nic(2)) for name in "abc"]
    return cluster(*nodes, links=[wire], conflicts=[["wan", "a0.nic"]])


def test_a_flow_waits_until_the_conflicting_edge_is_free() -> None:
    spans = play(wan_or_nic(), (0, "a0.0", "b0.0", 4), (1, "a0.0", "c0.0", 6))
    assert [(span.start, span.end) for span in spans] == [(0, 4), (4, 7)]


def test_nothing_overtakes_a_flow_that_waits() -> None:
    """The third could join the first at once, and must not; the fourth joins the second, which is
    behind nobody."""
    flows = [
        (0, "a0.0", "b0.0", 4),
        (1, "a0.0", "c0.0", 6),
        (2, "a0.0", "b0.0", 1),
        (3, "a0.0", "c0.0", 2),
    ]
    spans = play(wan_or_nic(), *flows)
    assert [(span.start, span.end) for span in spans] == [(0, 4), (4, 7), (7, 8), (8, 9)]


def test_a_third_party_is_not_held_up() -> None:
    spans = play(
        wan_or_nic(), (0, "a0.0", "b0.0", 4), (1, "a0.0", "c0.0", 6), (1, "b0.0", "c0.0", 2)
    )
    assert (spans[2].start, spans[2].end) == (1, 2)


def test_waiting_for_a_conflict_is_waiting_in_the_critical_path() -> None:
    tasks = (
        Task(kind=SpanKind.TRANSFER, flows=(Flow(0, 1, 4.0),)),
        Task(kind=SpanKind.TRANSFER, flows=(Flow(0, 2, 6.0),)),
    )
    timeline = simulate_exact(
        TaskGraph(devices=("a0.0", "b0.0", "c0.0"), tasks=tasks), wan_or_nic()
    )
    assert timeline.end == 7
    assert critical_shares(timeline) == {"waiting": 4.0, "transfer on a0.0>c0.0": 3.0}


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_two_sides_of_a_conflict_ever_overlap(data: st.DataObject) -> None:
    shared = data.draw(st.booleans())
    media = [
        medium("nvlink", data.draw(st.integers(1, 9))),
        medium("pcie", data.draw(st.integers(1, 9)), shared=shared),
    ]
    extra = [medium("xbus", data.draw(st.integers(1, 9)))] if data.draw(st.booleans()) else []
    names = [each["medium"] for each in media + extra]
    host = node("a", 4, intra=media + extra, conflicts=[names], nic=nic(5))
    more = {"conflicts": [["a0.nic", "a0.pcie"]]} if data.draw(st.booleans()) else {}
    small = cluster(host, node("b", nic=nic(5)), **more)
    devices = [device.name for device in small.devices]
    pairs = st.tuples(st.sampled_from(devices), st.sampled_from(devices)).filter(
        lambda ends: ends[0] != ends[1]
    )
    flow = st.tuples(st.integers(0, 12), pairs, st.integers(1, 30))
    flows = data.draw(st.lists(flow, min_size=2, max_size=10))
    spans = play(small, *((float(start), *ends, float(size)) for start, ends, size in flows))
    assert len(spans) == len(flows)
    for conflict in small.conflicts:
        sides = [
            [span for span in spans if any(small.links[link].name in span.via for link in side)]
            for side in conflict
        ]
        for one, other in itertools.combinations(sides, 2):
            for first, second in itertools.product(one, other):
                apart = first.end <= second.start + 1e-9 or second.end <= first.start + 1e-9
                assert apart or first is second
    for (early, first), (late, second) in itertools.combinations(zip(flows, spans, strict=True), 2):
        if early[1] == late[1] and early[0] < late[0]:
            assert first.start <= second.start  # nobody between the same two devices is overtaken


def test_an_idle_medium_is_used_again_after_its_rival() -> None:
    small = pair(nvlink=4, pcie=3, conflict=True)
    spans = play(small, (0, "a0.0", "a0.1", 12), (3, "a0.0", "a0.1", 12))
    assert ends(spans) == [3, 6]


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_equal_flows_on_one_link_end_together(count: int) -> None:
    small = cluster(node("a", nic=nic(6)), node("b", nic=nic(6)))
    assert ends(play(small, *[(0, "a0.0", "b0.0", 6)] * count)) == pytest.approx([count] * count)
