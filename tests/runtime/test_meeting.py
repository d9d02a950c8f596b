"""Where the ranks of one machine meet: on its loopback interface, and nowhere that the network could reach."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

PROGRAM = """
import datetime, os, pathlib, sys
import torch, torch.distributed as dist
from argosy.runtime.meeting import meet

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

LOOPBACK = "0100007F"
"""127.0.0.1 in /proc/net/tcp."""


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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_torchrun_on_one_machine_listens_there_only(program: Path, tmp_path: Path) -> None:
    start = [sys.executable, "-m", "argosy.runtime.meeting", "--nproc-per-node", "2", str(program), str(tmp_path)]
    subprocess.run(start, check=True, env=environment(), timeout=120)
    found = list(addresses(tmp_path, 2))
    assert len(found) >= 2 and set(found) == {LOOPBACK}, "torchrun's store, and the ranks themselves"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_without_torchrun_listen_there_only(program: Path, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), str(tmp_path)], env={**environment(), **meeting, "RANK": str(rank)}
        )
        for rank in range(2)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    found = list(addresses(tmp_path, 2))
    assert len(found) >= 2 and set(found) == {LOOPBACK}, "rank 0's store, and the ranks themselves"


def test_the_port_is_the_one_that_was_asked_for(program: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        start = [sys.executable, "-m", "argosy.runtime.meeting", "--rdzv-endpoint", endpoint]
        done = subprocess.run([*start, str(program)], check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "Address already in use" in done.stderr
