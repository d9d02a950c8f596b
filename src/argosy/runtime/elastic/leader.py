"""Lead an elastic run: form a generation of the hosts that are present, watch it, and form the next
when something happens.

    (1)  stop      every worker that still runs is ended; each host reports which copies it holds
    (2)  connect   hosts that do not all reach one another are reduced to a set that does
    (3)  take up   the newest copies that are whole, or else the newest checkpoint, or else the
                   beginning
    (4)  plan      for the remaining devices (``replan``); if nothing fits, wait for hosts
    (5)  claim     the generation's number (``claims``), start its workers, and watch them

A lost worker or host ends a generation at once. A host that joins or leaves ends it at the next
step, after copies were made: then nothing is trained twice. Needs no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from argosy.errors import InfeasibleError, InputError, RunError
from argosy.plan.file import dumps_plan
from argosy.plan.plan import Plan
from argosy.runtime.elastic.claims import AgentAddress, Claim, Claims, RunOutcome
from argosy.runtime.elastic.copies import BlockHeader, BlockSource
from argosy.runtime.elastic.events import Events
from argosy.runtime.elastic.origin import Base, newest_base, steps_told
from argosy.runtime.elastic.replan import Replanner
from argosy.runtime.elastic.watch import Generation, GenerationWatch
from argosy.runtime.elastic.wire import Line, LostError, Message
from argosy.runtime.processes.ranks import devices_by_rank
from argosy.runtime.processes.run_folder import forget_after
from argosy.runtime.processes.run_spec import RunSpec

# Generations in a row that may end before their first step; after them the job fails.
_MOST_BARREN = 5
# Crashes of one device's worker in a row, before its first step, after which the device is not used
# any more.
_MOST_CRASHES = 2


class DeposedError(Exception):
    """An error that is raised if another host leads, or must lead."""


@dataclass
class HostMember:
    """A host that takes part, as its leader sees it."""

    host: AgentAddress
    devices: tuple[str, ...]
    line: Line
    answers: asyncio.Queue[Message] = field(default_factory=asyncio.Queue)
    is_leaving: bool = False
    is_stopped: bool = False
    """True if it has answered (1) for the generation that is being formed; the fields below are
    valid only then."""
    headers: tuple[BlockHeader, ...] = ()
    free_port: int = 0


class Leader:
    """A leader that forms generations until the job is over."""

    def __init__(
        self,
        spec: RunSpec,
        node: str,
        claims: Claims,
        replanner: Replanner,
        remembered: Claim | None = None,
    ) -> None:
        """Prepare to lead from host ``node``; ``remembered`` is the newest generation that it has
        been in."""
        self.spec, self.node, self.claims, self.replanner = spec, node, claims, replanner
        self.events = Events(spec.folder, node)
        self.members: dict[str, HostMember] = {}
        self.inbox: asyncio.Queue[tuple[str, Message]] = asyncio.Queue()
        known = filter(None, (claims.newest(), remembered))
        claim = max(known, key=lambda candidate: candidate.generation, default=None)
        self.claim: Claim | None = None
        """The claim of the generation that this leader formed last."""
        self.number = claim.generation if claim else 0
        self.last = claim.last if claim else None
        """Steps after which the job is done; known once the first generation has been formed."""
        self.previous = (
            {name for name in claim.members if name in claims.hosts()} if claim else set()
        )
        self.is_first = claim is None
        self.is_settled = True
        """True if the present hosts may continue, because the absent ones have had their time to
        join."""
        self.crashes: dict[str, int] = {}
        self.barren = 0
        self.why = "start" if claim is None else f"{claim.leader} no longer leads"

    async def admit(self, line: Line, hello: Message) -> None:
        """Admit a host, and receive its messages until it is lost."""
        host = AgentAddress(**hello["host"])
        member = HostMember(host, tuple(hello["devices"]), line, is_leaving=hello["leaving"])
        replaced = self.members.pop(host.name, None)
        if replaced is not None:
            replaced.line.abort()
            self.inbox.put_nowait(
                (host.name, {"kind": "lost", "why": "its agent was started again"})
            )
        self.members[host.name] = member
        self.inbox.put_nowait((host.name, {"kind": "joined"}))
        beating = asyncio.create_task(line.beat(self.spec.interval))
        try:
            while True:
                message = await line.receive(patience=self.spec.lost_after)
                if "answer" in message:
                    member.answers.put_nowait(message)
                elif message["kind"] != "beat":
                    self.inbox.put_nowait((host.name, message))
        except LostError as error:
            if self.members.get(host.name) is member:
                del self.members[host.name]
                self.inbox.put_nowait((host.name, {"kind": "lost", "why": str(error)}))
        finally:
            beating.cancel()

    async def lead(self) -> RunOutcome:
        """Form generations until one is done; raise a ``DeposedError`` if another host has taken
        over."""
        await self._gather()
        guard = asyncio.create_task(self._guard())
        try:
            while True:
                generation = await self._form()
                outcome = (
                    generation
                    if isinstance(generation, RunOutcome)
                    else await self._watch(generation)
                )
                if outcome is not None:
                    return await self._end(outcome)
        finally:
            guard.cancel()

    async def _end(self, outcome: RunOutcome) -> RunOutcome:
        """Write the outcome as soon as the folder can be written; present hosts get it in any
        case."""
        self.events.write("ended", message=outcome.message, exit_code=outcome.exit_code)
        deadline = time.monotonic() + self.spec.patience
        while True:
            try:
                self.claims.end(outcome)
                break
            except OSError:
                if time.monotonic() > deadline:
                    break
                await asyncio.sleep(self.spec.interval)
        self.tell_all({"kind": "done", "message": outcome.message, "exit_code": outcome.exit_code})
        return outcome

    async def _guard(self) -> None:
        """Write beats, and notice if this host no longer leads."""
        while True:
            newest = self.claims.newest()
            if self.claims.outcome() or (newest and newest.generation > self.number):
                self.inbox.put_nowait((self.node, {"kind": "deposed"}))
                return
            with contextlib.suppress(OSError):  # on a full disk no other host can claim either
                self.claims.restore(self.claim)
                self.claims.beat()
            await asyncio.sleep(self.spec.interval)

    async def _gather(self) -> None:
        """Wait for this host and those of the plan or of the previous generation; less than half of
        them wait longer, so that a larger part can lead."""
        expected = (set(self.replanner.hosts) if self.is_first else self.previous) | {self.node}
        patience = self.spec.gather if self.is_first else self.spec.lost_after
        begin = time.monotonic()
        while not expected <= self.members.keys():
            waited = time.monotonic() - begin
            if waited > (patience if self.is_first or self._is_enough() else 3 * patience):
                break
            await asyncio.sleep(0.05)

    def _is_enough(self) -> bool:
        """Return whether at least half of the previous generation is present; the rest may be on
        the other side of a cut link."""
        return 2 * len(self.previous & self.members.keys()) >= len(self.previous)

    async def _form(self) -> Generation | RunOutcome:
        """Form a generation by (1) to (5)."""
        began, is_waiting_logged = time.monotonic(), False
        while time.monotonic() - began < self.spec.wait:
            await self._stop()
            members = await self._connected()
            if self._has_unstopped() and time.monotonic() - began < self.spec.lost_after:
                continue  # a host that joined meanwhile may hold the only copies
            members = [name for name in members if self.members[name].is_stopped]
            if not self.is_settled and not self._is_enough():
                self.claims.release()
                raise DeposedError("this is the smaller part of the hosts")
            devices = self.devices(members)
            plan = await asyncio.to_thread(self.replanner.plan, devices) if devices else None
            if plan is None and not is_waiting_logged:
                self.events.write("waiting", hosts=members, why="no plan fits on these hosts")
                is_waiting_logged = True
            if plan is None:
                await asyncio.sleep(self.spec.interval)
                continue
            base = await asyncio.to_thread(newest_base, self.spec.folder, self._held(members))
            if base.is_lost and self.last is None:
                return RunOutcome(
                    message=f"no checkpoint is whole: {base.what_is_torn}",
                    exit_code=InputError.exit_code,
                )
            if all(name in self.members and self.members[name].is_stopped for name in members):
                try:
                    return self._start(plan, members, base)
                except OSError as error:
                    self.events.write(
                        "waiting", hosts=members, why=f"the run's folder cannot be written: {error}"
                    )
                    await asyncio.sleep(self.spec.interval)
        message = f"no plan fits on the present hosts, and no host joined for {self.spec.wait:g} s"
        return RunOutcome(message=message, exit_code=InfeasibleError.exit_code)

    async def _stop(self) -> None:
        """Stop all workers (1). Messages that arrived before are about the ended generation."""
        for member in self.members.values():
            member.is_stopped = False
        answers = await self._ask_all({"kind": "stop"})
        for name, answer in answers.items():
            member = self.members[name]
            member.headers = tuple(BlockHeader.of(content) for content in answer["headers"])
            member.free_port = answer["free_port"]
            member.is_stopped = True
        while not self.inbox.empty():
            name, message = self.inbox.get_nowait()
            self.note(name, message)

    def _has_unstopped(self) -> bool:
        """Return whether a host joined, or its agent was started again, after the others had been
        stopped."""
        return not all(member.is_stopped for member in self.members.values())

    async def _connected(self) -> list[str]:
        """Return the hosts of (2) after dismissing those that leave."""
        for member in [member for member in self.members.values() if member.is_leaving]:
            member.line.send({"kind": "dismissed"})
            self.previous.discard(member.host.name)
            del self.members[member.host.name]
        if self.node not in self.members:
            self.claims.release()
            raise DeposedError("this host leaves")
        names = await self.connected()
        for name in self.members.keys() - set(names):
            self.events.write("cut off", host=name)
        return names

    async def connected(self) -> list[str]:
        """Return hosts that all reach one another, in the order of the cluster: the host that
        misses most others is removed first, but never the leader."""
        hosts = [member.host for member in self.members.values()]
        places = [(host.name, host.address, host.port) for host in hosts]
        answers = await self._ask_all({"kind": "reach", "places": places})
        reached = {name: set(answer["reached"]) for name, answer in answers.items()}
        names = [name for name in self.replanner.order if name in reached]
        while True:
            missing = {
                name: sum(
                    peer not in reached[name] or name not in reached[peer]
                    for peer in names
                    if peer != name
                )
                for name in names
            }
            worst = max(
                (name for name in names if name != self.node), key=missing.__getitem__, default=None
            )
            if worst is None or not missing[worst]:
                return names
            names.remove(worst)

    def devices(self, members: Sequence[str]) -> list[str]:
        return [
            device
            for name in members
            for device in (self.members[name].devices if name in self.members else ())
            if self.crashes.get(device, 0) < _MOST_CRASHES
        ]

    def _held(self, members: list[str]) -> list[BlockSource]:
        """Return the copies that these hosts hold."""
        hosts = {name: self.members[name].host for name in members if name in self.members}
        return [
            BlockSource(address=host.address, port=host.port, header=header)
            for name, host in hosts.items()
            for header in self.members[name].headers
        ]

    def _start(self, plan: Plan, members: list[str], base: Base) -> Generation:
        """Start a generation (5) from the base that (3) found."""
        hosts = {name: self.members[name].host for name in members}
        last = self.spec.steps if self.last is None else self.last
        claim = Claim(
            generation=self.number + 1, leader=self.node, members=tuple(members), last=last
        )
        if not self.claims.claim(claim):
            why = f"generation {claim.generation} was claimed by another, or the job is over"
            raise DeposedError(why)
        self.claim, self.number, self.last = claim, claim.generation, last
        for path, tear in base.skipped:
            self.events.write("skipped", checkpoint=path.name, why=tear)
        if self.number == 1:  # an earlier run in this folder may have left lines
            forget_after(self.spec.folder, base.step)
        ranks = devices_by_rank(plan)
        by_rank = [self.replanner.host_of(device) for device in ranks]
        start = {
            "kind": "start",
            "generation": self.number,
            "plan": dumps_plan(plan),
            "ranks": ranks,
            "hosts": by_rank,
            "master": (hosts[by_rank[0]].address, self.members[by_rank[0]].free_port),
            "ring": [(name, host.address, host.port) for name, host in hosts.items()],
            "base": base.to_dict(),
            "last": self.last,
            "claim": asdict(claim),
        }
        self.tell_all(start, members)
        done = steps_told(self.spec.folder)
        self.events.write(
            "generation",
            generation=self.number,
            why=self.why,
            hosts=members,
            devices=list(ranks),
            plan=repr(plan),
            predicted_seconds=plan.predicted.iteration_seconds if plan.predicted else None,
            base=base.kind,
            step=base.step,
            repeats=[base.step, done - 1] if done > base.step else None,
        )
        self.previous, self.is_first, self.is_settled = set(members), False, False
        return Generation(number=self.number, plan=plan, members=tuple(members))

    def tell_all(self, message: Message, names: Collection[str] | None = None) -> None:
        for name, member in self.members.items():
            if names is None or name in names:
                member.line.send(message)

    async def _ask_all(self, message: Message) -> Mapping[str, Message]:
        """Send a message to all hosts; return the answer of every host that is still the same
        member. A host without an answer is lost."""
        asked = dict(self.members)
        serial = time.monotonic_ns()
        self.tell_all({**message, "serial": serial})
        answers = await asyncio.gather(*(self._answer(member, serial) for member in asked.values()))
        for name, answer in zip(asked, answers, strict=True):
            if answer is None:
                asked[name].line.abort()
        answered = {name: answer for name, answer in zip(asked, answers, strict=True) if answer}
        return {
            name: answer
            for name, answer in answered.items()
            if self.members.get(name) is asked[name]
        }

    async def _answer(self, member: HostMember, serial: int) -> Message | None:
        try:
            async with asyncio.timeout(self.spec.lost_after):
                while True:
                    answer = await member.answers.get()
                    if answer["answer"] == serial:
                        return answer
        except TimeoutError:
            return None

    def note(self, name: str, message: Message) -> None:
        """Log events that are reported at any time."""
        match message["kind"]:
            case "joined":
                self.events.write("joined", host=name)
            case "lost":
                self.events.write("lost", host=name, why=message["why"])
            case "leaving":
                self.events.write("leaving", host=name)
                if name in self.members:
                    self.members[name].is_leaving = True
            case "deposed":
                raise DeposedError("another leads")

    async def _watch(self, generation: Generation) -> RunOutcome | None:
        """Watch the generation until it ends; return the outcome of the job if it has ended."""
        watch = GenerationWatch(self, generation)
        outcome = await watch.run()
        self.barren = 0 if watch.has_stepped else self.barren + 1
        self.why = watch.why
        if outcome is None and self.barren >= _MOST_BARREN:
            message = (
                f"{self.barren} generations in a row ended before their first step, "
                f"the last because {self.why}"
            )
            return RunOutcome(message=message, exit_code=RunError.exit_code)
        return outcome
