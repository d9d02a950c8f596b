"""Build a lab, run commands in it, and remove it.

    with Lab(cluster) as lab:
        lab.run([sys.executable, "train.py"])

builds one host per node and runs the command once per device, with the environment that torchrun
would provide. The links follow the cluster's traces while the command runs.

Device speeds are shares of a core. The fastest device gets s_max, the others in proportion to
FLOP/s times efficiency,

    (1)  s_d = s_max speed_d / max speed,     s_max = min(0.8, 0.8 cores max speed / sum of speeds),

so that all together leave the machine a fifth of its time. Only threads that call
``runtime.processes.emulated.join_device`` are limited to it.
"""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import IO

from argosy.cluster.file import cluster_from_content
from argosy.cluster.topology import Cluster
from argosy.errors import RunError, bad_input, closest, impossible
from argosy.lab import system
from argosy.lab.job import LabJob, WorkerCommand, free_port
from argosy.lab.layout import INTERFACE, LabLayout, Port, lay_out
from argosy.lab.record import FOLDER, Record, myself, prefix_of, records

# The part of the cores that devices may use together; the rest is for the machine itself.
_SPARE = 0.8
# Seconds between two looks for the program's ready mark.
_POLL = 0.01
# Letters of a cluster's name in the name of a lab.
_NAME_LENGTH = 20


class LabClock(StrEnum):
    """The event at which a lab's traces begin."""

    LAUNCH = "launch"
    READY = "ready"
    """When the program calls ``runtime.processes.emulated.say_ready``; imports and set-up do not
    count."""


@dataclass(frozen=True)
class _Speed:
    share: system.CoreShare
    full: float
    """The share of a core at speed 1."""


