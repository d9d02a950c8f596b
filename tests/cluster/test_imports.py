"""Clusters from host files, Slurm, NCCL's topology and nvidia-smi, in the forms that these tools
write."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from argosy.cluster.file import build_cluster
from argosy.cluster.imports import kinds
from argosy.cluster.imports.found import catalogue_kind, cluster_text
from argosy.cluster.imports.hosts import HostFacts, expand_hosts, read_hostfile, read_topology
from argosy.cluster.imports.kinds import Kinds
from argosy.cluster.imports.node_view import read_nccl, read_nvidia_smi
from argosy.cluster.imports.slurm import read_slurm
from argosy.cluster.topology import Cluster
from argosy.document import parse_toml
from argosy.errors import InputError

GIVEN = HostFacts(kinds=Kinds(everywhere="A100-80GB"), per_host=8, intra=300e9, nic=12.5e9)

HOSTFILE = """# two racks
worker-1 slots=8
worker-2 slots=8   # maintained on Mondays
old-1:4
"""

TOPOLOGY = """
SwitchName=s0 Nodes=tux[0-2]
SwitchName=s1 Nodes=tux[3-4] LinkSpeed=1
SwitchName=s2 Switches=s[0-1]
"""

NCCL = """<system version="1">
  <cpu numaid="0" affinity="ffff" arch="x86_64" vendor="AuthenticAMD" familyid="143" modelid="49">
    <pci busid="0000:01:00.0" class="0x060400" link_speed="16.0 GT/s PCIe" link_width="16">
      <pci busid="0000:07:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16">
        <gpu dev="0" sm="80" rank="0" gdr="1">
          <nvlink target="0000:c4:00.0" count="6" tclass="0x068000"/>
          <nvlink target="0000:c5:00.0" count="6" tclass="0x068000"/>
        </gpu>
      </pci>
      <pci busid="0000:0f:00.0" class="0x030200" link_speed="16.0 GT/s PCIe" link_width="16">
        <gpu dev="1" sm="80" rank="1" gdr="1">
          <nvlink target="0000:c4:00.0" count="12" tclass="0x068000"/>
        </gpu>
      </pci>
      <pci busid="0000:0c:00.0" class="0x020700" link_speed="16.0 GT/s PCIe" link_width="16">
        <nic>
          <net name="mlx5_0" dev="0" speed="200000" port="1" guid="0x1" maxconn="131072" gdr="1"/>
          <net name="mlx5_1" dev="1" speed="200000" port="1" guid="0x2" maxconn="131072" gdr="1"/>
          <net name="eth0" dev="2" speed="100000" port="2" guid="0x2" maxconn="131072" gdr="0"/>
        </nic>
      </pci>
    </pci>
  </cpu>
