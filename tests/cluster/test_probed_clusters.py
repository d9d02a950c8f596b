"""Measured devices and links become a cluster file that says the same."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest

from argosy.cluster.file import load_cluster
from argosy.cluster.probed import ProbedDevice, ProbedHost, ProbedLink, cluster_toml
from argosy.cluster.topology import Cluster
from argosy.dtype import Dtype


def device(rank: int, host: str, rate: float, kind: str = "Some Card (2 GB)") -> ProbedDevice:
    return ProbedDevice(
        rank=rank,
        host=host,
        kind=kind,
        memory=2**31,
        memory_bandwidth=1e11,
        flops=((Dtype.FP32, rate), (Dtype.BF16, 2 * rate)),
        by_size=((Dtype.FP32, 512, rate),),
    )


def links(
    rates: dict[frozenset[int], float], num_ranks: int, latency: float = 1e-4
) -> list[ProbedLink]:
    return [
        ProbedLink(source=a, target=b, bandwidth=rates[frozenset((a, b))], latency=latency)
        for a, b in permutations(range(num_ranks), 2)
    ]


def read(folder: Path, text: str) -> Cluster:
    path = folder / "probed.toml"
    path.write_text(text, encoding="utf-8")
    return load_cluster(str(path))


def rate(cluster: Cluster, one: str, other: str) -> float:
    return cluster.bandwidth(cluster.fastest(one, other, 1e9)).at(0)


def test_hosts_that_are_alike_share_an_entry(tmp_path: Path) -> None:
    devices = [device(0, "x", 1e12), device(1, "y", 0.98e12), device(2, "z", 0.25e12)]
    pairs = {frozenset((0, 1)): 1e9, frozenset((0, 2)): 2e8, frozenset((1, 2)): 2e8}
    text = cluster_toml("probed", devices, links(pairs, 3), measured="Measured today.")
    cluster = read(tmp_path, text)
    assert text.startswith("# Measured today.\n")
    assert [node.name for node in cluster.nodes] == ["a0", "a1", "b0"]
    assert cluster.device("b0.0").efficiency == 0.25
    assert dict(cluster.device("a0.0").kind.flops)[Dtype.FP32] == 1e12
    assert rate(cluster, "a0.0", "a1.0") == pytest.approx(1e9)
    assert rate(cluster, "b0.0", "a1.0") == pytest.approx(2e8)


def test_devices_of_one_host_have_a_medium(tmp_path: Path) -> None:
    devices = [device(0, "x", 1e12), device(1, "x", 1e12, kind="other")]
    cluster = read(
        tmp_path, cluster_toml("probed", devices, links({frozenset((0, 1)): 5e9}, 2, 1e-5))
    )
    assert [d.kind.name for d in cluster.devices] == ["Some-Card-2-GB", "other"]
    assert rate(cluster, "a0.0", "a0.1") == pytest.approx(5e9)
    assert cluster.latency(cluster.fastest("a0.0", "a0.1", 1.0)) == pytest.approx(1e-5)


def test_a_pair_slower_than_both_nics_has_a_link(tmp_path: Path) -> None:
    devices = [device(rank, f"h{rank}", 1e12) for rank in range(3)]
    pairs = {frozenset((0, 1)): 1e9, frozenset((0, 2)): 1e9, frozenset((1, 2)): 1e8}
    cluster = read(tmp_path, cluster_toml("probed", devices, links(pairs, 3)))
    assert [wire.name for wire in cluster.wires] == ["a1-a2"]
    assert rate(cluster, "a1.0", "a2.0") == pytest.approx(1e8)
    assert rate(cluster, "a0.0", "a2.0") == pytest.approx(1e9)


def test_a_nic_wider_than_any_peers_shows_when_all_send_at_once(tmp_path: Path) -> None:
    devices = [device(rank, f"h{rank}", 1e12) for rank in range(3)]
    pairs = {frozenset((0, 1)): 4e8, frozenset((0, 2)): 4e8, frozenset((1, 2)): 4e8}
    hosts = [
        ProbedHost(host=f"h{rank}", out=rate, into=1.02 * rate)
        for rank, rate in enumerate((8e8, 3.9e8, 4e8))
    ]
    cluster = read(tmp_path, cluster_toml("probed", devices, links(pairs, 3), hosts))
    rates = {link.edge: link.bandwidth.at(0) for link in cluster.links}
    assert rates == {
        "a0.nic": pytest.approx(8e8),
        "b0.nic": pytest.approx(4e8),
        "b1.nic": pytest.approx(4e8),
    }
    assert rate(cluster, "a0.0", "b0.0") == pytest.approx(4e8)
    assert cluster.wires == ()


def test_a_machine_alone_needs_no_links(tmp_path: Path) -> None:
    cluster = read(tmp_path, cluster_toml("probed", [device(0, "x", 1e12)], []))
    assert len(cluster.devices) == 1
    assert cluster.links == ()


def test_hosts_of_other_devices_or_without_a_measured_link_have_entries_of_their_own(
    tmp_path: Path,
) -> None:
    devices = [device(0, "x", 1e12), device(1, "y", 1e12, kind="other"), device(2, "z", 1e12)]
    known = links({frozenset((0, 1)): 1e9, frozenset((0, 2)): 1e9, frozenset((1, 2)): 1e8}, 3)
    apart = [link for link in known if {link.source, link.target} != {1, 2}]
    cluster = read(tmp_path, cluster_toml("probed", devices, apart))
    assert (
        len(
            {
                node.name[0]
                for node in cluster.nodes
                if cluster.device(node.devices[0]).kind.name == "other"
            }
        )
        == 1
    )
    assert not cluster.wires, "nothing is known of that pair beside its NICs"
    assert [wire.name for wire in read(tmp_path, cluster_toml("probed", devices, known)).wires]