class Lab:
    """An emulated cluster on this machine; it is built on entering and removed on leaving."""

    def __init__(self, cluster: Cluster, *, name: str | None = None, shares: bool = True) -> None:
        self.cluster = cluster
        self.name = name or f"{cluster.name[:_NAME_LENGTH]}-{os.getpid()}"
        if not re.fullmatch(r"[A-Za-z0-9_-]+", self.name) or len(self.name) > 2 * _NAME_LENGTH:
            raise bad_input(
                f"at most {2 * _NAME_LENGTH} letters, digits, - and _", self.name, "lab name"
            )
        self.layout: LabLayout = lay_out(cluster)
        self.with_shares = shares

    def __enter__(self) -> Lab:
        self.up(owner=myself())
        return self

    def __exit__(self, *error: object) -> None:
        down(self.name)

    def up(self, *, owner: tuple[int, str] | None = None) -> None:
        """Build everything; what an interrupted build leaves is removed by ``down`` and by the next
        ``up``."""
        reason = system.why_not()
        if reason is not None:
            raise RunError(f"no lab here: {reason}")
        sweep()
        if any(record.name == self.name for record in records()):
            remedy = f"another name, or argosy lab down {self.name}"
            raise impossible(f"start the lab {self.name}", "it is already running", remedy)
        names = (
            tuple(f"{self.prefix}{device.name}" for device in self.cluster.devices)
            if self.with_shares
            else ()
        )
        record = Record(name=self.name, cluster=self.cluster.content, shares=names, owner=owner)
        record.write()
        try:
            self._build()
        except BaseException:
            remove(record)
            raise

    @property
    def prefix(self) -> str:
        return prefix_of(self.name)

    def _build(self) -> None:
        system.add_namespaces([self.prefix + name for name in self.layout.namespaces])
        switch = self.prefix + "switch"
        for index, _ in enumerate(self.layout.bridges):
            link = ("ip", "-n", switch, "link")
            kind = ("type", "bridge", "forward_delay", "0")
            system.run(*link, "add", f"bridge{index}", *kind)
            system.run(*link, "set", f"bridge{index}", "up")
        for cable in self.layout.cables:
            ends = [
                (self.prefix + port.namespace, port.interface)
                for port in (cable.first, cable.second)
            ]
            near = ("name", ends[0][1], "netns", ends[0][0])
            far = ("name", ends[1][1], "netns", ends[1][0])
            system.run("ip", "link", "add", *near, "type", "veth", "peer", *far)
            for (namespace, interface), bridge in zip(ends, cable.bridges, strict=True):
                if bridge is not None:
                    master = f"bridge{self.layout.bridges.index(bridge)}"
                    system.run("ip", "-n", namespace, "link", "set", interface, "master", master)
                system.connect(namespace, interface)
        for host in self.layout.hosts:
            network = ("ip", "-n", self.prefix + host.name)
            system.run(*network, "address", "add", f"{host.address}/16", "dev", INTERFACE)
        for speed in self._speeds.values():
            speed.share.create()
            speed.share.set(speed.full)
        self._set_time(0.0)

    @cached_property
    def _speeds(self) -> dict[str, _Speed]:
        """Return the speed of each device (1)."""
        if not self.with_shares:
            return {}
        rates = {
            device.name: device.kind.fastest * device.efficiency for device in self.cluster.devices
        }
        fastest = max(rates.values())
        most = min(_SPARE, _SPARE * (os.cpu_count() or 1) * fastest / sum(rates.values()))
        return {
            name: _Speed(system.CoreShare(self.prefix + name), most * rate / fastest)
            for name, rate in rates.items()
        }

    def share_of(self, device: str) -> float:
        """Return the share of a core that a device has at full speed."""
        return self._speeds[device].full

    def change(self, name: str, value: float) -> None:
        """Give an edge another bandwidth (bytes/s, both ways), or a device another speed (relative
        to its full one)."""
        if name in self.cluster.device_index:
            if value > 0 and not self.with_shares:
                reason = "the lab was started without shares of cores"
                raise impossible(f"change the speed of {name}", reason, "0, for a lost device")
            self._set_speed(name, value)
            return
        edges = sorted({link.edge for link in self.cluster.links if link.name in self._ports})
        if name not in edges:
            expected = f"an edge or a device of {self.cluster.name}"
            names = [*edges, *self.cluster.device_index]
            raise bad_input(expected, name, suggestion=closest(name, names))
        for link in self.cluster.links:
            if link.edge == name and link.name in self._ports:
                self._shape(link.name, value)

    @cached_property
    def _ports(self) -> dict[str, Port]:
        return self.layout.ports

    def _shape(self, link: str, rate: float) -> None:
        port = self._ports[link]
        system.shape(self.prefix + port.namespace, port.interface, rate)

    def _set_speed(self, device: str, speed: float) -> None:
        """Set the speed of a device; at speed 0 it is lost, and its processes are killed."""
        if speed <= 0:
            for pid in self._processes(device):
                system.kill(pid)
        elif device in self._speeds:
            self._speeds[device].share.set(self._speeds[device].full * speed)

    def _processes(self, device: str) -> list[int]:
        host = self.cluster.device(device).node
        mark = f"ARGOSY_DEVICE={device}".encode()
        pids = system.processes(self.prefix + host)
        return [pid for pid in pids if mark in system.environment(pid).split(b"\0")]

    def _set_time(self, now: float) -> float:
        """Set everything as the traces have it at ``now`` (seconds); return when the next change is
        due."""
        following = math.inf
        for link in self.cluster.links:
            if link.name in self._ports and (
                now == 0 or link.bandwidth.at(now) != link.bandwidth.at(self._last)
            ):
                self._shape(link.name, link.bandwidth.at(now))
            following = min(
                following, link.bandwidth.next_change(now) if link.name in self._ports else math.inf
            )
        for device in self.cluster.devices:
            if now == 0 or device.speed.at(now) != device.speed.at(self._last):
                self._set_speed(device.name, device.speed.at(now))
            following = min(following, device.speed.next_change(now))
        self._last = now
        return following

    _last = 0.0
    """The time to which links and devices were last set, in seconds of the traces."""

    def start(
        self,
        command: Sequence[str],
        *,
        devices: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> LabJob:
        """Start a command once per device, in its host; ``devices`` are in the order of their
        ranks, by default all."""
        names = list(self.cluster.device_index) if devices is None else list(devices)
        hosts = {name: host for host in self.layout.hosts for name in host.devices}
        port = str(free_port())
        workers = []
        for rank, device in enumerate(names):
            host = hosts[self.cluster.device(device).name]
            together = [name for name in names if hosts[name] is host]
            own = {
                "RANK": str(rank),
                "LOCAL_RANK": str(together.index(device)),
                "WORLD_SIZE": str(len(names)),
                "LOCAL_WORLD_SIZE": str(len(together)),
                "MASTER_ADDR": hosts[names[0]].address,
                "MASTER_PORT": port,
                "GLOO_SOCKET_IFNAME": INTERFACE,
                "TP_SOCKET_IFNAME": INTERFACE,
                "OMP_NUM_THREADS": "1",
                "ARGOSY_DEVICE": device,
            }
            if device in self._speeds:
                own["ARGOSY_LAB_THREADS"] = str(self._speeds[device].share.threads)
            workers.append(
                WorkerCommand(
                    label=device,
                    command=("nsenter", f"--net=/run/netns/{self.prefix}{host.name}", *command),
                    environment={**os.environ, **(environment or {}), **own},
                )
            )
        return LabJob(workers)

    def run(
        self,
        command: Sequence[str],
        *,
        devices: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
        timeout: float = math.inf,
        clock: LabClock = LabClock.LAUNCH,
        echo: IO[str] | None = None,
    ) -> LabJob:
        """Run a command to its end on every device, under the cluster's changes; raise a
        ``RunError`` if one fails, or if links and devices did not follow the changes."""
        mark = FOLDER / f"{self.name}.ready"
        mark.unlink(missing_ok=True)
        ready = {"ARGOSY_LAB_READY": str(mark)}
        job = self.start(command, devices=devices, environment={**(environment or {}), **ready})
        job.echo = echo
        with job:
            done, errors = threading.Event(), list[Exception]()
            follower = threading.Thread(
                target=self._follow, args=(done, mark, clock, errors), daemon=True
            )
            follower.start()
            try:
                job.wait(timeout)
            finally:
                done.set()
                follower.join()
                mark.unlink(missing_ok=True)
        if errors:
            raise RunError(f"the lab stopped following the cluster's changes: {errors[0]}")
        return job

    def _follow(
        self, done: threading.Event, mark: Path, clock: LabClock, errors: list[Exception]
    ) -> None:
        """Apply the traces, and add errors of the kernel to ``errors``."""
        try:
            self._play(done, mark, clock)
        except (RunError, OSError) as error:
            errors.append(error)

    def _play(self, done: threading.Event, mark: Path, clock: LabClock) -> None:
        """Apply the traces from the launch on, or from when the program is ready."""
        following = self._set_time(0.0)
        while clock is LabClock.READY and not mark.exists():
            if done.wait(_POLL):
                return
        began = system.now()
        while following < math.inf:
            if done.wait(max(0.0, began + following - system.now())):
                return
            following = self._set_time(following)


def open_lab(name: str) -> Lab:
    """Return a lab that is up, by its name."""
    known = {record.name: record for record in records()}
    if name not in known:
        expected = f"a lab that is up ({', '.join(known) or 'none is'})"
        raise bad_input(expected, name, suggestion=closest(name, known))
    record = known[name]
    return Lab(cluster_from_content(record.cluster), name=name, shares=bool(record.shares))


def down(name: str) -> None:
    """Remove a lab with everything that runs in it."""
    for record in list(records()):
        if record.name == name:
            remove(record)


def sweep() -> list[str]:
    """Remove the labs whose owners have ended without removing them; return their names."""
    orphans = [record for record in records() if record.is_orphan]
    for record in orphans:
        remove(record)
    return [record.name for record in orphans]


def remove(record: Record) -> None:
    """Remove a lab; its record is removed last, so that an interrupted removal can be repeated."""
    for namespace in system.namespaces(record.prefix):
        system.remove_namespace(namespace)
    for share in record.shares:
        system.CoreShare(share).remove()
    (FOLDER / f"{record.name}.ready").unlink(missing_ok=True)
    record.remove()
