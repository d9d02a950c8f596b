"""What a step says about links: the one that is slow is found, wide ones stay believed, queues do not mislead."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.adapt.recorded import seen_in
from argosy.adapt.signals import Message, bandwidths_seen, speeds_seen
from argosy.cli.inputs import load_scenario
from argosy.cluster.file import build_cluster
from argosy.cluster.topology import Cluster
from argosy.document import parse_toml
from argosy.errors import InputError
from argosy.plan.file import read_plan
from argosy.sim.simulate import simulate

MEGABYTE = 1e6


def cluster_of(*rates: float) -> Cluster:
    """Hosts a, b, c, ... with NICs of so many MB/s."""
    nodes = "".join(
        f'[[nodes]]\nname = "{chr(97 + index)}"\ndevices = {{ kind = "A100-40GB" }}\n'
        f'nic = {{ bandwidth = "{8 * rate:g} Mbit/s", latency = "0 us" }}\n'
        for index, rate in enumerate(rates)
    )
    return build_cluster(parse_toml(f'name = "few"\n{nodes}', file="few.toml"), folder=Path())


def believed(cluster: Cluster) -> dict[str, float]:
    return {link.name: link.bandwidth.at(0) for link in cluster.links}


def message(source: str, target: str, start: float, seconds: float, *, awaited: bool = True) -> Message:
    end = start + seconds
    return Message(f"{source}0.0", f"{target}0.0", MEGABYTE, start, start if awaited else end, end)


def test_one_slow_host_is_blamed_and_its_neighbours_are_not() -> None:
    cluster = cluster_of(100, 100, 100)
    pairs = [("a", "b"), ("b", "a"), ("b", "c"), ("c", "b")]
    seen = bandwidths_seen([message(*pair, at, 0.1) for at, pair in enumerate(pairs)], cluster, believed(cluster))
    assert seen == {name: pytest.approx(10 * MEGABYTE) for name in ("b0.nic.in", "b0.nic.out")}


def test_of_two_hosts_both_may_be_to_blame() -> None:
    cluster = cluster_of(100, 100)
    seen = bandwidths_seen([message("a", "b", 0, 0.1)], cluster, believed(cluster))
    assert seen.keys() == {"a0.nic.out", "b0.nic.in"}


def test_a_narrow_link_says_nothing_about_a_wide_one() -> None:
    cluster = cluster_of(100, 20)
    seen = bandwidths_seen([message("a", "b", 0, 0.05)], cluster, believed(cluster))
    assert seen == {"b0.nic.in": pytest.approx(20 * MEGABYTE)}


def test_messages_that_queue_share_the_link() -> None:
    cluster = cluster_of(100, 100)
    queued = [message("a", "b", 0.0, 0.01 * (at + 1)) for at in range(4)]
    seen = bandwidths_seen(queued, cluster, believed(cluster))
    assert seen["a0.nic.out"] == pytest.approx(100 * MEGABYTE)


def test_two_receivers_share_their_senders_link() -> None:
    cluster = cluster_of(100, 100, 100)
    both = [message("a", "b", 0.0, 0.02), message("a", "c", 0.0, 0.02)]
    seen = bandwidths_seen(both, cluster, believed(cluster))
    assert seen == {"a0.nic.out": pytest.approx(100 * MEGABYTE)}


def test_what_nobody_waited_for_says_nothing() -> None:
    cluster = cluster_of(100, 100)
    assert bandwidths_seen([message("a", "b", 0, 5.0, awaited=False)], cluster, believed(cluster)) == {}


def test_a_link_that_is_busy_for_one_route_does_not_explain_another() -> None:
    cluster = cluster_of(100, 100, 100)
    fine = [message(*pair, at, 0.01) for at, pair in enumerate([("a", "b"), ("b", "a")] * 6)]
    slow = [message("b", "c", 20, 0.1), message("c", "b", 21, 0.1)]
    seen = bandwidths_seen([*fine, *slow], cluster, believed(cluster))
    assert {name: round(rate / MEGABYTE) for name, rate in seen.items()} == {
        "a0.nic.in": 100, "a0.nic.out": 100, "b0.nic.in": 100, "b0.nic.out": 100, "c0.nic.in": 10, "c0.nic.out": 10
    }  # fmt: skip


def test_a_timeline_that_nobody_measured_says_nothing_of_links() -> None:
    scenario = load_scenario(read_plan("gpt2-xl-on-two-cards"))
    timeline = simulate(scenario.plan, scenario.chain, scenario.cluster)
    with pytest.raises(InputError, match=r'found "?simulated"?, expected a timeline that a run has measured'):
        seen_in(timeline, scenario.plan, scenario.chain, scenario.cluster, scenario.model)


def test_a_device_that_told_nothing_is_not_judged() -> None:
    scenario = load_scenario(read_plan("gpt2-xl-on-two-cards"))
    first, second = scenario.plan.devices[:2]
    found = speeds_seen({(0, first): 1.0}, scenario.plan, scenario.chain, scenario.cluster, scenario.model)
    assert found.keys() == {first} and second not in found
