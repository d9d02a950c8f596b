"""What a lab would build for a cluster, without building it."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.cluster.file import load_cluster
from argosy.cluster.topology import Cluster
from argosy.errors import InputError
from argosy.lab.layout import SWITCH, lay_out, not_emulated

NODES = """
name = "small"
[[nodes]]
name = "a"
count = 2
devices = { kind = "CPU-core", count = 2 }
intra = [{ medium = "bus", bandwidth = "1 GB/s" }]
nic = { bandwidth = "100 Mbit/s" }
[[nodes]]
name = "b"
devices = { kind = "CPU-core" }
nic = { bandwidth = "50 Mbit/s", latency = "5 ms" }
"""


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Cluster:
    path = tmp_path / "cluster.toml"
    path.write_text(NODES + getattr(request, "param", ""), encoding="utf-8")
    return load_cluster(str(path))


def test_every_nic_is_shaped_where_it_sends(cluster: Cluster) -> None:
    layout = lay_out(cluster)
    assert [host.name for host in layout.hosts] == ["a0", "a1", "b0"]
    assert len({host.address for host in layout.hosts}) == 3
    assert len(layout.bridges) == 1
    assert set(layout.ports) == {
        f"{node}.nic.{way}" for node in ("a0", "a1", "b0") for way in ("out", "in")
    }
    assert layout.ports["a0.nic.out"].namespace == "a0"
    assert layout.ports["a0.nic.in"].namespace == SWITCH


def test_what_is_left_out_is_said(cluster: Cluster) -> None:
    latency, media = not_emulated(cluster)
    assert "5 ms" in latency
    assert "bus" in media


@pytest.mark.parametrize(
    "cluster",
    ['[[links]]\nbetween = ["a*", "b*"]\nname = "wan"\nbandwidth = "10 Mbit/s"\n'],
    indirect=True,
)
def test_a_link_between_two_sides_joins_two_bridges(cluster: Cluster) -> None:
    layout = lay_out(cluster)
    assert len(layout.bridges) == 2
    wire = next(cable for cable in layout.cables if cable.first.link == "wan.forward")
    assert wire.second.link == "wan.back"
    homes = {
        cable.first.namespace: cable.bridges[1]
        for cable in layout.cables
        if cable.first.namespace != SWITCH
    }
    assert wire.bridges == (homes["a0"], homes["b0"])
    assert homes["a0"] == homes["a1"]


@pytest.mark.parametrize(
    "cluster",
    ['[[switches]]\nname = "rack"\nnodes = ["a*"]\nuplink = { bandwidth = "40 Mbit/s" }\n'],
    indirect=True,
)
def test_a_switch_is_a_bridge_with_an_uplink(cluster: Cluster) -> None:
    layout = lay_out(cluster)
    uplink = next(cable for cable in layout.cables if cable.first.link == "rack.uplink.out")
    assert uplink.second.link == "rack.uplink.in"
    assert uplink.bridges[0] == "rack"
    assert len(layout.cables) == 4


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (
            '[[links]]\nbetween = ["a0", "b*"]\nname = "wan"\nbandwidth = "10 Mbit/s"\n',
            "wan: expected a link between two groups that nothing else connects",
        ),
        (
            '[[links]]\nbetween = ["a*", "b*"]\nname = "x"\nbandwidth = "10 Mbit/s"\n'
            '[[links]]\nbetween = ["b*", "a*"]\nname = "y"\nbandwidth = "10 Mbit/s"\n',
            "y: expected one link between two groups, none parallel to it",
        ),
        (
            '[[links]]\nbetween = ["a*", "b*"]\nname = "x"\nbandwidth = "10 Mbit/s"\nbypasses_nic = true\n',
            "x: expected a link that uses the NICs",
        ),
        (
            '[[shared]]\nname = "root"\nedges = ["a0.nic", "a1.nic"]\nbandwidth = "10 Mbit/s"\n',
            "root: expected no capacity shared by several edges",
        ),
    ],
    indirect=["cluster"],
)
def test_what_cannot_be_built_is_refused_by_name(cluster: Cluster, message: str) -> None:
    with pytest.raises(InputError, match=message):
        lay_out(cluster)