</system>"""

SMI = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-1)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-2)

\t\x1b[4mGPU0\tGPU1\tmlx5_0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV12\tPXB\t0-47,96-143\t0
GPU1\tNV12\t X \tPXB\t0-47,96-143\t0
mlx5_0\tPXB\tPXB\t X

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""


def built(text: str) -> Cluster:
    return build_cluster(parse_toml(text, file="cluster.toml"), folder=Path())


def rate(cluster: Cluster, one: str, other: str) -> float:
    return cluster.bandwidth(cluster.fastest(one, other, 1e9)).at(0)


def hosts_of(cluster: Cluster) -> list[str | None]:
    return [node.machine and node.machine.name for node in cluster.nodes]


def test_a_hostfile_groups_hosts_by_their_slots() -> None:
    cluster = built(cluster_text("x", read_hostfile(HOSTFILE, "hosts", GIVEN), source="hostfile"))
    assert [(node.name, len(node.devices)) for node in cluster.nodes] == [
        ("a0", 8),
        ("a1", 8),
        ("b0", 4),
    ]
    assert hosts_of(cluster) == ["worker-1", "worker-2", "old-1"]
    assert rate(cluster, "a0.0", "a0.1") == 300e9
    assert rate(cluster, "a0.0", "b0.1") == 12.5e9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=8\nb slots eight\n", r"hosts:2: found .*b slots eight.*, expected a host"),
        ("a\na\n", "hosts:2: .*each host once"),
        ("# nobody\n", "hosts: found none, expected at least one host"),
    ],
)
def test_wrong_hostfiles_name_the_line(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_hostfile(text, "hosts", GIVEN)


def test_slurm_writes_many_hosts_as_one() -> None:
    assert expand_hosts("n[08-10]x[1-2]") == ["n08x1", "n08x2", "n09x1", "n09x2", "n10x1", "n10x2"]
    cluster = built(
        cluster_text("x", read_slurm("gpu[1-3],big7\n", "hosts", GIVEN), source="slurm")
    )
    assert hosts_of(cluster) == ["gpu1", "gpu2", "gpu3", "big7"]
    with pytest.raises(InputError, match="numbers and rising ranges in brackets"):
        expand_hosts("gpu[5-3]rack[0-99999999999]")
    with pytest.raises(InputError, match="numbers and rising ranges in brackets"):
        expand_hosts("gpu[a-b]")
    for text in ("gpu[1-2", "gpu]1[", "gpu[1[2]]"):
        with pytest.raises(InputError, match='a "]" after every "\\["'):
            expand_hosts(text)


def test_a_type_is_looked_up_once_for_many_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of 60,000 hosts took 4 s when the catalogue was searched for each."""
    searched: list[str] = []

    def words_of(name: str) -> set[str]:
        searched.append(name)
        return {name}

    monkeypatch.setattr(kinds, "words_of", words_of)
    kinds.kinds_called.cache_clear()
    read_slurm("gpu[1-500]", "hosts", GIVEN)
    kinds.kinds_called.cache_clear()
    assert searched.count("A100-80GB") < 10


SCONTROL = """NodeName=gpu01 Arch=x86_64 CoresPerSocket=32
   CPUAlloc=0 CPUEfctv=64 CPUTot=64 CPULoad=0.02
   AvailableFeatures=a100,nvlink
   ActiveFeatures=a100,nvlink
   Gres=gpu:a100:8(S:0-1),nvme:2
   NodeAddr=10.1.0.1 NodeHostName=gpu01 Version=23.02.7
   OS=Linux 5.15.0-91-generic #101-Ubuntu SMP Tue Nov 14 13:30:08 UTC 2023
   RealMemory=515000 AllocMem=0 FreeMem=500000 Sockets=2 Boards=1
   State=IDLE ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A
   Partitions=gpu
   CfgTRES=cpu=64,mem=515000M,billing=64,gres/gpu=8
   Reason=planned for Monday [root@2024-01-05T10:00:00]

NodeName=old1 Arch=x86_64 CoresPerSocket=8
   CPUTot=16 Gres=gpu:v100:2(S:0),gpu:t4:1 NodeAddr=old1 State=MIXED+PLANNED
NodeName=down1 CPUTot=16 Gres=gpu:v100:2 NodeAddr=down1 State=DOWN*+DRAIN
NodeName=login CPUTot=8 Gres=(null) NodeAddr=login State=IDLE
"""
UNEQUAL = replace(GIVEN, kinds=Kinds.parse(["a100=A100-80GB", "old*=V100-32GB"]))
TYPED = replace(GIVEN, kinds=Kinds.parse(["a100=A100-80GB"]))


def test_scontrol_tells_hosts_devices_and_cpus() -> None:
    one_line = "\n".join(" ".join(block.split()) for block in re.split(r"\n(?=NodeName)", SCONTROL))
    for text in (SCONTROL, one_line):
        written = cluster_text("x", read_slurm(text, "nodes.txt", UNEQUAL), source="slurm")
        cluster = built(written)
        assert hosts_of(cluster) == ["gpu01", "old1"]
        assert [node.cpus for node in cluster.nodes] == [64, 16]
        assert [node.machine and node.machine.address for node in cluster.nodes] == [
            "10.1.0.1",
            None,
        ]
        kinds = [device.kind.name for device in cluster.devices]
        assert kinds == ["A100-80GB"] * 8 + ["V100-32GB"] * 3, (
            "what is said of hosts is said of all their cards"
        )
        assert "left out (without GPUs): login; left out (takes no jobs): down1" in written


