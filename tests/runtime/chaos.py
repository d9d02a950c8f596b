"""Seeded misfortunes for elastic runs; ``python -m benchmarks.faults`` plays seeds and prints a
table.

A seed draws hosts and devices (three or four processes), the network (which decides the plans:
replicas or pipelines), how often copies and checkpoints are made, and four or five misfortunes with
the seconds between them; every third seed adapts, and from 32 on the others train a captured
program, in stages of operations. From 62 on runs begin with one tensor-parallel group of all
devices, over several hosts, and odd ones train a captured program. At any time one host at least is
up and connected. What was taken away comes back in time or not at all. Odd seeds run in the lab,
where there is one, and cut links.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from runtime.elastic_cases import ElasticRun

from argosy.lab import Lab
from argosy.lab.layout import INTERFACE
from argosy.lab.system import namespaces, why_not

STEP = 0.15
"""Seconds of a step, at least."""
SOAK_STEP = 2.0
"""Seconds of a step of a soak, at least: its losses are computed by one process, too."""
SOAK_RATE = 0.001
"""The learning rate of a soak. At the 0.01 of short runs, training multiplies a rounding error by
1e9 in 900 steps; at this rate it stays below 1e-14, and a lost step still shows as 1e-3."""
LONGEST = 600.0
"""Seconds in which something must happen: well above patience and the silences after which hosts
are lost."""
LAST = 81
"""The last seed of the list that is played; others can be."""
_RATE = 300e6 / 8
_LAYERS_ONLY = 32
"""Seeds below this train a model that is made of layers."""
_WITHOUT_GROUPS = 62
"""Seeds below this begin with the plan that is found for devices alone."""


@dataclass(frozen=True)
class Misfortune:
    """What befalls a host, how many seconds after the one before."""

    after: float
    what: str
    host: int

    def __str__(self) -> str:
        return f"{self.what} h{self.host}"


@dataclass(frozen=True)
class Schedule:
    """One seed."""

    seed: int
    hosts: int
    devices: int
    """Of each host."""
    bandwidth: str
    copy_every: int
    save_every: int
    misfortunes: tuple[Misfortune, ...]
    adapt: str = "off"
    """Every third seed adapts as far as it can."""
    is_captured: bool = False
    is_grouped: bool = False
    step_seconds: float = STEP
    rate: float = 0.01

    @property
    def steps(self) -> int:
        """So many that the last misfortune comes before the end."""
        return round((sum(one.after for one in self.misfortunes) + 2) / self.step_seconds)


def is_cut(seed: int) -> bool:
    """Whether a seed cuts links."""
    return seed % 2 == 1 and why_not() is None


def draw(seed: int, *, cuts: bool) -> Schedule:
    chance = random.Random(seed)
    hosts, devices = chance.choice(((3, 1), (4, 1), (2, 2)))
    bandwidth = "300 Mbit/s" if cuts else chance.choice(("10 Gbit/s", "300 Mbit/s"))
    found = _misfortunes(chance, hosts, chance.choice((4, 5)), 4.0, cuts=cuts)
    copy_every, save_every = chance.choice((1, 1, 3)), chance.choice((0, 5))
    adapt = "full" if seed % 3 == 0 else "off"
    is_grouped = seed >= _WITHOUT_GROUPS
    is_captured = seed % 2 == 1 if is_grouped else seed >= _LAYERS_ONLY and adapt == "off"
    about = (hosts, devices, bandwidth, copy_every, save_every)
    return Schedule(seed, *about, found, adapt, is_captured, is_grouped)


def soak(seed: int, minutes: float, *, cuts: bool) -> Schedule:
    """Draw one run of ``minutes`` on three hosts, with a misfortune every 11 s on average.

    Odd seeds train a captured program. No misfortune slows a host, which would last. One host never
    goes, so that its agent lives as long as the run and a leak in it adds up.
    """
    found = _misfortunes(
        random.Random(seed),
        3,
        round(60 * minutes / 11),
        21.7,
        cuts=cuts,
        slow=False,
        staying=seed % 3,
    )
    return Schedule(
        seed,
        3,
        1,
        "300 Mbit/s" if cuts else "10 Gbit/s",
        1,
        20,
        found,
        is_captured=seed % 2 == 1,
        step_seconds=SOAK_STEP,
        rate=SOAK_RATE,
    )


def _misfortunes(
    chance: random.Random,
    hosts: int,
    count: int,
    longest: float,
    *,
    cuts: bool,
    slow: bool = True,
    staying: int | None = None,
) -> tuple[Misfortune, ...]:
    """Draw what befalls hosts, each up to ``longest`` seconds after the one before.

    At least one host is up at any time, and ``staying`` is neither killed nor told to go.
    """
    found: list[Misfortune] = []
    away: set[int] = set()
    cut: set[int] = set()
    for _ in range(count):
        free = [host for host in range(hosts) if host not in away | cut]
        choices = ["kill-worker", *(["slow"] if slow else []), "freeze-worker", "freeze-agent"]
        choices += ["kill-host", "tell-to-go"] * 2 if len(free) > 1 else []
        choices += ["return"] * 3 if away else []
        choices += ["cut"] * 3 if cuts and len(free) > 1 else []
        choices += ["mend"] * 3 if cut else []
        what = chance.choice(choices)
        pool = {"return": sorted(away), "mend": sorted(cut)}.get(what, free)
        if what in ("kill-host", "tell-to-go"):
            pool = [host for host in free if host != staying]
        host = chance.choice(pool)
        away |= {host} if what in ("kill-host", "tell-to-go") else set()
        away -= {host} if what == "return" else set()
        cut |= {host} if what == "cut" else set()
        cut -= {host} if what == "mend" else set()
        found.append(Misfortune(round(chance.uniform(0.3, longest), 2), what, host))
    return tuple(found)


class Fate:
    """Does to a run what a schedule says."""

    def __init__(self, run: ElasticRun, lab: Lab | None) -> None:
        self.run, self.lab = run, lab
        self.gone: set[str] = set()

    def strike(self, one: Misfortune) -> None:
        host = f"h{one.host}"
        match one.what:
            case "kill-worker":
                self.run.kill_worker(host)
            case "kill-host":
                self.run.kill_host(host)
                self.gone.add(host)
            case "tell-to-go":
                self.run.tell_to_go(host)
                self.run.await_(lambda: self.run.agents[host].poll() is not None, LONGEST)
                self.gone.add(host)
            case "return":
                self.run.start(host)
                self.gone.discard(host)
            case "slow":
                (self.run.folder / f"slow-{host}").touch()
            case "freeze-worker":
                self._freeze(self.run.worker(host), 1.0)
            case "freeze-agent":
                self._freeze(self.run.agents[host].pid, 2 * self.run.settings["lost_after"])
            case "cut":
                assert self.lab is not None
                self.lab.change(f"{host}.nic", 0)
            case "mend":
                assert self.lab is not None
                self.lab.change(f"{host}.nic", _RATE)

    def _freeze(self, pid: int | None, seconds: float) -> None:
        with contextlib.suppress(ProcessLookupError):
            if pid is not None:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(seconds)
                os.kill(pid, signal.SIGCONT)

    def mend_all(self) -> None:
        """Cut links come back, so that every agent can learn how it ended."""
        if self.lab is not None:
            for host in self.run.hosts:
                self.lab.change(f"{host}.nic", _RATE)


def play(schedule: Schedule, folder: Path, *, cuts: bool) -> dict[str, object]:
    """Run one seed to its end and check everything; figures for the table."""
    run = ElasticRun(
        folder,
        hosts=schedule.hosts,
        devices=schedule.devices,
        steps=schedule.steps,
        bandwidth=schedule.bandwidth,
        step_seconds=schedule.step_seconds,
        copy_every=schedule.copy_every,
        save_every=schedule.save_every,
        adapt=schedule.adapt,
        grace=10.0,
        is_grouped=schedule.is_grouped,
        environment={
            "RATE": str(schedule.rate),
            **({"CAPTURED": "1"} if schedule.is_captured else {}),
        },
    )
    begin = time.monotonic()
    with _lab(run) if cuts else contextlib.nullcontext() as lab, run:
        fate, struck = Fate(run, lab), 0
        run.start()
        run.await_step(1, LONGEST)
        for one in schedule.misfortunes:
            time.sleep(one.after)
            if run.is_over():
                break
            fate.strike(one)
            struck += 1
        fate.mend_all()
        _await_end(run)
        ended = {host for host, agent in run.agents.items() if agent.returncode == 0}
        assert ended >= set(run.agents) - fate.gone, run.told()
        run.check([])
    assert lab is None or not namespaces(lab.prefix), "a namespace was left"
    generations = run.events("generation")
    return {
        "struck": struck,
        "generations": len(generations),
        "changes": run.num_changes() if schedule.adapt != "off" else "-",
        "repeated": sum(e["repeats"][1] - e["repeats"][0] + 1 for e in generations if e["repeats"]),
        "seconds": round(time.monotonic() - begin),
    }


@contextlib.contextmanager
def _lab(run: ElasticRun) -> Iterator[Lab]:
    """Every host in a network of its own."""
    with Lab(run.cluster, name=f"chaos-{run.mark[-8:]}", shares=False) as lab:
        addresses = {host.name: host.address for host in lab.layout.hosts}
        run.wrap = lambda host: ["nsenter", f"--net=/run/netns/{lab.prefix}{host}"]
        run.address = addresses.__getitem__
        run.environment["GLOO_SOCKET_IFNAME"] = INTERFACE
        yield lab


def _await_end(run: ElasticRun) -> None:
    """Until all agents have ended; something must happen every ``LONGEST`` seconds."""
    seen, since = (-1, -1), time.monotonic()
    while any(process.poll() is None for process in run.agents.values()):
        now = (len(run.lines()), len(run.events()))
        if now != seen:
            seen, since = now, time.monotonic()
        assert time.monotonic() - since < LONGEST, f"nothing happened for {LONGEST} s\n{run.told()}"
        time.sleep(0.1)
