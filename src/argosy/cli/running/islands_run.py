"""Run an island plan: start the islands of this machine, restart those that end, show progress."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from argosy.cli.command import given
from argosy.cli.inputs import refuse_options
from argosy.cli.names import known_name
from argosy.cli.running.processes import POLL
from argosy.cli.terminal import print_json, stdout_console
from argosy.document import Document, JsonObject, make_folder
from argosy.errors import InputError, RunError, bad_input, excluded, refused
from argosy.units import TIME

if TYPE_CHECKING:
    from argosy.cli.running.run import RunOptions
    from argosy.plan.islands import IslandPlan
    from argosy.runtime.job.launch import Launch
    from argosy.runtime.processes.run_folder import Tail
    from argosy.runtime.processes.run_spec import RunSpec

# The address at which islands on this machine meet.
_LOOPBACK = "127.0.0.1"
# Seconds in which the process at which islands meet must be up.
_STORE_WAIT = 120.0


@dataclass
class _Island:
    """An island whose processes this command starts."""

    number: int
    launch: Launch
    log: Path
    progress: Tail
    exchanges: Tail
    process: subprocess.Popen[bytes] | None = None
    lost: int = 0
    """How often its processes ended before the run did."""


def run_islands(document: Document, options: RunOptions) -> None:
    """Start all islands on this machine or in a lab, or one island."""
    from argosy.cli.running.run_checks import check_init, check_torch
    from argosy.plan.islands_file import island_plan_from_document
    from argosy.runtime.processes.run_folder import keep_private

    spec = _spec(options)
    plan = island_plan_from_document(document)
    island = options.island
    lab = options.lab
    quiet = options.quiet
    node_rank = options.node_rank or 0
    numbers = _numbers(plan, spec, island, lab)
    place = (options.address, options.port)
    launches = [_launch(plan, spec, number, place, alone=island is None) for number in numbers]
    _check(plan, launches, node_rank, lab, quiet=quiet)
    if options.dry_run:
        _print_commands(launches, json=options.json)
        return
    check_init(spec)
    check_torch()
    keep_private()
    make_folder(spec.folder)
    if lab is not None:
        _run_in_lab(plan, spec, lab, quiet=quiet)
    else:
        with _meeting(spec, island, node_rank) as meeting:
            _run_here(launches, meeting, node_rank, options.restarts, quiet=quiet)
    figures = island_figures(spec.folder, numbers)
    if options.json:
        print_json("run", figures)
    else:
        _show(stdout_console(options.width), plan, figures)


def _spec(options: RunOptions) -> RunSpec:
    """Return the description of the run; raise ``InputError`` for options that do not apply."""
    common = options.common_spec()
    names = ("elastic", "node", "slurm", "metrics_port", "profile", "model", "copy_every")
    refuse_options(given(options, *names), "does not apply to an island plan")
    known_name("--adapt", options.adapt, ("off", "full"), "ways for an island plan to adapt")
    return replace(common, meeting=options.meeting, max_sync_every=options.max_sync_every)


def _numbers(plan: IslandPlan, spec: RunSpec, island: int | None, lab: str | None) -> list[int]:
    """Return the numbers of the islands to start."""
    if island is None:
        if spec.meeting is not None:
            raise refused("--meeting needs --island")
        return list(range(len(plan.islands)))
    if island >= len(plan.islands):
        raise bad_input(f"at most {len(plan.islands) - 1}, the last island", island, "--island")
    host, _, port = (spec.meeting or "").rpartition(":")
    if lab is not None:
        raise excluded("--island", "--lab")
    if not host or not port.isdecimal():
        raise refused("--island needs --meeting HOST:PORT, the address of island 0")
    return [island]


def _launch(
    plan: IslandPlan,
    spec: RunSpec,
    number: int,
    place: tuple[str | None, int | None],
    *,
    alone: bool,
) -> Launch:
    """Return the launch of one island; ``alone`` means that all of its nodes are this machine."""
    from argosy.runtime.islands.files import island_folder
    from argosy.runtime.job.launch import Launch

    own = replace(spec, island=number, out=str(island_folder(spec.folder, number)))
    address, port = (None, None) if alone else place
    return Launch(plan=plan.islands[number], spec=own, here=alone, address=address, port=port)


def _check(
    plan: IslandPlan, launches: list[Launch], node_rank: int, lab: str | None, *, quiet: bool
) -> None:
    """Raise ``InputError`` if the plan, a launch or the lab is not valid."""
    from argosy.cli.running.run_checks import check_folder_is_new, check_launch
    from argosy.lab.lab import open_lab
    from argosy.plan.islands_file import check_island_plan

    check_island_plan(plan)
    for launch in launches:
        spec = replace(launch.spec, adapt=type(launch.spec.adapt)("off"))
        check_launch(replace(launch, spec=spec), node_rank, quiet=quiet)
        if not launch.spec.resume:
            check_folder_is_new(launch.spec)
    if lab is not None:
        open_lab(lab)


def _print_commands(launches: list[Launch], *, json: bool) -> None:
    """Print the commands that start the islands."""
    from argosy.runtime.job.launch import commands
    from argosy.runtime.job.launch_script import dry_run

    if json:
        listed = [
            {
                "island": launch.spec.island,
                "node": node.name,
                "devices": node.devices,
                "command": text,
            }
            for launch in launches
            for node, text in commands(launch)
        ]
        print_json("run", {"commands": listed})
        return
    for launch in launches:
        typer.echo(f"# island {launch.spec.island}\n{dry_run(launch)}")


@contextlib.contextmanager
def _meeting(spec: RunSpec, island: int | None, node_rank: int) -> Iterator[str]:
    """Yield HOST:PORT at which leads meet.

    It is served here for all islands, or by island 0 for the others.
    """
    from argosy.cli.running.processes import end_process, start_process

    place = spec.meeting or f"{_LOOPBACK}:0"
    if island not in (None, 0) or node_rank:
        yield place
        return
    file = spec.folder / "meeting.port"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "argosy.runtime.islands.meeting", place, str(file)]
    with (spec.folder / "meeting.log").open("w") as log:
        process = start_process(command, log)
    try:
        until = time.monotonic() + _STORE_WAIT
        while not file.exists():
            if process.poll() is not None or time.monotonic() > until:
                raise RunError(
                    f"Cannot open {place} for islands to meet; {spec.folder}/meeting.log has more."
                )
            time.sleep(POLL)
        yield f"{place.rpartition(':')[0]}:{file.read_text()}"
    finally:
        end_process(process)


def _run_here(
    launches: list[Launch], meeting: str, node_rank: int, restarts: int, *, quiet: bool
) -> None:
    """Run until every island has ended; restart an island that fails while others continue."""
    from argosy.cli.running.processes import end_process, exit_at_sigterm
    from argosy.runtime.processes.run_folder import held

    islands = []
    with contextlib.ExitStack() as stack:
        for launch in launches:
            launch = replace(launch, spec=replace(launch.spec, meeting=meeting))
            launch.spec.folder.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(held(launch.spec.folder, str(node_rank)))
            islands.append((_prepared(launch), lock))
        stack.enter_context(exit_at_sigterm())
        try:
            for island, lock in islands:
                _start(island, node_rank, lock)
            while any(island.process is not None for island, _ in islands):
                for island, lock in islands:
                    _tell(island, quiet=quiet)
                    _look_after(island, node_rank, lock, restarts, quiet=quiet)
                time.sleep(POLL)
        finally:
            for island, _ in islands:
                if island.process is not None:
                    end_process(island.process)
    failed = [island for island, _ in islands if island.lost > restarts]
    if failed and len(failed) == len(islands):
        raise _error(failed[0])
    for island in failed:
        sys.stderr.write(
            f"warning: island {island.number} was lost {island.lost} times and left out\n"
        )


def _prepared(launch: Launch) -> _Island:
    """Return an island whose folder has only what it continues from."""
    from argosy.runtime.islands.files import EXCHANGES
    from argosy.runtime.processes.failure import clear_notes
    from argosy.runtime.processes.run_folder import PROGRESS, Tail, forget_after, steps_saved

    folder = launch.spec.folder
    clear_notes(folder)
    if not launch.spec.resume:
        (folder / EXCHANGES).unlink(missing_ok=True)
    forget_after(folder, steps_saved(folder) if launch.spec.resume else 0)
    progress, exchanges = (Tail(folder / name) for name in (PROGRESS, EXCHANGES))
    number = launch.spec.island or 0
    return _Island(number, launch, folder / "torchrun.log", progress, exchanges)


def _start(island: _Island, node_rank: int, lock: int) -> None:
    """Start the processes of an island."""
    from argosy.cli.running.processes import start_process
    from argosy.runtime.job.launch import command_line
    from argosy.runtime.processes.run_spec import RUN, dumps_run_spec

    spec = island.launch.spec
    file = spec.folder / RUN
    file.write_text(dumps_run_spec(spec), encoding="utf-8")
    with island.log.open("a") as log:
        island.process = start_process(command_line(island.launch, node_rank, file), log, lock)


def _look_after(island: _Island, node_rank: int, lock: int, restarts: int, *, quiet: bool) -> None:
    """Restart an island whose processes failed, unless its input was refused.

    It continues from its checkpoint and catches up with the others.
    """
    process = island.process
    if process is None or process.poll() is None:
        return
    island.process = None
    if process.returncode == 0:
        _tell(island, quiet=quiet)
        return
    error = _error(island)
    if error.exit_code == InputError.exit_code:
        raise error
    island.lost += 1
    if island.lost > restarts:
        return
    if not quiet:
        sys.stderr.write(f"island {island.number} ended and is started again\n")
    island.launch = replace(island.launch, spec=replace(island.launch.spec, resume=True))
    _start(island, node_rank, lock)


def _error(island: _Island) -> RunError:
    """Return the error of a failed island."""
    from argosy.runtime.processes.failure import verdict
    from argosy.runtime.processes.ranks import devices_by_rank

    spec = island.launch.spec
    printed = island.log.read_text(errors="replace")
    sentence, exit_code = verdict(spec.folder, printed, devices_by_rank(island.launch.plan))
    error = RunError(f"island {island.number}: {sentence}\nall output is in {island.log}")
    error.exit_code = exit_code
    return error


def _tell(island: _Island, *, quiet: bool) -> None:
    """Print new progress and events of an island on stderr."""
    for line in island.progress.read():
        if not quiet:
            took = TIME.format(line["seconds"])
            sys.stderr.write(
                f"island {island.number}: step {line['step']}  loss {line['loss']:.6g}  {took}\n"
            )
    for line in island.exchanges.read():
        if not quiet and (text := event_in_words(line)):
            sys.stderr.write(f"island {island.number}: {text}\n")


def event_in_words(line: JsonObject) -> str:
    """Return a line of ``exchanges.jsonl`` as text; empty for an exchange that went as planned."""
    if "generation" in line:
        names = ", ".join(map(str, line["islands"]))
        return f"islands {names} go on from step {line['step']}: {line['why']}"
    if "caught_up" in line:
        return f"caught up with island {line['from']} at step {line['caught_up']}"
    return ""


def _run_in_lab(plan: IslandPlan, spec: RunSpec, lab: str, *, quiet: bool) -> None:
    """Run all islands at once on the hosts of a lab."""
    from argosy.cli.running.processes import end_process, start_process
    from argosy.runtime.islands.files import island_folder
    from argosy.runtime.processes.ranks import devices_by_rank
    from argosy.runtime.processes.run_folder import held
    from argosy.runtime.processes.run_spec import RUN, dumps_run_spec

    devices = [device for island in plan.islands for device in devices_by_rank(island)]
    file = spec.folder / RUN
    file.write_text(dumps_run_spec(spec), encoding="utf-8")
    for number in range(len(plan.islands)):
        island_folder(spec.folder, number).mkdir(exist_ok=True)
    worker = [sys.executable, "-m", "argosy.runtime.islands.worker", str(file)]
    options = ["--clock", "ready", "--timeout", "inf", "--devices", ",".join(devices)]
    command = [sys.executable, "-m", "argosy", "lab", "run", lab, *options, "--", *worker]
    log = spec.folder / "lab.log"
    with held(spec.folder, "0") as lock, log.open("w") as output:
        process = start_process(command, output, lock)
        try:
            process.wait()
        finally:
            end_process(process)
    if process.returncode != 0:
        last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
        raise RunError(
            f"the run in lab {lab} failed: {' '.join(last)}; all output is in "
            f"{shlex.quote(str(log))}"
        )


def island_figures(folder: Path, numbers: list[int]) -> JsonObject:
    """Return the steps and losses of each island, and the exchanges that the first of them
    recorded."""
    from argosy.runtime.islands.files import EXCHANGES, island_folder
    from argosy.runtime.processes.run_folder import PROGRESS, read_lines

    islands = []
    for number in numbers:
        lines = read_lines(island_folder(folder, number) / PROGRESS)
        steps = {line["step"]: line for line in lines}
        islands.append(
            {
                "island": number,
                "steps": len(steps),
                "samples": sum(line["samples"] for line in steps.values()),
                "losses": [steps[step]["loss"] for step in sorted(steps)],
            }
        )
    exchange_lines = read_lines(island_folder(folder, numbers[0]) / EXCHANGES)
    return {
        "islands": islands,
        "exchanges": [line for line in exchange_lines if "exchange" in line],
    }


def _show(console: Any, plan: IslandPlan, figures: JsonObject) -> None:
    """Print the losses of the islands and the times of exchanges."""
    for island in figures["islands"]:
        if island["losses"]:
            first, last = island["losses"][0], island["losses"][-1]
            console.print(
                f"island {island['island']}: {island['steps']} steps, loss {first:.6g} -> "
                f"{last:.6g}"
            )
    seconds = sorted(line["seconds"] for line in figures["exchanges"])
    if seconds:
        text = (
            f"{len(seconds)} exchanges, {TIME.format(seconds[len(seconds) // 2])} each in the "
            "middle"
        )
        if plan.predicted is not None:
            text += f"; predicted {TIME.format(plan.predicted.exchange_seconds)}"
        console.print(text)
