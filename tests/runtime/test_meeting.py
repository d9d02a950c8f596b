"""Where ranks meet: on the loopback interface of one machine, else at the one address where the
first node is found."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from argosy.errors import RunError
from argosy.runtime.processes import interfaces
from argosy.runtime.processes.interfaces import interface_addresses, listening_address

PROGRAM = """
import datetime, os, pathlib, sys
import torch, torch.distributed as dist
from argosy.runtime.processes.meeting import meet

def listening(pid):
    "Addresses, as the kernel writes them, on which a process listens."
    sockets = set()
    for entry in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(os.readlink(entry))
        except FileNotFoundError:
            pass
    for table in ("tcp", "tcp6"):
        for line in pathlib.Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                yield words[1].partition(":")[0]

meet("gloo", patience=datetime.timedelta(seconds=60))
total = torch.ones(1)
dist.all_reduce(total)
found = [*listening("self"), *(listening(os.getppid()) if "TORCHELASTIC_RUN_ID" in os.environ else ())]
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(f"{int(total)} {' '.join(found)}")
dist.barrier()
dist.destroy_process_group()
"""

LOOPBACK = "127.0.0.1"
OUTSIDE = next((known for known in interface_addresses().values() if known != LOOPBACK), None)
"""An address of this machine that others may reach, if it has one."""
HAS_OUTSIDE = pytest.mark.skipif(
    OUTSIDE is None, reason="this machine has a loopback interface only"
)


def in_kernel(address: str) -> str:
    """As /proc/net/tcp writes it."""
    return socket.inet_aton(address)[::-1].hex().upper()


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def environment() -> dict[str, str]:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: value for name, value in os.environ.items() if name not in names}


def addresses(folder: Path, ranks: int) -> Iterator[str]:
    for rank in range(ranks):
        total, *found = (folder / str(rank)).read_text().split()
        assert int(total) == ranks
        yield from found


@pytest.mark.parametrize("address", [LOOPBACK, pytest.param(OUTSIDE, marks=HAS_OUTSIDE)])
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_torchrun_listens_at_one_address_only(address: str, program: Path, tmp_path: Path) -> None:
    start = [sys.executable, "-m", "argosy.runtime.processes.meeting", "--nproc-per-node", "2"]
    start += ["--rdzv-endpoint", f"{address}:0"] if address != LOOPBACK else []
    subprocess.run(
        [*start, str(program), str(tmp_path)], check=True, env=environment(), timeout=120
    )
    found = list(addresses(tmp_path, 2))
    assert len(found) >= 2 and set(found) == {in_kernel(address)}, (
        "torchrun's store, and the ranks themselves"
    )


@pytest.mark.parametrize("address", [LOOPBACK, pytest.param(OUTSIDE, marks=HAS_OUTSIDE)])
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_without_torchrun_listen_at_one_address_only(
    address: str, program: Path, tmp_path: Path
) -> None:
    with socket.socket() as probe:
        probe.bind((address, 0))
        port = str(probe.getsockname()[1])
    meeting = {"MASTER_ADDR": address, "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), str(tmp_path)],
            env={**environment(), **meeting, "RANK": str(rank)},
        )
        for rank in range(2)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    found = list(addresses(tmp_path, 2))
    assert len(found) >= 2 and set(found) == {in_kernel(address)}, (
        "rank 0's store, and the ranks themselves"
    )


def test_the_port_is_the_one_that_was_asked_for(program: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        start = [
            sys.executable,
            "-m",
            "argosy.runtime.processes.meeting",
            "--rdzv-endpoint",
            endpoint,
        ]
        done = subprocess.run(
            [*start, str(program)], check=False, capture_output=True, text=True, timeout=120
        )
    assert done.returncode != 0
    assert "Address already in use" in done.stderr


@pytest.mark.parametrize(
    ("leads_to", "cards", "interface", "chosen"),
    [
        ("127.0.0.1", {"lo": "127.0.0.1", "eth0": "10.0.0.5"}, None, "10.0.0.5"),
        ("127.0.1.1", {"eth0": "10.0.0.5", "ib0": "10.1.0.5"}, "ib0", "10.1.0.5"),
        ("203.0.113.9", {"eth0": "10.0.0.5", "ib0": "10.1.0.5"}, "eth0", "10.0.0.5"),
        ("127.0.1.1", {"eth0": "10.0.0.5", "ib0": "10.1.0.5"}, None, None),
    ],
)
def test_a_name_that_others_cannot_follow_is_not_listened_at(
    leads_to: str,
    cards: dict[str, str],
    interface: str | None,
    chosen: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Debian has a machine's own name lead to its loopback interface; some clouds to an address
    that is not its own."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (leads_to, 0))])
    monkeypatch.setattr(interfaces, "interface_addresses", lambda: cards)
    if chosen is not None:
        assert listening_address("gpu01", interface) == chosen
        return
    with pytest.raises(
        RunError, match=r"Cannot listen at gpu01 because it leads to 127.0.1.1.*\(of eth0, ib0\)"
    ):
        listening_address("gpu01", interface)


def test_a_name_that_leads_nowhere_is_reported_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(RunError, match=r"Cannot listen at a0 .* Try --address, or --here if"):
        listening_address("a0")
