"""Let the processes of a run meet at torch's store, bound to one address of the first node.

torch's own store listens on every interface of its machine. If it is given a socket that is already
bound, it listens on that socket only:

    (1)  all ranks on one machine   the loopback interface, which gloo and NCCL use as well
    (2)  several machines           the address at which other nodes connect to the first one
                                    (``interfaces``); gloo uses the interface that leads to it,
                                    or the one that the cluster file names

An interface that the user's environment names (``GLOO_SOCKET_IFNAME``, ``NCCL_SOCKET_IFNAME``) is
kept.

``python -m argosy.runtime.processes.meeting [--nnodes N --rdzv-endpoint ADDRESS:PORT --rdzv-conf
rank=R[,interface=NAME]] ARGUMENTS`` runs torchrun for one node of a run; without the first three
options, for the only node.
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

from argosy.runtime.processes.interfaces import (
    interface_settings,
    interface_towards,
    is_loopback,
    listening_address,
    loopback_interface,
)

BACKEND = "bound-store"
"""The name under which torchrun finds ``BoundStore``."""
_LOOPBACK = "127.0.0.1"
# Connections that may wait to be accepted, so that this many ranks can connect at once.
_BACKLOG = 4096
_JOINING = datetime.timedelta(minutes=10)
"""The time for which a node waits for the first node."""


def meet(backend: str, *, patience: datetime.timedelta) -> None:
    """Join the process group that the environment describes, as torchrun sets it."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    choose_interfaces(address, port)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        dist.init_process_group(backend, timeout=patience)
        return
    rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    store = (
        listening_store(port, patience, address=address)
        if rank == 0
        else TCPStore(address, port, timeout=patience)
    )
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)


def choose_interfaces(address: str, port: int, named: str | None = None) -> None:
    """Make gloo and NCCL use the named interface, otherwise that of (1) or (2); an interface that
    the environment names is kept."""
    if named is None and not is_loopback(address):
        towards = interface_towards(address, port)
        if towards is not None:  # NCCL may use several cards and chooses itself
            os.environ.setdefault("GLOO_SOCKET_IFNAME", towards)
        return
    for variable, interface in interface_settings(named or loopback_interface()).items():
        os.environ.setdefault(variable, interface)


class BoundStore(RendezvousHandler):
    """A rendezvous at a store that runs in the torchrun process of the first node."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._rank, self._num_nodes = int(parameters.get("rank", 0)), parameters.max_nodes
        self._address, port = parse_rendezvous_endpoint(
            parameters.endpoint or _LOOPBACK, default_port=0
        )
        interface = parameters.get("interface")
        choose_interfaces(self._address, port, interface)
        if self._rank == 0:
            self._store = listening_store(
                port, _JOINING, address=self._address, interface=interface
            )
        else:
            self._store = TCPStore(self._address, port, timeout=_JOINING)
        self._run_id = parameters.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        meeting_point = RendezvousStoreInfo(self._address, self._store.port)
        return RendezvousInfo(
            PrefixStore(self._run_id, self._store), self._rank, self._num_nodes, meeting_point
        )

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing, since no node joins later."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def listening_store(
    port: int,
    patience: datetime.timedelta,
    *,
    address: str = _LOOPBACK,
    interface: str | None = None,
) -> TCPStore:
    """Return a store that listens at one address; port 0 takes any free port."""
    place = listening_address(address, interface)
    with socket.socket(socket.AF_INET6 if ":" in place else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((place, port))
        listener.listen(_BACKLOG)
        port = listener.getsockname()[1]
        return TCPStore(
            place,
            port,
            is_master=True,
            timeout=patience,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def main(arguments: list[str]) -> None:
    rendezvous_handler_registry.register(BACKEND, BoundStore)
    torchrun.main(["--rdzv-backend", BACKEND, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
