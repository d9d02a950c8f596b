"""Run ``argosy run --elastic``: start the agents of this machine's hosts, and show their events."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from argosy.cli.running.processes import POLL, start_process
from argosy.cli.running.run_checks import warn_of_other_options, warning_line
from argosy.document import JsonObject, make_folder
from argosy.errors import RunError, bad_input, closest, impossible
from argosy.plan.runnable import check_movable

if TYPE_CHECKING:
    from argosy.runtime.job.launch import Launch


def _nodes_here(launch: Launch, node: str | None) -> list[str]:
    """Return the hosts whose agents run on this machine.

    These are all hosts, the named one, or the one with this machine's name.
    """
    from argosy.runtime.job.launch import own_host
    from argosy.runtime.processes.ranks import nodes_of

    if launch.here:
        return [cluster_node.name for cluster_node in nodes_of(launch.plan)]
    nodes = launch.cluster_nodes
    if node is None:
        machines = {
            cluster_node.machine.name: cluster_node.name
            for cluster_node in nodes.values()
            if cluster_node.machine is not None
        }
        own = own_host(list(machines))
        node = None if own is None else machines[own]
    if node in nodes:
        return [node]
    expected = f"the name of this node ({', '.join(nodes)}), or --here"
    raise bad_input(expected, node or "nothing", "--node", suggestion=closest(node or "", nodes))


def _stated_address(launch: Launch, node: str) -> str | None:
    """Return the address of a node in the cluster file; None if there is none."""
    machine = launch.cluster_nodes[node].machine
    return None if machine is None else machine.address


def _own_address() -> str:
    """Return the address to which this host's name resolves."""
    name = socket.gethostname()
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        reason = f"the name {name} cannot be resolved ({error})"
        raise impossible("find the address of this host", reason, "--address") from None


def follow_elastic(
    launch: Launch, node: str | None, *, show: Callable[[JsonObject], str], quiet: bool
) -> list[JsonObject]:
    """Start the agents, show progress and events, and return the figures of every step.

    If a step was trained several times, the last time counts. ``node`` names this machine's host,
    unless all hosts of the plan are on this machine.
    """
    from argosy.runtime.elastic.folder import check_folder
    from argosy.runtime.processes.run_folder import EVENTS, PROGRESS, Tail, held, keep_private
    from argosy.runtime.processes.run_spec import RUN, dumps_run_spec

    check_movable(launch.plan)
    keep_private()
    folder, nodes = launch.spec.folder, _nodes_here(launch, node)
    address = "127.0.0.1" if launch.here else None
    address = launch.address or address or _stated_address(launch, nodes[0]) or _own_address()
    make_folder(folder)
    spec_file = folder / (RUN if launch.here else f"run-{nodes[0]}.json")
    # Each agent has its own lock, because a node whose agent is lost may come back.
    with contextlib.ExitStack() as stack:
        locks = [stack.enter_context(held(folder, name, elastic=True)) for name in nodes]
        check_folder(launch.spec)
        warn_of_other_options(launch.spec, spec_file)
        spec_file.write_text(dumps_run_spec(launch.spec), encoding="utf-8")
        events, progress = Tail(folder / EVENTS), Tail(folder / PROGRESS)
        logs = [folder / f"agent-{name}.log" for name in nodes]
        agents = [
            _start_agent([str(spec_file), name, address], log, lock)
            for name, log, lock in zip(nodes, logs, locks, strict=True)
        ]

    def print_news() -> None:
        """Print new events and progress on stderr."""
        for text in [*map(_event_line, events.read()), *map(show, progress.read())]:
            if text and not quiet:
                sys.stderr.write(text + "\n")

    _wait_for(agents, print_news)
    _judge(folder, [log for log, agent in zip(logs, agents, strict=True) if agent.returncode])
    return list({line["step"]: line for line in progress.lines}.values())


def _wait_for(agents: Sequence[subprocess.Popen[bytes]], print_news: Callable[[], None]) -> None:
    """Wait until all agents have ended; SIGTERM terminates them, an error kills them."""

    def terminate_all(*_: object) -> None:
        for agent in agents:
            agent.terminate()

    previous_handler = signal.signal(signal.SIGTERM, terminate_all)
    try:
        ended = False
        while not ended:
            ended = all(agent.poll() is not None for agent in agents)
            print_news()
            time.sleep(POLL)
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.kill()
                agent.wait()
        signal.signal(signal.SIGTERM, previous_handler)


def _start_agent(arguments: list[str], log: Path, lock: int) -> subprocess.Popen[bytes]:
    """Start the agent of a host."""
    command = [sys.executable, "-m", "argosy.runtime.elastic.agent", *arguments]
    with log.open("w") as file:
        return start_process(command, file, lock)


def _judge(folder: Path, failed: Sequence[Path]) -> None:
    """Raise ``RunError`` if the job failed; an agent may fail while the job continues without it.

    ``failed`` are the logs of the failed agents.
    """
    from argosy.runtime.elastic.claims import Claims

    outcome = Claims(folder).outcome()
    if (outcome is not None and outcome.exit_code == 0) or not failed:
        return
    message = (
        outcome.message if outcome is not None else failed[0].read_text(errors="replace").strip()
    )
    error = RunError(
        f"{message or 'an agent was killed'}\nwhat agents and workers said is in {folder}/*.log"
    )
    error.exit_code = outcome.exit_code if outcome is not None else RunError.exit_code
    raise error


def _event_line(event: JsonObject) -> str:
    """Return an event as a line of text; empty if it is not shown."""
    match event["event"]:
        case "generation":
            text = (
                f"generation {event['generation']} ({event['why']}): {', '.join(event['devices'])}"
            )
            text += f" from step {event['step']} ({event['base']})"
            repeats = event["repeats"]
            return text + (f", which repeats steps {repeats[0]} to {repeats[1]}" if repeats else "")
        case "lost" | "refused":
            return f"{event['event']} {event['host']}: {event['why']}"
        case "failed":
            return f"{event['device']}: {event['message']}"
        case "joined" | "leaving" | "cut off":
            return f"{event['event']}: {event['host']}"
        case "waiting":
            return f"waiting for hosts: {event['why']}"
        case "skipped" | "not written":
            return warning_line(event)
    return ""
