"""``argosy run --elastic``: the agents of this machine's hosts, and what they tell."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argosy.runtime.elastic.job import Job
    from argosy.runtime.launch import Launch

_POLL = 0.05


def elastic_jobs(launch: Launch, *, node: str | None, copy_every: int, lost_after: float) -> list[Job]:
    """One for every host whose agent runs here."""
    from argosy.cluster.file import cluster_from_content
    from argosy.errors import bad_input, closest
    from argosy.plan.runnable import check_movable
    from argosy.runtime.elastic.job import Job
    from argosy.runtime.ranks import nodes_of

    check_movable(launch.plan)
    names = [one.name for one in cluster_from_content(launch.plan.cluster.content).nodes]
    if launch.here:
        here = [one.name for one in nodes_of(launch.plan)]
    elif node in names:
        here = [node]
    else:
        expected = f"the name of this node ({', '.join(names)}), or --here"
        raise bad_input(expected, node or "nothing", where="--node", suggestion=closest(node or "", names))
    address = launch.address or ("127.0.0.1" if launch.here else _own_address())
    job = Job(
        plan=launch.plan_file,
        program=launch.program,
        out=str(launch.folder),
        steps=launch.steps,
        node=here[0],
        address=address,
        model=launch.model,
        copy_every=copy_every,
        save_every=launch.save_every,
        lost_after=lost_after,
        patience=launch.patience,
        resume=launch.resume,
        init=launch.init,
        clip=launch.clip,
        seed=launch.seed,
        any_device=launch.any_device,
        adapt=launch.adapt,
        horizon=launch.horizon,
        min_gain=launch.min_gain,
        profile=launch.profiles,
    )
    return [replace(job, node=name) for name in here]


def _own_address() -> str:
    """Where this host's name leads."""
    from argosy.errors import bad_input

    name = socket.gethostname()
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        expected = f"where others reach this host, whose name {name} leads nowhere ({error})"
        raise bad_input(expected, where="--address") from None


def follow_elastic(jobs: Sequence[Job], *, show: Callable[[dict[str, Any]], str], quiet: bool) -> list[dict[str, Any]]:
    """Start the agents, show progress and events, and return the figures of every step as it was trained last."""
    from argosy.document import make_folder
    from argosy.runtime.elastic.folder import check_folder
    from argosy.runtime.folder import EVENTS, PROGRESS, Tail, held

    folder = jobs[0].folder
    make_folder(folder)
    with contextlib.ExitStack() as stack:  # each agent has its lock to itself: a node whose agent is lost may come back
        locks = [stack.enter_context(held(folder, job.node, elastic=True)) for job in jobs]
        check_folder(jobs[0])
        events, progress = Tail(folder / EVENTS), Tail(folder / PROGRESS)
        agents = [_start(job, lock) for job, lock in zip(jobs, locks, strict=True)]

    def tell_to_go(*_: object) -> None:
        for agent in agents:
            agent.terminate()

    asked = signal.signal(signal.SIGTERM, tell_to_go)
    try:
        ended = False
        while not ended:
            ended = all(agent.poll() is not None for agent in agents)
            for text in [*map(_event_line, events.read()), *map(show, progress.read())]:
                if text and not quiet:
                    sys.stderr.write(text + "\n")
            time.sleep(_POLL)
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.kill()
                agent.wait()
        signal.signal(signal.SIGTERM, asked)
    _judge(jobs, [agent.returncode for agent in agents])
    return list({line["step"]: line for line in progress.lines}.values())


def _start(job: Job, lock: int) -> subprocess.Popen[bytes]:
    from argosy.runtime.orphan import end_with_parent

    with _log(job).open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "argosy.runtime.elastic.agent", job.dumps()],
            stdout=log,
            stderr=log,
            pass_fds=(lock,),
            preexec_fn=end_with_parent,  # noqa: PLW1509 (there is one thread)
        )


def _log(job: Job) -> Path:
    return job.folder / f"agent-{job.node}.log"


def _judge(jobs: Sequence[Job], codes: Sequence[int]) -> None:
    """Raise where the job failed; where an agent did, but the job went on without it, all is well."""
    from argosy.errors import RunError
    from argosy.runtime.elastic.claims import Claims

    outcome = Claims(jobs[0].folder).outcome()
    failed = [job for job, code in zip(jobs, codes, strict=True) if code]
    if (outcome is not None and outcome.exit_code == 0) or not failed:
        return
    said = outcome.message if outcome is not None else _log(failed[0]).read_text(errors="replace").strip()
    error = RunError(f"{said or 'an agent was killed'}\nwhat agents and workers said is in {jobs[0].folder}/*.log")
    error.exit_code = outcome.exit_code if outcome is not None else RunError.exit_code
    raise error


def _event_line(event: dict[str, Any]) -> str:
    match event["event"]:
        case "generation":
            text = f"generation {event['generation']} ({event['why']}): {', '.join(event['devices'])}"
            text += f" from step {event['step']} ({event['base']})"
            repeats = event["repeats"]
            return text + (f", which repeats steps {repeats[0]} to {repeats[1]}" if repeats else "")
        case "lost":
            return f"lost {event['host']}: {event['why']}"
        case "failed":
            return f"{event['device']}: {event['message']}"
        case "joined" | "leaving" | "cut off":
            return f"{event['event']}: {event['host']}"
        case "waiting":
            return f"waiting for hosts: {event['why']}"
    return ""
