"""Elastic runs without processes: the agents' own code, on a clock, a network and workers that are
simulated.

``play`` runs one *schedule*: what befalls which message. Messages between agents (beats aside) are
numbered in the order in which they are sent; when one is about to arrive, a fault may happen first,
or it may be late. All else is deterministic, so a schedule can be repeated, and all schedules with
one or two faults can be tried. What is real: agents, leaders, claims in a folder, the lines between
agents, copies in memory. What is not: planning with costs, training.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import selectors
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from runtime.training_cases import Case, plan_of

from argosy.cluster.file import cluster_from_content
from argosy.cluster.topology import canonical
from argosy.plan.plan import ClusterRef
from argosy.runtime.elastic import agent as agent_module
from argosy.runtime.elastic import leader as leader_module
from argosy.runtime.elastic.agent import Agent
from argosy.runtime.elastic.claims import Claims, RunOutcome
from argosy.runtime.elastic.copies import BlockHeader, BlockRegion, Store
from argosy.runtime.elastic.leader import DeposedError
from argosy.runtime.elastic.replan import Replanner
from argosy.runtime.processes.run_folder import PROGRESS, append, read_lines
from argosy.runtime.processes.run_spec import RunSpec

LATENCY = 0.1
"""Virtual seconds that a message takes: long beside the 2 s after which a host is lost, so that
much overlaps."""
THINKING = 0.2
"""Virtual seconds of what agents do beside their event loop: planning, reading checkpoints."""
STEP_SECONDS = 0.3
LONGEST = 300.0
"""Virtual seconds after which a job that has not ended is taken to hang."""
ENTRIES = 3
"""Tensors of the simulated model; they are divided among the ranks."""
_NODE = {
    "devices": {"kind": "CPU-core", "count": 1},
    "nic": {"bandwidth": "25 Gbit/s", "latency": "20 us"},
}
_HERE: contextvars.ContextVar[Life | None] = contextvars.ContextVar("here", default=None)


@dataclass(frozen=True)
class Fault:
    """What happens before a message arrives."""

    at: int
    """The number of the message."""
    what: str
    """``kill``, ``leave``, ``cut``, ``kill-worker`` or ``late`` (the message itself)."""
    host: int = 0
    seconds: float = 0.0
    """After which what was killed, cut or has left comes back; 0: never, and 8 s for a cut."""


@dataclass(eq=False)
class Life:
    """One agent's process, from its start to its end."""

    name: str
    is_alive: bool = True
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    leave: Callable[[], None] = lambda: None
    agent: Any = None
    result: RunOutcome | None = None

    @property
    def is_there(self) -> bool:
        """Whether it takes part, and has not been told to go."""
        return self.is_alive and self.result is None and not self.agent.is_leaving


class _Mortal(Coroutine[Any, Any, Any]):
    """A coroutine that is never resumed once its process is dead: kill -9 runs no ``finally``."""

    def __init__(self, inner: Any, life: Life, loop: asyncio.AbstractEventLoop) -> None:
        self.inner, self.life, self.loop = inner, life, loop

    def _stuck(self) -> Any:
        future: Any = self.loop.create_future()
        future._asyncio_future_blocking = True
        return future

    def send(self, value: Any) -> Any:
        return self.inner.send(value) if self.life.is_alive else self._stuck()

    def throw(self, *error: Any) -> Any:
        return self.inner.throw(*error) if self.life.is_alive else self._stuck()

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.inner.close()

    def __await__(self) -> Any:
        return self


class _Loop(asyncio.SelectorEventLoop):
    """Time passes only while nothing is to be done."""

    def __init__(self, world: World) -> None:
        self.world, self.now = world, 0.0
        self.tasks: list[Any] = []
        """All tasks, so that no coroutine of the dead is collected, and ended by that, before the
        schedule is over."""
        super().__init__(_Selector(self))
        self.set_task_factory(self._task)
        self.set_exception_handler(self._raised)

    def time(self) -> float:
        return self.now

    def _raised(self, _: Any, context: dict[str, Any]) -> None:
        if not isinstance(
            context.get("exception"), DeposedError
        ):  # of a task whose process has died
            self.world.violations.append(f"{context['message']}: {context.get('exception')!r}")

    def _task(self, loop: Any, coroutine: Any, context: Any = None) -> Any:
        life = (context or contextvars.copy_context()).get(_HERE)
        body = coroutine if life is None else _Mortal(coroutine, life, loop)
        task: Any = asyncio.Task(body, loop=loop, context=context)
        task._log_destroy_pending = False  # those of the dead stay as they are
        self.tasks.append(task)
        return task

    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> None:
        life = _HERE.get()
        assert life is not None
        life.leave = callback