@pytest.mark.parametrize(
    "text",
    [
        "NODELIST GRES\ngpu[01-02] gpu:a100:4(S:0-1)\nt gpu:t4:1\n",
        "gpu01 gpu:a100:4\ngpu02 gpu:a100:4(IDX:0-3)\nt gpu:t4:1\n",
        "NODELIST|STATE|GRES\ngpu[01-02]|mix|gpu:a100:no_consume:4\ngpu01|mix|gpu:a100:4\nt|idle|gpu:t4:1\n",
        "HOSTNAMES GRES\ngpu01 gpu:a100:4(S:0,2-3),nvme:2\ngpu02 gpu:a100:4,shard:a100:40(S:0-1)\nt gpu:t4:1\n",
    ],
)
def test_sinfo_with_gres_tells_hosts_and_devices(text: str) -> None:
    cluster = built(cluster_text("x", read_slurm(text, "sinfo.txt", TYPED), source="slurm"))
    assert hosts_of(cluster) == ["gpu01", "gpu02", "t"]
    assert [device.kind.name for device in cluster.devices] == ["A100-80GB"] * 8 + ["T4"]
    assert [node.gres for node in cluster.nodes][1:] == [("gpu:a100",) * 4, ("gpu:t4",)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "PARTITION AVAIL TIMELIMIT NODES STATE NODELIST\nall* up 1:00 3 idle big\n",
            "expected a column GRES",
        ),
        ("JobID State\n12 DONE\n", "sinfo.txt: found .*expected what `scontrol show node`"),
        ("HOSTNAMES\ngpu01\n", "found a table with HOSTNAMES, expected a column GRES"),
        ("NODE_ADDR\n10.0.0.1\n", "found .NODE_ADDR., expected what `scontrol show node`"),
        ("NODELIST,GRES\na,gpu:t4:1\n", "found .NODELIST,GRES., expected what `scontrol"),
        # Columns that are too narrow for their last resource.
        ("a gpu:t4:1(S:0-\n", "found .a gpu:t4:1.S:0-., expected what `scontrol show node`"),
        ("a gpu:t4:1(S:0-1),gp\n", "found .a gpu:t4:1.S:0-1.,gp., expected what `scontrol"),
        ("here are the hosts: a, b\n", "expected what `scontrol show node`"),
        ("", "expected what `scontrol show node`"),
        ("a,<b>\n", "found .*<b>.*expected what `scontrol show node`"),
        (
            "slurm_load_node error: x\nNodeName=a Gres=gpu:t4:1",
            "expected what `scontrol show node`",
        ),
        ("NodeName=a CPUTot=4\n", "expected Gres= for every node"),
        ("NodeName=a Gres=gpu:many\n", 'found "gpu:many", expected GPUs such as'),
        ("NodeName=a Gres=gpu:tesla_v100:1\n", "--kind tesla_v100=V100-16GB, or another"),
        ("NodeName=a Gres=(null)\n", "expected at least one node with GPUs"),
        (
            "NodeName=a Gres=gpu:v100:1\n",
            "--kind v100=V100-16GB, or another .*v100 may be V100-16GB, V100-32GB",
        ),
        ("NodeName=a Gres=gpu:2\n", "--kind is needed"),
        (
            '{"nodes": [{"name": "a", "gres": "gpu:t4:1"}]}',
            "sinfo.txt: found JSON, expected text without --json",
        ),
        (
            "NodeName=a Gres=gpu:a100_3g.40gb:2\n",
            "found .*slices of cards, a100_3g.40gb on a.*whole cards",
        ),
        pytest.param(
            "a gpu" + ":x" * 60 + ",\n",
            "expected what `scontrol show node`",
            id="types without end",
        ),
        pytest.param(
            "\n" * 10**6 + "a b c\n",
            "expected what `scontrol show node`",
            id="blank lines without end",
        ),
    ],
)
def test_what_slurm_does_not_print_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as refused:
        read_slurm(text, "sinfo.txt", replace(GIVEN, kinds=Kinds()))
    assert len(refused.value.problems) == 1


