"""Run one agent per host: ``python -m argosy.runtime.elastic.agent RUN.json NODE ADDRESS``.

It starts the workers of its devices, holds copies of training state for its own workers and for
those of the previous host, and follows the leader. If no host leads, the first reachable host (in
the cluster's order) does. An agent ends with the job, ``grace`` seconds after SIGTERM, which it
reports to the leader, or when it is killed; its workers never outlive it. Needs no torch itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from typing import Any

from argosy.cluster.file import cluster_from_content
from argosy.cost.remembered import cost_model_of
from argosy.errors import ArgosyError, InputError, Problem, RunError
from argosy.plan.file import load_plan
from argosy.plan.plan import ModelRef, Plan
from argosy.runtime.elastic.claims import AgentAddress, Claim, Claims, RunOutcome
from argosy.runtime.elastic.copies import BlockHeader, Store
from argosy.runtime.elastic.events import Events
from argosy.runtime.elastic.leader import DeposedError, Leader
from argosy.runtime.elastic.replan import Replanner
from argosy.runtime.elastic.wire import Line, LostError, Message, Strangers, report_in_a_line
from argosy.runtime.elastic.workers import Workers
from argosy.runtime.job.agreement import differences, given_facts
from argosy.runtime.processes.interfaces import interface_settings
from argosy.runtime.processes.orphan import end_with_parent
from argosy.runtime.processes.run_folder import keep_private
from argosy.runtime.processes.run_spec import RunSpec, dumps_run_spec, read_run_spec
from argosy.workload.chain import Chain

LEFT = RunOutcome(message="this host has left the job, as requested", exit_code=0)
"""The outcome of an agent whose host has left."""


class Agent:
    """An agent that runs a host's part of an elastic job."""

    def __init__(self, spec: RunSpec, node: str, address: str) -> None:
        """Prepare an agent; ``node`` is the host's name in the plan's cluster, ``address`` the one
        at which other hosts reach it."""
        self.spec, self.node, self.address = spec, node, address
        plan = load_plan(spec.plan)
        self.facts = given_facts(spec, plan, elastic=True)
        self.replanner = replanner_of(spec, plan)
        known = next(known for known in self.replanner.cluster.nodes if known.name == node)
        self.devices = known.devices
        self.interface = None if known.machine is None else known.machine.interface
        self.claims = Claims(spec.folder)
        try:
            self.token = self.claims.token()
        except OSError as error:
            raise RunError(f"the run's folder cannot be written: {error}") from None
        self.store = Store()
        self.workers = Workers(self._report, len(self.devices))
        self.leader: Leader | None = None
        self.upward: Line | None = None
        """The connection to the leader."""
        self.generation = 0
        self.remembered: Claim | None = None
        """The newest generation that this host was in, in case the run's folder is lost."""
        self.left = asyncio.Event()
        self.is_leaving = False

    async def run(self) -> RunOutcome:
        """Take part until the job is over, or this host has left it."""
        server = await self.listen()
        self.here = AgentAddress(
            name=self.node, address=self.address, port=server.sockets[0].getsockname()[1]
        )
        with contextlib.suppress(OSError):  # on a full disk it is written later
            self.claims.register(self.here)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._leave)
        await self.workers.prepare()
        taking_part = asyncio.create_task(self._take_part())
        leaving = asyncio.create_task(self.left.wait())
        staying = asyncio.create_task(self._stay_registered())
        try:
            await asyncio.wait({taking_part, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return taking_part.result() if taking_part.done() else LEFT
        finally:
            taking_part.cancel()
            leaving.cancel()
            staying.cancel()
            await self.workers.kill()
            server.close()
            if self.claims.outcome():
                # An agent that came late may have written files after the last leader cleared them.
                self.claims.clear()
            else:
                self.claims.unregister(self.node)

    async def listen(self) -> asyncio.Server:
        self.strangers = Strangers()
        asyncio.get_running_loop().set_exception_handler(report_in_a_line)
        return await asyncio.start_server(self._serve, self.address, 0)

    async def _stay_registered(self) -> None:
        """Write this host's address again if its file was removed."""
        while True:
            await asyncio.sleep(self.spec.lost_after)
            if self.claims.outcome() is None and self.node not in self.claims.hosts():
                with contextlib.suppress(OSError):
                    self.claims.register(self.here)

    def _leave(self) -> None:
        """Handle the notice that this host will be taken away."""
        self.is_leaving = True
        asyncio.get_running_loop().call_later(self.spec.grace, self.left.set)
        if self.upward is not None:
            self.upward.send({"kind": "leaving"})
        else:
            self.left.set()

    async def _take_part(self) -> RunOutcome:
        """Follow the leader, or lead, until the job is over."""
        while True:
            outcome = self.claims.outcome()
            if outcome is None:
                line = await self._find_leader()
                if line is not None:
                    outcome = await self._follow(line)
                elif self.is_leaving:
                    return LEFT
                elif await self._is_first():
                    outcome = await self._lead()
            if outcome is not None:
                return outcome
            await asyncio.sleep(self.spec.interval)

    async def _find_leader(self) -> Line | None:
        """Return a connection to the leader: the host of the newest claim, or, if that is silent,
        any reachable host, since one may lead without having claimed a generation yet."""
        claim, hosts = self.claims.newest(), self.claims.hosts()
        candidates = [claim.leader] if claim is not None else []
        if self._is_vacant():
            candidates += await self._reaches(
                [hosts[name] for name in self.replanner.order if name in hosts]
            )
        for name in candidates:
            line = await self._join(hosts[name]) if name in hosts and name != self.node else None
            if line is not None:
                return line
        return None

    def _is_vacant(self) -> bool:
        """Return whether no host leads according to the run's folder."""
        return self.claims.newest() is None or self.claims.silence() > self.spec.lost_after

    def _earlier(self) -> list[str]:
        return self.replanner.order[: self.replanner.order.index(self.node)]

    async def _is_first(self) -> bool:
        """Return whether this host must lead: no other does, and no earlier host can be reached."""
        hosts = self.claims.hosts()
        return self._is_vacant() and not await self._reaches(
            [hosts[name] for name in self._earlier() if name in hosts]
        )

    async def _join(self, host: AgentAddress) -> Line | None:
        """Join a host as a follower; return None if it cannot be reached or does not lead."""
        about = {"devices": self.devices, "leaving": self.is_leaving, "facts": self.facts}
        hello = {"kind": "join", "host": vars(self.here), **about}
        try:
            patience = self.spec.lost_after / 2
            line = await Line.open(host.address, host.port, self.token, hello, patience=patience)
            answer = await line.receive(patience=patience)
        except LostError:
            return None
        if answer["kind"] == "refused":
            raise InputError([Problem(**problem) for problem in answer["problems"]])
        if answer["kind"] == "no":
            line.close()
            return None
        return line

    async def _reaches(self, hosts: list[AgentAddress]) -> list[str]:
        """Return the names of the hosts that answer."""
        answers = await asyncio.gather(*map(self._ping, hosts))
        return [host.name for host, answer in zip(hosts, answers, strict=True) if answer]

    async def _ping(self, host: AgentAddress) -> bool:
        try:
            patience = self.spec.lost_after / 3
            line = await Line.open(
                host.address, host.port, self.token, {"kind": "ping"}, patience=patience
            )
            await line.receive(patience=patience)
        except LostError:
            return False
        line.close()
        return True

    async def _lead(self) -> RunOutcome | None:
        """Lead, and follow ourselves; return None if another host must lead."""
        self.leader = Leader(self.spec, self.node, self.claims, self.replanner, self.remembered)
        leading = asyncio.create_task(self.leader.lead())
        line = await self._join(self.here)
        following = asyncio.create_task(self._follow(line)) if line else leading
        try:
            await asyncio.wait({leading, following}, return_when=asyncio.FIRST_COMPLETED)
            return await leading if leading.done() else None
        except DeposedError as error:
            Events(self.spec.folder, self.node).write("deposed", why=str(error))
            return None
        finally:
            for task in (leading, following):
                task.cancel()
            members, self.leader = self.leader.members, None
            for member in members.values():
                member.line.close()
            await asyncio.gather(leading, following, return_exceptions=True)

    async def _follow(self, line: Line) -> RunOutcome | None:
        """Follow the leader's messages until the job is over; return None if the leader is lost."""
        self.upward = line
        beating = asyncio.create_task(line.beat(self.spec.interval))
        try:
            while True:
                outcome = await self._obey(line, await line.receive(patience=self.spec.lost_after))
                if outcome is not None:
                    return outcome
        except LostError:
            return None
        finally:
            self.upward = None
            beating.cancel()
            line.close()
            await self.workers.kill()

    async def _obey(self, line: Line, message: Message) -> RunOutcome | None:
        match message["kind"]:
            case "start":
                await self._start(message)
            case "pause" if message["generation"] == self.generation:
                self.workers.pause(save=message["save"])
            case "stop":
                await self.workers.kill()
                headers = [header.to_dict() for header in self.store.headers()]
                line.send(
                    {
                        "answer": message["serial"],
                        "headers": headers,
                        "free_port": self._free_port(),
                    }
                )
            case "reach":
                hosts = [
                    AgentAddress(name=name, address=address, port=port)
                    for name, address, port in message["places"]
                ]
                line.send({"answer": message["serial"], "reached": await self._reaches(hosts)})
            case "dismissed":
                return LEFT
            case "done":
                return RunOutcome(message=message["message"], exit_code=message["exit_code"])
        return None

    async def _start(self, message: Message) -> None:
        """Start this host's workers of a generation."""
        self.generation = message["generation"]
        self.remembered = Claim(
            **{**message["claim"], "members": tuple(message["claim"]["members"])}
        )
        base = message["base"]
        self.store.keep_only(None if base["moment"] is None else tuple(base["moment"]))
        names = [name for name, _, _ in message["ring"]]
        following = message["ring"][(names.index(self.node) + 1) % len(names)]
        common = {
            "run": dumps_run_spec(self.spec),
            "plan": message["plan"],
            "generation": self.generation,
            "last": message["last"],
            "base": base,
            "hosts": message["hosts"],
            "near": (self.here.address, self.here.port),
            "far": None if len(names) == 1 else following[1:],
            "token": self.token,
        }
        own = [device for device in message["ranks"] if device in self.devices]
        for local, device in enumerate(own):
            rank = message["ranks"].index(device)
            environment = {
                **interface_settings(self.interface),
                "RANK": str(rank),
                "WORLD_SIZE": str(len(message["ranks"])),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(len(own)),
                "MASTER_ADDR": message["master"][0],
                "MASTER_PORT": str(message["master"][1]),
            }
            log = str(self.spec.folder / f"worker-{device}.log")
            await self.workers.start(
                device, {**common, "rank": rank, "environment": environment, "log": log}
            )

    def _free_port(self) -> int:
        with socket.socket() as probe:
            probe.bind((self.here.address, 0))
            port: int = probe.getsockname()[1]
        return port

    def _report(self, device: str, message: dict[str, Any]) -> None:
        if self.upward is not None:
            self.upward.send({**message, "device": device, "generation": self.generation})

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection: of a host that joins, or of a worker that sends or reads a copy."""
        line = Line(reader, writer)
        try:
            with self.strangers.among(writer):
                if not await line.opens_with(self.token, patience=self.spec.lost_after):
                    return
            hello = await line.receive(patience=self.spec.lost_after)
            match hello["kind"]:
                case "join" if self.leader is not None:
                    name = hello["host"]["name"]
                    problems = differences([self.facts, hello["facts"]], [self.node, name])
                    if problems:
                        self.leader.events.write(
                            "refused", host=name, why="; ".join(map(str, problems))
                        )
                        line.send(
                            {"kind": "refused", "problems": [vars(problem) for problem in problems]}
                        )
                    else:
                        line.send({"kind": "welcome"})
                        await self.leader.admit(line, hello)
                case "join":
                    line.send({"kind": "no"})
                case "ping":
                    line.send({"kind": "here"})
                case "put":
                    received = await line.receive_block(hello["size"])
                    keep_from = tuple(hello["keep_from"])
                    self.store.put(BlockHeader.of(hello["header"]), received, keep_from=keep_from)
                    line.send({"kind": "kept"})
                case "get":
                    moment = tuple(hello["moment"])
                    for begin, end in hello["ranges"]:
                        block = self.store.get(moment, hello["rank"], begin, end)
                        await line.send_block(block, patience=self.spec.lost_after)
        except (LostError, KeyError, asyncio.CancelledError):
            pass  # the peer has gone, or the block is no longer held, or this agent ends
        finally:
            await line.end(patience=self.spec.lost_after)


def replanner_of(spec: RunSpec, plan: Plan) -> Replanner:
    """Make the planner of later generations, with the cost model of the first plan."""
    costs, chain = cost_model_of(plan, spec.profiles), _chain(spec, plan.model)
    return Replanner(
        first=plan,
        cluster=costs.cluster(cluster_from_content(plan.cluster.content)),
        chain=None if chain is None else costs.chain(chain),
        model=costs.compute_model,
        is_compiled=spec.compile_stages,
    )


def _chain(spec: RunSpec, model: ModelRef) -> Chain | None:
    """Return the model's costs, or None if they cannot be found."""
    try:
        return spec.chain(model)
    except ArgosyError:
        if spec.model is not None:
            raise
        return None


def main(values: list[str]) -> int:
    end_with_parent()
    keep_private()
    try:
        file, node, address = values
        spec = read_run_spec(file)
        spec.folder.mkdir(parents=True, exist_ok=True)
        outcome = asyncio.run(_run(spec, node, address))
    except ArgosyError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    if outcome.exit_code:
        sys.stderr.write(f"{outcome.message}\n")
    return outcome.exit_code


async def _run(spec: RunSpec, node: str, address: str) -> RunOutcome:
    return Claims(spec.folder).outcome() or await Agent(spec, node, address).run()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
