"""Scripts for other systems start on the hosts that the cluster file names for its nodes."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from exporters.target_readers import plan

import argosy
from argosy.cluster.file import build_cluster
from argosy.document import parse_toml
from argosy.plan.plan import ClusterRef

CLUSTER = """
name = "farm"

[[nodes]]
name = "big"
hosts = [
    { name = "card-1.east.example", address = "10.9.0.1", interface = "ens3f0", port = 29411 },
    { name = "card-2", interface = "ib7" },
]
devices = { kind = "A100-40GB", count = 2 }
intra = [{ medium = "nvlink", bandwidth = "300 GB/s", latency = "3 us" }]
nic = { bandwidth = "100 Gbit/s", latency = "10 us" }
"""
STUB = 'torchrun() { echo "$NCCL_SOCKET_IFNAME $GLOO_SOCKET_IFNAME $CUDA_VISIBLE_DEVICES $*"; }\n'


def exported(system: str) -> dict[str, str]:
    """A plan of two stages, on a host each."""
    cluster = build_cluster(parse_toml(CLUSTER, file="farm.toml"), folder=Path())
    made = plan([17, 34], hosts=("big0", "big1"), width=1)
    return dict(argosy.export(replace(made, cluster=ClusterRef.of(cluster)), system).files)


@pytest.mark.parametrize("system", ["megatron", "deepspeed", "torch", "torchtitan"])
def test_a_script_starts_on_named_hosts(system: str) -> None:
    texts = exported(system)
    (script,) = (text for name, text in texts.items() if name.endswith(".sh"))
    found = {}
    for host in ("card-1.east.example", "card-1", "card-2", "card-2.east.example", "big0"):
        done = subprocess.run(
            ["bash", "-c", STUB + script],
            env={"PATH": "/usr/bin:/bin", "ARGOSY_HOST": host},
            capture_output=True,
            text=True,
            check=False,
        )
        found[host] = done.stdout
        assert (done.returncode == 0) == (host != "big0"), done.stderr
    assert found["card-1"] == found["card-1.east.example"] != found["card-2"]
    assert found["card-2"] == found["card-2.east.example"]
    for host, interface in (("card-1", "ens3f0"), ("card-2", "ib7")):
        for line in found[host].splitlines():
            assert line.startswith(f"{interface} {interface} ")
            assert "--master-addr 10.9.0.1 --master-port 29411" in line
    assert "card-1.east.example, card-2" in done.stderr


def test_flagscale_gets_addresses_and_interfaces() -> None:
    texts = exported("flagscale")
    hosts = texts["hostfile"].split("\n")
    assert [line.partition(" ")[0] for line in hosts if line] == ["10.9.0.1", "card-2"]
    content = yaml.safe_load(texts["train_hetero.yaml"])
    variables = content["experiment"]["envs"]["node_specific"]
    assert variables["card-2"]["NCCL_SOCKET_IFNAME"] == "ib7"
    assert variables["10.9.0.1"] == {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NCCL_SOCKET_IFNAME": "ens3f0",
        "GLOO_SOCKET_IFNAME": "ens3f0",
    }
