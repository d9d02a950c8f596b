"""Divide one NVIDIA card into several unequal devices: every rank gets a share of its
multiprocessors through CUDA MPS.

    (1)  share_d = floor(100 speed_d / sum of speeds) percent,     all shares together at most 100

Ranks on one card still share its memory bandwidth, so a rank is slower beside the others than
alone: devices are measured while all work (``argosy probe``), never derived from the shares.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from argosy.cluster.topology import Cluster
from argosy.errors import RunError, bad_input
from argosy.lab.job import LabJob, WorkerCommand, free_port

_CONTROL = "nvidia-cuda-mps-control"
"""The command that starts and controls the daemon of CUDA MPS."""
# Seconds to wait for an answer of the daemon, and for its end.
_PATIENCE = 10.0


def why_no_card() -> str | None:
    """Return why a card cannot be shared on this machine; None if it can."""
    if shutil.which("nvidia-smi") is None:
        return "no NVIDIA driver on this machine"
    if shutil.which(_CONTROL) is None:
        return f"no {_CONTROL} on this machine; it comes with the driver"
    return None


def shares_of(cluster: Cluster) -> dict[str, int]:
    """Return the share of each device (1), in percent."""
    rates = {device.name: device.kind.fastest * device.efficiency for device in cluster.devices}
    shares = {name: int(100 * rate / sum(rates.values()) + 1e-9) for name, rate in rates.items()}
    too_small = [name for name, share in shares.items() if share < 1]
    if too_small:
        raise bad_input(
            "devices that get at least 1 % of the card each", ", ".join(too_small), "devices"
        )
    return shares


class SharedCard:
    """A card that a daemon shares in the context; ``run`` starts a command once per share."""

    def __init__(self, shares: Mapping[str, int]) -> None:
        if sum(shares.values()) > 100 or min(shares.values(), default=0) < 1:
            raise bad_input(
                "shares from 1 to 100 that add up to at most 100", str(dict(shares)), "shares"
            )
        self.shares = dict(shares)

    def __enter__(self) -> SharedCard:
        reason = why_no_card()
        if reason is not None:
            raise RunError(f"no shared card here: {reason}")
        self.folder = Path(tempfile.mkdtemp(prefix="argosy-card-"))
        self.own = {
            "CUDA_MPS_PIPE_DIRECTORY": str(self.folder / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(self.folder / "log"),
            "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
        }
        for name in ("pipe", "log"):
            (self.folder / name).mkdir()
        started = self._control("-d")
        if started.returncode:
            self._clean()
            raise RunError(
                f"{_CONTROL} does not start: {(started.stderr or started.stdout).strip()}"
            )
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._control(text="quit\n")
        deadline = time.monotonic() + _PATIENCE
        while any((self.folder / "pipe").glob("control*")) and time.monotonic() < deadline:
            time.sleep(0.05)
        self._clean()

    def _control(self, *options: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [_CONTROL, *options],
            input=text,
            env={**os.environ, **self.own},
            capture_output=True,
            text=True,
            check=False,
            timeout=_PATIENCE,
        )

    def _clean(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None
    ) -> LabJob:
        """Start a command once per share, with the environment that torchrun provides."""
        port = str(free_port())
        workers = []
        for rank, (device, share) in enumerate(self.shares.items()):
            own = {
                **self.own,
                "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(len(self.shares)),
                "LOCAL_WORLD_SIZE": str(len(self.shares)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "ARGOSY_DEVICE": device,
            }
            workers.append(
                WorkerCommand(
                    label=device,
                    command=tuple(command),
                    environment={**os.environ, **(environment or {}), **own},
                )
            )
        return LabJob(workers)

    def run(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        timeout: float = 3600.0,
    ) -> LabJob:
        """Run a command to its end on every share; raise a ``RunError`` if one fails."""
        with self.start(command, environment=environment) as job:
            job.wait(timeout)
        return job