class _Selector(selectors.SelectSelector):
    def __init__(self, loop: _Loop) -> None:
        super().__init__()
        self.loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "everybody waits for ever"
        self.loop.now += max(0.0, timeout)
        return []


class _Writer:
    """One direction of a connection."""

    def __init__(self, world: World, owner: Life, peer: Life, reader: asyncio.StreamReader) -> None:
        self.world, self.owner, self.peer, self.reader = world, owner, peer, reader
        self.other: _Writer | None = None
        self.closing, self.has_ended, self.free_at = False, False, 0.0

    def write(self, data: bytes) -> None:
        if self.closing or not self.owner.is_alive:
            return
        number = self.world.number_of(data)
        late = self.world.late.pop(number, 0.0)
        self.free_at = max(self.free_at, self.world.loop.now + LATENCY + late) + 1e-7
        self.world.loop.call_at(self.free_at, self._arrive, data, number)

    def _arrive(self, data: bytes | None, number: int = -1) -> None:
        self.world.strike(number)
        if self.world.is_cut(self.owner, self.peer):  # sent again until the link is back
            self.world.loop.call_later(0.2, self._arrive, data)
        elif self.peer.is_alive and not self.has_ended:
            self.end() if data is None else self.reader.feed_data(data)

    def end(self) -> None:
        """Nothing more comes."""
        self.has_ended = True
        self.reader.feed_eof()

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            self.world.loop.call_at(
                max(self.free_at, self.world.loop.now) + LATENCY, self._arrive, None
            )
            assert self.other is not None
            self.other.end()

    def abort(self) -> None:
        """Close without sending what is under way; the reset is lost if the link is cut."""
        if self.closing:
            return
        self.closing = True
        if not self.world.is_cut(self.owner, self.peer):
            self.world.loop.call_later(LATENCY, self._arrive, None)
        assert self.other is not None
        self.other.end()

    @property
    def transport(self) -> _Writer:
        return self

    async def drain(self) -> None: ...

    async def wait_closed(self) -> None: ...


class _Workers:
    """The workers of one host; ``World.step`` trains."""

    def __init__(self, report: Callable[[str, dict[str, Any]], None], count: int) -> None:
        self.report = report
        self.running: dict[str, dict[str, Any]] = {}
        life = _HERE.get()
        assert life is not None
        self.life: Life = life
        self.is_pausing = False

    async def prepare(self) -> None: ...

    async def start(self, device: str, task: dict[str, Any]) -> None:
        self.running[device] = task
        self.is_pausing = False
        self.life.agent.world.join(self, device, task)

    def pause(self, *, save: bool) -> None:
        self.is_pausing = True

    async def kill(self) -> None:
        self.running = {}

    def tell(self, device: str, task: dict[str, Any], message: dict[str, Any]) -> None:
        """Report, if this worker still runs; an ending ends it."""
        if self.life.is_alive and self.running.get(device) is task:
            if message["kind"] == "ending":
                del self.running[device]
            self.life.context.run(self.report, device, message)