@pytest.mark.parametrize(
    ("state", "takes_jobs"),
    [
        *((state, True) for state in ("idle", "idle~", "mix-", "alloc$", "MIXED+CLOUD", "resv")),
        *((state, True) for state in ("boot^", "plnd", "IDLE+POWERED_DOWN", "comp", "maint")),
        *((state, False) for state in ("drain", "drng", "drained*", "IDLE+DRAIN", "down~", "fail")),
        *((state, False) for state in ("failg", "futr", "FUTURE", "inval", "unk", "UNKNOWN")),
        *((state, False) for state in ("idle*", "IDLE+NOT_RESPONDING", "MIXED*+CLOUD")),
    ],
)
def test_nodes_that_take_no_jobs_are_left_out(state: str, takes_jobs: bool) -> None:
    """States as the manual of ``sinfo`` lists them, in full or shortened, with their suffixes."""
    shown = f"NodeName=a Gres=gpu:a100:1 State=IDLE\nNodeName=b Gres=gpu:a100:1 State={state}\n"
    table = f"NODELIST STATE GRES\na idle gpu:a100:1\nb {state} gpu:a100:1\n"
    for text in (shown, table):
        entries = read_slurm(text, "nodes.txt", TYPED)
        assert entries[0].hosts == (("a", "b") if takes_jobs else ("a",))
        assert (entries[0].note == "left out (takes no jobs): b") is not takes_jobs


def test_a_comment_of_a_node_does_not_replace_its_devices() -> None:
    text = "NodeName=a Gres=gpu:a100:8 State=IDLE\n   Comment=had Gres=gpu:t4:1 State=DOWN once\n"
    entry, *others = read_slurm(text, "nodes.txt", TYPED)
    assert entry.devices == (("A100-80GB", 8),) and not others


def test_a_slice_of_a_card_has_the_kind_that_is_given() -> None:
    kinds = Kinds.parse(["A100-80GB", "a100_1g.10gb=T4"])
    text = "NodeName=a Gres=gpu:a100_1g.10gb:7\n"
    cluster = built(
        cluster_text(
            "x", read_slurm(text, "nodes.txt", replace(GIVEN, kinds=kinds)), source="slurm"
        )
    )
    assert {device.kind.name for device in cluster.devices} == {"T4"}


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (
            ["t4=A100"],
            '--kind: found "A100", expected a device kind from the catalogue; did you mean "A100-40GB"',
        ),
        (
            ["A10O-80GB"],
            '--kind: found "A10O-80GB", expected a device kind .*did you mean "A100-80GB"',
        ),
        (
            ["t5=T4"],
            "--kind: found .t5=T4., expected TYPE=KIND or HOSTS=KIND .*the file has a100, t4",
        ),
        (
            ["gpu9*=T4"],
            "--kind: found .gpu9.*=T4., expected TYPE=KIND or HOSTS=KIND with a type or hosts",
        ),
    ],
)
def test_a_misspelt_kind_is_refused(kinds: list[str], message: str) -> None:
    text = "NodeName=gpu01 Gres=gpu:t4:1\nNodeName=gpu02 Gres=gpu:a100:1\n"
    with pytest.raises(InputError, match=message):
        read_slurm(text, "nodes.txt", replace(GIVEN, kinds=Kinds.parse(kinds)))


def test_a_pattern_that_no_host_of_a_host_file_has_is_refused() -> None:
    with pytest.raises(InputError, match=r"--kind: found .b.*=T4., expected TYPE=KIND .*no types"):
        read_hostfile(
            "a1\na2\n", "hosts.txt", replace(GIVEN, kinds=Kinds.parse(["A100-80GB", "b*=T4"]))
        )


