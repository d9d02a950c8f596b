"""Call the kernel for a lab: namespaces and cables (ip), token buckets (tc), shares of a core
(cgroups).

A token bucket holds about 2 ms of traffic: with more, whole activations pass at full speed; with
less, the bucket limits the rate below the requested one. No packet may be larger than the smallest
bucket: one that was queued before the bucket shrank would block it permanently. Core time is given
out in periods of 10 ms.

A bucket's queue is first in, first out. So connections have windows of equal bytes, which are small
beside a message: those that share a link then get equal shares of it, as in the simulator, and what
waits in a queue does not delay acknowledgements, and with them the other direction, for long.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from argosy.errors import RunError

# Seconds of traffic that a token bucket holds.
_BURST_SECONDS = 2e-3
# Bytes of the smallest bucket, which must hold the largest packet.
_LEAST_BURST = 16 * 1024
# Bytes of a packet before it is cut into frames, whose headers are added.
_LARGEST_PACKET = 15_000
_QUEUE = "200ms"
"""The longest time that a packet waits for its bucket before it is dropped."""
# Seconds of traffic that a connection may have on its way, and the least bytes of it.
_WINDOW_SECONDS = 5e-3
_LEAST_WINDOW = 64 * 1024
# Microseconds of a period in which core time is given out.
_PERIOD = 10_000
# Microseconds of core time per period, the least that the kernel accepts.
_LEAST_QUOTA = 1_000
_NAMESPACES = Path("/run/netns")
"""The folder in which ``ip`` lists named namespaces."""
_CGROUPS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))
"""The folders of the cpu controller of version 1 and of the root of version 2."""


def why_not() -> str | None:
    """Return why a lab cannot run on this machine; None if it can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return (
            "network namespaces need root; run it as root, "
            "in a container with its own network if you like"
        )
    missing = [tool for tool in ("ip", "tc", "nsenter") if shutil.which(tool) is None]
    if missing:
        return (
            f"no {', '.join(missing)} on this machine; install the packages iproute2 and util-linux"
        )
    name = f"argosy-probe-{os.getpid()}"
    try:
        run("ip", "netns", "add", name)
        try:
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("tc", "-n", name, "qdisc", "add", "dev", "lo", "root", *_bucket(1e6))
        finally:
            run("ip", "netns", "del", name)
    except RunError as error:
        return f"this kernel or container does not allow it ({error})"
    return None


def run(*command: str, text: str | None = None) -> str:
    """Run a command of the system and return its output; raise a ``RunError`` with the first line
    of its error message."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        complaint = (done.stderr or done.stdout).strip().splitlines()
        raise RunError(
            f"{' '.join(command)}: {complaint[0] if complaint else f'exit code {done.returncode}'}"
        )
    return done.stdout


def add_namespaces(names: Sequence[str]) -> None:
    for name in names:
        run("ip", "netns", "add", name)
        run("ip", "-n", name, "link", "set", "lo", "up")


def namespaces(prefix: str) -> list[str]:
    if not _NAMESPACES.is_dir():
        return []
    return sorted(entry.name for entry in _NAMESPACES.iterdir() if entry.name.startswith(prefix))


def processes(namespace: str) -> list[int]:
    return [int(pid) for pid in run("ip", "netns", "pids", namespace).split()]


def remove_namespace(name: str) -> None:
    """Remove a namespace with every process in it, first by SIGTERM, then by SIGKILL."""
    for number, patience in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 5.0)):
        deadline = time.monotonic() + patience
        for pid in (pids := processes(name)):
            _signal(pid, number)
        while pids and processes(name) and time.monotonic() < deadline:
            time.sleep(0.02)
    run("ip", "netns", "del", name)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def kill(pid: int) -> None:
    """Kill a process without notice, as when a machine loses its power."""
    _signal(pid, signal.SIGKILL)


def environment(pid: int) -> bytes:
    """Return the environment of a process, as the kernel stores it; empty if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes()
    return b""


def now() -> float:
    return time.monotonic()


def connect(namespace: str, interface: str) -> None:
    """Bring an interface up, with packets that fit every bucket."""
    run("ip", "-n", namespace, "link", "set", interface, "gso_max_size", str(_LARGEST_PACKET), "up")


def shape(namespace: str, interface: str, rate: float) -> None:
    """Let an interface send at most ``rate`` bytes/s from now on; at 0 it is down."""
    if rate <= 0:
        run("ip", "-n", namespace, "link", "set", interface, "down")
        return
    run("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", *_bucket(rate))
    _limit_windows(namespace, rate)
    run("ip", "-n", namespace, "link", "set", interface, "up")


def _limit_windows(namespace: str, rate: float) -> None:
    """Limit the bytes that each connection of a namespace has on its way."""
    window = max(_LEAST_WINDOW, round(rate * _WINDOW_SECONDS))
    sizes = f"4096 {_LEAST_WINDOW} {window}"
    inside = f"--net={_NAMESPACES / namespace}"
    run("nsenter", inside, "tee", "/proc/sys/net/ipv4/tcp_wmem", text=sizes)


def _bucket(rate: float) -> list[str]:
    burst = max(_LEAST_BURST, round(rate * _BURST_SECONDS))
    return ["tbf", "rate", f"{round(rate * 8)}bit", "burst", str(burst), "latency", _QUEUE]


class CoreShare:
    """A control group that gives its threads a share of one core."""

    def __init__(self, name: str) -> None:
        self.is_first = (_CGROUPS[0] / "cpu.cfs_quota_us").exists()
        self.folder = (_CGROUPS[0] if self.is_first else _CGROUPS[1]) / name

    @property
    def threads(self) -> Path:
        """Return the file to which a thread writes its number to be limited by the share."""
        return self.folder / ("tasks" if self.is_first else "cgroup.threads")

    def create(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.is_first:
            (self.folder / "cgroup.type").write_text("threaded")

    def set(self, share: float) -> None:
        quota = max(_LEAST_QUOTA, round(share * _PERIOD))
        if not self.is_first:
            (self.folder / "cpu.max").write_text(f"{quota} {_PERIOD}")
            return
        (self.folder / "cpu.cfs_quota_us").write_text("-1")
        (self.folder / "cpu.cfs_period_us").write_text(str(_PERIOD))
        (self.folder / "cpu.cfs_quota_us").write_text(str(quota))

    def remove(self) -> None:
        """Remove the group once its threads have ended."""
        deadline = time.monotonic() + 5
        while self.folder.is_dir():
            try:
                self.folder.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)


def why_no_core_share() -> str | None:
    """Return why devices cannot get shares of a core on this machine; None if they can."""
    share = CoreShare(f"argosy-probe-{os.getpid()}")
    try:
        share.create()
        try:
            share.set(0.5)
        finally:
            share.remove()
    except OSError as error:
        return (
            f"control groups with the cpu controller, writable ({share.folder}: {error.strerror})"
        )
    return None
