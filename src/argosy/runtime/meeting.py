"""Where the processes of a run meet: torch's store, and on one machine none that the network can reach.

torch's own store listens on every interface of its machine, also where all ranks are on that machine. Given a socket
that is bound already, it listens there: so the ranks of one machine meet on the loopback interface, and gloo and NCCL
stay there, too, unless the user's environment names an interface. Between machines everything is as torch has it.

``python -m argosy.runtime.meeting [--rdzv-endpoint 127.0.0.1:PORT] ARGUMENTS`` is torchrun for one machine.
"""

from __future__ import annotations

import datetime
import os
import socket
import sys

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed import run as torchrun
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

BACKEND = "one-machine"
_LOOPBACK = "127.0.0.1"
_BACKLOG = 4096
"""As many ranks may knock at once."""


def meet(backend: str, *, patience: datetime.timedelta) -> None:
    """Join the process group that the environment describes, as torchrun sets it."""
    if os.environ["MASTER_ADDR"] not in (_LOOPBACK, "localhost"):
        dist.init_process_group(backend, timeout=patience)
        return
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, _loopback_interface())
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        dist.init_process_group(backend, timeout=patience)
        return
    rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    store = listening_store(port, patience) if rank == 0 else TCPStore(_LOOPBACK, port, timeout=patience)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)


class OneMachine(RendezvousHandler):
    """All of a job's processes are children of one torchrun, which keeps the store for them."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        _, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=0)
        self._store = listening_store(port, datetime.timedelta(minutes=10))
        self._run_id = parameters.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        meeting_point = RendezvousStoreInfo(_LOOPBACK, self._store.port)
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, meeting_point)

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody else could come."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def listening_store(port: int, patience: datetime.timedelta) -> TCPStore:
    """A store that serves this machine only; port 0: any that is free."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((_LOOPBACK, port))
        listener.listen(_BACKLOG)
        port = listener.getsockname()[1]
        return TCPStore(
            _LOOPBACK,
            port,
            is_master=True,
            timeout=patience,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def _loopback_interface() -> str:
    """``lo`` on Linux, ``lo0`` elsewhere."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def main(arguments: list[str]) -> None:
    rendezvous_handler_registry.register(BACKEND, OneMachine)
    torchrun.main(["--rdzv-backend", BACKEND, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