def test_a_reason_may_name_nodes_and_types_may_be_written_like_drivers_names() -> None:
    text = "NodeName=a Gres=gpu:rtx_2080_ti:2 State=IDLE\n   Reason=see NodeName=b State=DOWN\n"
    (node,) = read_slurm(text, "nodes.txt", replace(GIVEN, kinds=Kinds()))
    assert node.hosts == ("a",) and node.devices == (("RTX-2080Ti", 2),)


def test_one_kind_for_all_does_not_overrule_what_slurm_says() -> None:
    text = "NodeName=a Gres=gpu:a100:1\nNodeName=b Gres=gpu:t4:1\nNodeName=c Gres=gpu:fast:1\nNodeName=d Gres=gpu:1\n"
    cluster = built(cluster_text("x", read_slurm(text, "nodes.txt", GIVEN), source="slurm"))
    kinds = {
        node.machine and node.machine.name: cluster.device(node.devices[0]).kind.name
        for node in cluster.nodes
    }
    assert kinds == {"a": "A100-80GB", "b": "T4", "c": "A100-80GB", "d": "A100-80GB"}


def test_a_slurm_topology_becomes_switches() -> None:
    nodes, switches = read_topology(TOPOLOGY, "topology.conf", GIVEN, 5e9)
    cluster = built(cluster_text("x", nodes, switches, source="slurm"))
    assert len(cluster.nodes) == 5
    assert rate(cluster, "a0.0", "a2.0") == 12.5e9
    assert rate(cluster, "a0.0", "a3.0") == 5e9
    with pytest.raises(InputError, match=r"topology.conf:1: .*expected SwitchName="):
        read_topology("Nodes=a\n", "topology.conf", GIVEN, 5e9)


def test_nccl_tells_links_slots_and_nics() -> None:
    cluster = built(
        cluster_text("x", [read_nccl(NCCL, "topo.xml", host="x", kind="A100-80GB")], source="nccl")
    )
    assert [device.kind.name for device in cluster.devices] == ["A100-80GB"] * 2
    media = {m.name: cluster.links[m.outward[0]].bandwidth.at(0) for m in cluster.nodes[0].media}
    assert media["nvlink"] == pytest.approx(300e9)
    assert media["pcie"] == pytest.approx(31.5e9, rel=1e-2)
    assert cluster.nodes[0].nic is not None
    assert cluster.links[cluster.nodes[0].nic[0]].bandwidth.at(0) == pytest.approx(2 * 25e9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<system", "expected XML"),
        ("<graphs/>", "<graphs> with 0 gpu, expected <system> with gpus"),
        (
            NCCL.replace('sm="80"', 'sm="33"'),
            "gpu.sm: found 33, expected a compute capability that is known, or --kind",
        ),
        ('<!DOCTYPE a [<!ENTITY b "c">]><system/>', "a document type"),
    ],
)
def test_wrong_nccl_files_say_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_nccl(text, "topo.xml", host="x", kind=None)


def test_nvidia_smi_tells_nvlinks_and_kinds() -> None:
    node = read_nvidia_smi(SMI, "smi.txt", host="x", kind=None, nic=25e9)
    cluster = built(cluster_text("x", [node], source="nvidia-smi"))
    assert [device.kind.name for device in cluster.devices] == ["A100-40GB"] * 2
    assert rate(cluster, "a0.0", "a0.1") == pytest.approx(300e9)
    with pytest.raises(InputError, match="or --kind"):
        read_nvidia_smi(
            SMI.replace("NVIDIA A100-SXM4-40GB", "Unknown"),
            "smi.txt",
            host="x",
            kind=None,
            nic=None,
        )
    with pytest.raises(InputError, match="nvidia-smi topo -m"):
        read_nvidia_smi("nothing", "smi.txt", host="x", kind=None, nic=None)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA A100-PCIE-80GB", "A100-80GB-PCIe"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX-2080Ti"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
    ],
)
def test_drivers_names_are_recognised(name: str, kind: str) -> None:
    assert catalogue_kind(name) == kind