class World:
    """Three hosts and what happens to them."""

    def __init__(
        self, folder: Path, faults: tuple[Fault, ...], *, hosts: int = 3, steps: int = 4
    ) -> None:
        self.folder, self.faults, self.steps = folder, faults, steps
        self.loop = _Loop(self)
        self.late = {fault.at: fault.seconds for fault in faults if fault.what == "late"}
        self.sent = 0
        self.lives: dict[str, Life] = {}
        self.cut: set[str] = set()
        self.servers: dict[tuple[str, int], tuple[Life, Any]] = {}
        self.violations: list[str] = []
        self.groups: dict[int, dict[int, tuple[_Workers, str, dict[str, Any]]]] = {}
        cluster = cluster_from_content(
            canonical({"name": "few", "nodes": [{"name": "n", "count": hosts, **_NODE}]})
        )
        plan = replace(
            plan_of(Case(shares=((2,),) * hosts, per_node=1)), cluster=ClusterRef.of(cluster)
        )
        self.replanner = Replanner(first=plan, cluster=cluster)
        self.spec = RunSpec(
            plan="p",
            program="q",
            out=str(folder),
            steps=steps,
            lost_after=2.0,
            gather=5.0,
            wait=60.0,
            patience=20.0,
        )

    # The network.

    def number_of(self, data: bytes) -> int:
        """The number of a message, -1 for a beat or an opening."""
        if data.startswith((b'{"kind": "beat"', b'{"token"')):
            return -1
        self.sent += 1
        return self.sent - 1

    def is_cut(self, one: Life, other: Life) -> bool:
        return one.name != other.name and bool({one.name, other.name} & self.cut)

    async def open_connection(
        self, address: str, port: int
    ) -> tuple[asyncio.StreamReader, _Writer]:
        here = _HERE.get()
        assert here is not None
        await asyncio.sleep(LATENCY)
        there, serve = self.servers.get((address, port), (None, None))
        while there is not None and self.is_cut(here, there):
            await asyncio.sleep(0.2)
        if there is None or not there.is_alive or serve is None:
            raise ConnectionRefusedError("refused")
        ours, theirs = asyncio.StreamReader(loop=self.loop), asyncio.StreamReader(loop=self.loop)
        forth, back = _Writer(self, here, there, theirs), _Writer(self, there, here, ours)
        forth.other, back.other = back, forth
        there.context.run(self.loop.create_task, serve(theirs, back))
        return ours, forth

    async def start_server(self, serve: Any, address: str, port: int) -> Any:
        life = _HERE.get()
        assert life is not None
        number = 5000 + len(self.servers)
        self.servers[address, number] = life, serve
        socket = SimpleNamespace(getsockname=lambda: (address, number))
        return SimpleNamespace(
            sockets=[socket], close=lambda: self.servers.pop((address, number), None)
        )

    # Faults.

    def strike(self, number: int) -> None:
        for fault in self.faults:
            if fault.at == number >= 0 and fault.what != "late":
                self._befall(fault, f"n{fault.host}")

    def _befall(self, fault: Fault, name: str) -> None:
        life = self.lives[name]
        others = [
            other
            for other in self.lives.values()
            if other.is_there and other.name not in self.cut | {name}
        ]
        if not others or not life.is_there:
            return  # one host at least is up and connected
        if fault.what == "kill":
            self._kill(life)
            if fault.seconds:
                self.loop.call_later(fault.seconds, self.start, name)
        elif fault.what == "cut":
            self.cut.add(name)
            self.loop.call_later(fault.seconds or 8.0, self.cut.discard, name)
        elif fault.what == "leave":
            life.context.run(life.leave)
            if fault.seconds:
                self.loop.call_later(fault.seconds, self._return, life)
        elif fault.what == "kill-worker":
            workers = life.agent.workers
            for device, task in list(workers.running.items()):
                workers.tell(
                    device, task, {"kind": "ending", "how": "killed", "message": "was killed"}
                )

    def _return(self, life: Life) -> None:
        """Start a host again once it has left."""
        if life.result is None:
            self.loop.call_later(0.5, self._return, life)
        else:
            self.start(life.name)

    def _kill(self, life: Life) -> None:
        life.is_alive = False
        for other in self.lives.values():  # their connections are closed by the system
            if other.is_alive:
                for peer in list(self.connections(other, life)):
                    self.loop.call_later(LATENCY, peer._arrive, None)

    def connections(self, one: Life, other: Life) -> Iterator[_Writer]:
        """What leads from ``other`` to ``one``."""
        for writer in self._writers:
            if writer.owner is other and writer.peer is one:
                yield writer

    # Training.

    def join(self, workers: _Workers, device: str, task: dict[str, Any]) -> None:
        """A worker of a generation has started; when all have, they train."""
        environment = task["environment"]
        if environment["MASTER_PORT"] == "0":
            self.violations.append(f"generation {task['generation']}: no port to meet at")
        group = self.groups.setdefault(task["generation"], {})
        group[task["rank"]] = workers, device, task
        if len(group) == int(environment["WORLD_SIZE"]):
            done = self._base_of(task)
            if done >= task["last"]:
                ending = {"kind": "ending", "how": "finished", "step": done}
                self.loop.call_later(STEP_SECONDS, self._end, task["generation"], ending)
            else:
                self.loop.call_later(STEP_SECONDS, self.step, task["generation"], done, None)
            for one, its_device, its_task in group.values():
                one.tell(its_device, its_task, {"kind": "ready"})
        else:
            self.loop.call_later(self.spec.patience, self._give_up, task["generation"], len(group))

    def _give_up(self, generation: int, joined: int) -> None:
        group = self.groups[generation]
        sizes = {int(task["environment"]["WORLD_SIZE"]) for _, _, task in group.values()}
        if len(group) < max(sizes):
            self._end(
                generation, {"kind": "ending", "how": "elsewhere", "message": "could not meet"}
            )

    def _base_of(self, task: dict[str, Any]) -> int:
        moment = task["base"]["moment"]
        self._check_base(task)
        return 0 if moment is None else int(moment[1])

    def _check_base(self, task: dict[str, Any]) -> None:
        """Nothing newer was whole in the memory of the hosts that take part."""
        held: dict[tuple[int, int], set[str]] = {}
        for name in set(task["hosts"]):
            for header in self.lives[name].agent.store.headers():
                held.setdefault(header.moment, set()).update(piece.entry for piece in header.pieces)
        newest = max(
            (moment for moment, entries in held.items() if len(entries) == ENTRIES), default=None
        )
        base = tuple(task["base"]["moment"] or ()) or None
        if newest is not None and (base is None or newest > base):
            self.violations.append(
                f"generation {task['generation']} goes on from {base}, {newest} was whole"
            )

    def step(self, generation: int, done: int, whole: tuple[int, int] | None) -> None:
        """One step of a generation, if all of its workers are there and reach one another."""
        group = self.groups[generation]
        lives = [workers.life for workers, _, _ in group.values()]
        runs = all(
            w.life.is_alive and w.running.get(device) is task for w, device, task in group.values()
        )
        if not runs or any(self.is_cut(one, other) for one in lives for other in lives):
            message = {"kind": "ending", "how": "elsewhere", "message": "lost contact"}
            self.loop.call_later(1.0, self._end, generation, message)
            return
        done += 1
        append(self.folder / PROGRESS, {"step": done - 1, "loss": 0.0, "generation": generation})
        is_pausing = any(workers.is_pausing for workers, _, _ in group.values())
        arrived = self._copy(generation, done, whole)
        whole = (generation, done) if arrived else whole
        for workers, device, task in list(group.values()):
            workers.tell(device, task, {"kind": "step", "step": done})
        last = next(iter(group.values()))[2]["last"]
        if done >= last:
            self._end(generation, {"kind": "ending", "how": "finished", "step": done})
        elif is_pausing:
            self._end(generation, {"kind": "ending", "how": "paused", "step": done})
        else:
            self.loop.call_later(STEP_SECONDS, self.step, generation, done, whole)

    def _end(self, generation: int, message: dict[str, Any]) -> None:
        for workers, device, task in list(self.groups[generation].values()):
            workers.tell(device, task, message)

    def _copy(self, generation: int, done: int, whole: tuple[int, int] | None) -> bool:
        """Every rank's part to its own agent and to the next host's; whether all have arrived."""
        group, arrived = self.groups[generation], True
        for rank, (workers, _, task) in group.items():
            own = [f"e{at}" for at in range(ENTRIES) if at % len(group) == rank]
            pieces = [
                BlockRegion(entry=e, first=(0,), sizes=(1,), whole=(1,), dtype="u1", begin=0, end=1)
                for e in own
            ]
            header = BlockHeader(
                generation=generation, step=done, rank=rank, scale=1.0, entries=ENTRIES, elements=ENTRIES,
                pieces=tuple(pieces),
            )  # fmt: skip
            for place in filter(None, (task["near"], task["far"])):
                there, _ = self.servers.get(tuple(place), (None, None))
                if there is None or not there.is_alive or self.is_cut(workers.life, there):
                    arrived = False
                else:
                    store: Store = there.agent.store
                    store.put(header, b"x", keep_from=whole or (0, 0))
        return arrived

    # The run.

    def start(self, name: str) -> None:
        """An agent, unless the job is over."""
        if Claims(self.folder).outcome() is not None:
            return
        life = Life(name)
        life.context.run(_HERE.set, life)
        self.lives[name] = life

        def ended(task: asyncio.Task[RunOutcome]) -> None:
            if task.exception() is not None:
                self.violations.append(f"{name} raised {task.exception()!r}")
            life.result = RunOutcome(message="", exit_code=0) if task.exception() else task.result()

        def begin() -> None:
            life.agent = Agent(self.spec, name, name)
            life.agent.world = self
            task = self.loop.create_task(life.agent.run())
            task.add_done_callback(ended)

        life.context.run(begin)

    async def main(self) -> None:
        for name in self.replanner.order:
            self.start(name)
        while any(life.is_alive and life.result is None for life in self.lives.values()):
            await asyncio.sleep(0.5)
            if self.loop.now > LONGEST:
                self.violations.append(f"not over after {LONGEST:g} s")
                return

    def play(self) -> list[str]:
        """Return what went wrong."""
        self._writers: list[_Writer] = []
        made = _Writer.__init__

        def note(writer: _Writer, *values: Any) -> None:
            made(writer, *values)
            self._writers.append(writer)

        clock = SimpleNamespace(monotonic=self.loop.time, monotonic_ns=self._serial, time=time.time)
        modules = ("claims", "leader", "watch")
        with contextlib.ExitStack() as patched:
            for name in modules:
                patched.enter_context(mock.patch(f"argosy.runtime.elastic.{name}.time", clock))
            for owner, name, value in (
                (_Writer, "__init__", note),
                (asyncio, "open_connection", self.open_connection),
                (asyncio, "start_server", self.start_server),
                (asyncio, "to_thread", _at_once),
                (agent_module, "Workers", _Workers),
                (agent_module, "load_plan", lambda path: self.replanner.first),
                (agent_module, "given_facts", lambda *_, **__: {}),
                (agent_module, "replanner_of", lambda *_: self.replanner),
                (Agent, "_free_port", lambda _: 7000),
                (leader_module, "dumps_plan", lambda plan: "plan"),
            ):
                patched.enter_context(mock.patch.object(owner, name, value))
            try:
                self.loop.run_until_complete(self.main())
                self._check_end()
            finally:
                self._clear_away()
        return self.violations

    def _clear_away(self) -> None:
        """End what the dead have left, while there is a loop."""
        for task in self.loop.tasks:
            if not task.done():
                task.get_coro().close()
            elif task._log_traceback and not isinstance(task.exception(), DeposedError):
                self.violations.append(f"nobody saw {task.exception()!r}")
        self.loop.close()

    def _serial(self) -> int:
        self._last_serial = getattr(self, "_last_serial", 0) + 1
        return self._last_serial

    def _check_end(self) -> None:
        """Every step in order, nothing of an older generation after a newer one, the job done."""
        lines, events = read_lines(self.folder / PROGRESS), read_lines(self.folder / "events.jsonl")
        begins = {
            event["generation"]: event["step"] for event in events if event["event"] == "generation"
        }
        expected, generation = 0, 0
        for line in lines:
            if line["generation"] < generation:
                self.violations.append(
                    f"generation {line['generation']} trained after {generation} had begun"
                )
            if line["generation"] != generation:
                generation, expected = line["generation"], begins[line["generation"]]
            if line["step"] != expected:
                self.violations.append(
                    f"step {line['step']} of generation {generation}, expected {expected}"
                )
            expected = line["step"] + 1
        if {line["step"] for line in lines} != set(range(self.steps)):
            self.violations.append(f"steps {sorted({line['step'] for line in lines})}")
        for life in self.lives.values():
            if life.result is not None and life.result.exit_code:
                self.violations.append(f"{life.name}: {life.result.message}")
        left = sorted(path.name for path in (self.folder / "elastic").iterdir())
        if left != ["outcome.json"] and not any(
            life.is_alive and life.result is None for life in self.lives.values()
        ):
            self.violations.append(f"left: {left}")


async def _at_once(work: Callable[..., Any], *values: Any) -> Any:
    await asyncio.sleep(THINKING)
    return work(*values)


def play(folder: Path, *faults: Fault, hosts: int = 3) -> tuple[list[str], int]:
    """Return what went wrong under a schedule, and how many messages were sent."""
    folder.mkdir(parents=True)
    world = World(folder, faults, hosts=hosts)
    return world.play(), world.sent


def told(folder: Path) -> str:
    """What happened, for people."""
    return "\n".join(json.dumps(event) for event in read_lines(folder / "events.jsonl"))
