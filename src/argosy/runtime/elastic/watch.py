"""Watch one generation from its start to its end, for its leader. Needs no torch."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from argosy.plan.plan import Plan
from argosy.runtime.elastic.claims import RunOutcome
from argosy.runtime.elastic.wire import Message

if TYPE_CHECKING:
    from argosy.runtime.elastic.leader import Leader

# Seconds in which other workers may report that they caused a failure.
_AFTERMATH = 1.0
# Multiples of ``RunSpec.lost_after`` after which present but unused hosts are considered again.
_ASIDE = 5


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A generation that runs."""

    number: int
    plan: Plan
    members: tuple[str, ...]
    """Hosts, including those that the plan does not use."""


class GenerationWatch:
    """A watch that receives events and decides when the generation ends and why."""

    def __init__(self, leader: Leader, generation: Generation) -> None:
        self.leader, self.generation, self.spec = leader, generation, leader.spec
        self.running = set(generation.plan.devices)
        self.hosts = {leader.replanner.host_of(device) for device in generation.plan.devices}
        self.has_stepped = False
        self.why = ""
        """The reason why the generation ended."""
        self.is_pausing = False
        self.deadline = time.monotonic() + self._longest
        self.planning: set[asyncio.Task[None]] = set()

    @property
    def _longest(self) -> float:
        """Return the longest seconds without progress: more than a worker itself waits for
        another."""
        return self.spec.patience + 2 * self.spec.lost_after

    async def run(self) -> RunOutcome | None:
        self.planning.add(asyncio.create_task(self._look_aside()))
        try:
            while self.running:
                async with asyncio.timeout_at(
                    asyncio.get_running_loop().time() + self.deadline - time.monotonic()
                ):
                    name, message = await self.leader.inbox.get()
                self.leader.note(name, message)
                outcome = self._take(name, message)
                if outcome is not None:
                    return outcome
        except TimeoutError:
            self.why = self.why or f"nothing happened for {self._longest:g} s"
        finally:
            for task in self.planning:
                task.cancel()
        return None

    def _take(self, name: str, message: Message) -> RunOutcome | None:
        match message["kind"]:
            case "ready" | "step":
                if message["kind"] == "step":
                    self.has_stepped = True
                    self.leader.crashes.clear()
                if not self.why:
                    self.deadline = time.monotonic() + self._longest
            case "lost" if name in self.hosts:
                self._break(f"{name} was lost: {message['why']}")
            case "lost" if name in self.generation.members:
                self._pause(f"{name}, which held copies, was lost")
            case "leaving":  # other hosts may get notice at the same time
                asyncio.get_running_loop().call_later(
                    self.spec.interval, self._pause, f"{name} leaves"
                )
            case "joined" if name not in self.generation.members:
                self._consider()
            case "planned":
                self._pause(f"{', '.join(message['hosts'])} came")
            case "ending" if message["generation"] == self.generation.number:
                return self._ended(name, message)
        return None

    def _ended(self, name: str, message: Message) -> RunOutcome | None:
        device, how = message["device"], message["how"]
        self.running.discard(device)
        if how == "finished":
            return RunOutcome(message=f"{message['step']} steps done", exit_code=0)
        if how == "failed":
            return RunOutcome(
                message=f"{device}: {message['message']}", exit_code=message["exit_code"]
            )
        if how == "killed":
            self.leader.crashes[device] = self.leader.crashes.get(device, 0) + 1
        if how != "paused":
            self.leader.events.write("failed", device=device, how=how, message=message["message"])
            self._break(
                f"{device} {message['message']}"
                if how == "killed"
                else f"{device}: {message['message']}"
            )
        return None

    def _break(self, why: str) -> None:
        """End the generation almost at once, after others had time to report that they caused
        it."""
        self.why = self.why if self.why and not self.is_pausing else why
        self.deadline = min(self.deadline, time.monotonic() + _AFTERMATH)

    def _pause(self, why: str) -> None:
        """End the generation at the next step; with a checkpoint if no host would hold copies any
        longer."""
        if not self.why:
            self.why, self.is_pausing = why, True
            self.deadline = time.monotonic() + self._longest
            self.leader.events.write("pausing", why=why)
            save = all(member.is_leaving for member in self.leader.members.values())
            self.leader.tell_all(
                {"kind": "pause", "generation": self.generation.number, "save": save}
            )

    def _consider(self) -> None:
        """Plan with hosts that are not used, while training continues."""
        task = asyncio.create_task(self._plan_wider())
        self.planning.add(task)
        task.add_done_callback(self.planning.discard)

    async def _plan_wider(self) -> None:
        leader, now = self.leader, self.generation.plan
        reached = await leader.connected()
        if self.hosts <= set(reached):
            plan = await asyncio.to_thread(leader.replanner.plan, leader.devices(reached))
            if (
                plan is not None
                and not set(plan.devices) <= set(now.devices)
                and _is_faster(plan, now)
            ):
                came = {leader.replanner.host_of(device) for device in plan.devices} - self.hosts
                leader.inbox.put_nowait((leader.node, {"kind": "planned", "hosts": sorted(came)}))

    async def _look_aside(self) -> None:
        while True:
            await asyncio.sleep(_ASIDE * self.spec.lost_after)
            if self.leader.members.keys() - set(self.generation.members):
                await self._plan_wider()


def _is_faster(plan: Plan, current: Plan) -> bool:
    """Return whether a plan is faster; without predictions more devices are assumed to be
    better."""
    if plan.predicted is None or current.predicted is None:
        return True
    return plan.predicted.iteration_seconds < current.predicted.iteration_seconds