def smi(rows: list[list[str]]) -> str:
    """The table of a node, with the columns and the legend that recent drivers print."""
    head = (
        "\t"
        + "\t".join(f"GPU{at}" for at in range(len(rows)))
        + "\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID"
    )
    lines = [
        f"GPU{at}\t" + "\t".join(row) + "\t0-15,32-47\t0\t\tN/A" for at, row in enumerate(rows)
    ]
    return "\n".join(
        [head, *lines, "", "Legend:", "", "  X    = Self", "  NV#  = Connection over # NVLinks"]
    )


def square(cell) -> list[list[str]]:  # type: ignore[no-untyped-def]
    return [
        [" X " if row == column else cell(row, column) for column in range(8)] for row in range(8)
    ]


PUBLISHED = {
    "8x A100 behind NVSwitch": (square(lambda a, b: "NV12"), "A100-40GB", 300e9),
    "two islands of 4x H200": (
        square(lambda a, b: "NV18" if a // 4 == b // 4 else "SYS"),
        "H200",
        None,
    ),
    "8x RTX 4090 on two sockets": (
        square(lambda a, b: "PHB" if a // 2 == b // 2 else "NODE"),
        "RTX-4090",
        None,
    ),
    "8x V100, a mesh": (
        square(lambda a, b: f"NV{1 + (a + b) % 2}" if abs(a - b) < 4 else "NODE"),
        "V100-32GB",
        None,
    ),
}
"""Shapes of tables that people have published: cards, and bytes/s of NVLink where it joins all."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_tables_of_real_machines(name: str) -> None:
    rows, kind, nvlink = PUBLISHED[name]
    node = read_nvidia_smi(smi(rows), "topo.txt", host="x", kind=kind, nic=25e9)
    cluster = built(cluster_text("x", [node], source="nvidia-smi"))
    assert [device.kind.name for device in cluster.devices] == [kind] * 8
    rates = [medium.bandwidth for medium in node.intra if medium.name == "nvlink"]
    assert rates == ([nvlink] if nvlink else [])
    partial = any(cell.startswith("NV") for row in rows for cell in row) and nvlink is None
    assert ("NVLink joins only" in node.note) == partial


def by_hand(switches: int) -> str:
    """A topology file as a cloud ships it for its 8-GPU machines: bare slots under a switch per
    pair of cards."""

    def slot(bus: str, what: str) -> str:
        return f'<pci busid="{bus}:00:00.0" class="{what}" link_speed="16 GT/s" link_width="16"/>'

    parts = []
    for switch in range(switches):
        slots = [
            slot(f"000{2 * switch + at}", "0x030200") + slot(f"010{2 * switch + at}", "0x020700")
            for at in (1, 2)
        ]
        inner = f'<pci busid="ffff:ff:0{switch + 1}.0" class="0x060400" link_speed="16 GT/s">{"".join(slots)}</pci>'
        parts.append(f'<cpu numaid="{switch}" affinity="0000ffff" arch="x86_64">{inner}</cpu>')
    return f'<system version="1">{"".join(parts)}</system>'


def test_a_topology_file_that_was_written_by_hand() -> None:
    node = read_nccl(by_hand(4), "topo.xml", host="x", kind="A100-40GB", nic=200e9)
    cluster = built(cluster_text("x", [node], source="nccl"))
    assert len(cluster.devices) == 8
    assert [medium.name for medium in node.intra] == ["pcie"]
    assert node.intra[0].bandwidth == pytest.approx(16e9 * 16 / 8 * 128 / 130)
    assert node.nic == (200e9, 1)
    assert "does not state whether there is NVLink" in node.note
    with pytest.raises(InputError, match="--kind"):
        read_nccl(by_hand(4), "topo.xml", host="x", kind=None)
