"""A real Slurm on this machine: munged, slurmctld and one slurmd per emulated node, in a folder of
their own.

Everything is started in the foreground as a child of the test, listens on the loopback interface,
and is ended by its own process id, whatever happens in between.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

PROGRAMS = (
    "munged",
    "slurmctld",
    "slurmd",
    "scontrol",
    "sinfo",
    "sbatch",
    "squeue",
    "scancel",
    "srun",
)
SECONDS = 60
"""For Slurm to come up, or to end."""


def why_not() -> str | None:
    """Why there can be no Slurm here, or None."""
    missing = [name for name in PROGRAMS if _found(name) is None]
    if missing:
        return f"there is no {missing[0]}; `make test-slurm` installs it"
    return None if os.geteuid() == 0 else "its daemons need root"


def _found(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


@dataclass(frozen=True, kw_only=True)
class Emulated:
    """A node of the emulated cluster."""

    name: str
    cpus: int
    gres: str
    """As in ``slurm.conf``: ``gpu:a100:2``."""


@dataclass
class SlurmCluster:
    """The daemons of a cluster; a context manager."""

    folder: Path
    nodes: Sequence[Emulated]
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __enter__(self) -> SlurmCluster:
        try:
            self._configure()
            key = self.folder / "munge.key"
            key.write_bytes(os.urandom(128))
            key.chmod(0o600)
            files = [
                f"--{name}-file={self.folder / f'munge.{name}'}"
                for name in ("key", "log", "pid", "seed")
            ]
            self._start("munged", "--foreground", "--force", f"--socket={self._socket}", *files)
            self._wait(self._socket.exists, "munged")
            self._start("slurmctld", "-D", "-c")
            for node in self.nodes:
                self._start("slurmd", "-D", "-N", node.name)
            self._wait(self._is_up, "all nodes idle")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._end()

    @property
    def _socket(self) -> Path:
        return self.folder / "munge.socket"

    @property
    def environment(self) -> dict[str, str]:
        path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": path}

    def call(self, *command: str, cwd: Path | None = None) -> str:
        """What a command of Slurm's prints."""
        done = subprocess.run(
            command,
            env=self.environment,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}{done.stdout}"
        return done.stdout

    def jobs(self) -> str:
        return self.call("squeue", "--noheader", "--format=%i %T %r")

    def _is_up(self) -> bool:
        done = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%N %t"],
            env=self.environment, capture_output=True, text=True, timeout=SECONDS, check=False,
        )  # fmt: skip
        return sorted(done.stdout.split("\n")[:-1]) == sorted(
            f"{node.name} idle" for node in self.nodes
        )

    def _configure(self) -> None:
        """``slurm.conf`` and ``gres.conf``; a generic resource is a file, and nobody looks into
        it."""
        control, *own = _free_ports(1 + len(self.nodes))
        host = socket.gethostname()
        (self.folder / "state").mkdir()
        settings = {
            "ClusterName": "emulated",
            "SlurmctldHost": f"{host}(127.0.0.1)",
            "SlurmctldPort": control,
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "AuthType": "auth/munge",
            "AuthInfo": f"socket={self._socket}",
            "CredType": "cred/munge",
            "StateSaveLocation": self.folder / "state",
            "SlurmctldPidFile": self.folder / "slurmctld.pid",
            "SlurmctldLogFile": self.folder / "slurmctld.log",
            "SlurmdSpoolDir": self.folder / "spool.%n",
            "SlurmdPidFile": self.folder / "slurmd.%n.pid",
            "SlurmdLogFile": self.folder / "slurmd.%n.log",
            "SlurmdParameters": "config_overrides",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "MpiDefault": "none",
            "GresTypes": "gpu",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core",
            "SchedulerType": "sched/backfill",
            "SchedulerParameters": "bf_interval=1,sched_interval=1,batch_sched_delay=0",
            "ReturnToService": 2,
        }
        lines = [f"{name}={value}" for name, value in settings.items()]
        cards = []
        for node, port in zip(self.nodes, own, strict=True):
            place = f"NodeHostname={host} NodeAddr=127.0.0.1 Port={port}"
            lines.append(
                f"NodeName={node.name} {place} CPUs={node.cpus} Gres={node.gres} State=UNKNOWN"
            )
            _, kind, count = node.gres.split(":")
            for number in range(int(count)):
                card = self.folder / f"{node.name}-card{number}"
                card.touch()
                cards.append(f"NodeName={node.name} Name=gpu Type={kind} File={card}")
        lines.append("PartitionName=all Nodes=ALL Default=YES MaxTime=10 State=UP")
        (self.folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        (self.folder / "gres.conf").write_text("\n".join(cards) + "\n")

    def _start(self, program: str, *options: str) -> None:
        path = _found(program)
        assert path is not None
        log = (self.folder / f"{program}-{len(self.started)}.out").open("wb")
        with log:
            self.started.append(
                subprocess.Popen(
                    [path, *options], env=self.environment, stdout=log, stderr=log, cwd=self.folder
                )
            )

    def _wait(self, holds, what: str) -> None:  # type: ignore[no-untyped-def]
        """Until something holds; a daemon that has ended is named with what it printed."""
        deadline = time.monotonic() + SECONDS
        while not holds():
            for at, process in enumerate(self.started):
                printed = next(self.folder.glob(f"*-{at}.out")).read_text()
                assert process.poll() is None, f"{process.args} ended: {printed}"
            assert time.monotonic() < deadline, f"no {what} after {SECONDS} s: {self._logs()}"
            time.sleep(0.1)

    def _logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in self.folder.glob("*.log"))

    def _end(self) -> None:
        """Cancel what runs, then end the daemons in the order of their dependence, each by its own
        id."""
        if len(self.started) > 1:
            subprocess.run(
                ["scancel", "--user=root"],
                env=self.environment,
                capture_output=True,
                timeout=SECONDS,
                check=False,
            )
            deadline = time.monotonic() + SECONDS
            while time.monotonic() < deadline and self._has_steps():
                time.sleep(0.1)
        for process in reversed(self.started):
            process.send_signal(signal.SIGTERM)
        for process in reversed(self.started):
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.started.clear()

    def _has_steps(self) -> bool:
        done = subprocess.run(
            ["squeue", "--noheader"],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        return done.returncode == 0 and bool(done.stdout.strip())


def _free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()
