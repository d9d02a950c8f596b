"""Run ``argosy probe``: measure this machine, a lab or a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from argosy.cli.command import given, picked, takes_options
from argosy.cli.inputs import ScenarioInputs, load_scenario, refuse_options
from argosy.cli.options import Json, Profiles, Quiet, no_nan
from argosy.cli.terminal import (
    STDOUT,
    check_output,
    needs,
    print_json,
    progress,
    stdout_console,
    tell,
    write_file,
)
from argosy.document import read_text
from argosy.errors import excluded, refused
from argosy.plan.file import read_plan
from argosy.units import RATE

if TYPE_CHECKING:
    from argosy.cluster.probe_notes import ProbeNotes


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """The options that ``argosy probe`` takes."""

    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The cluster file to write, instead of stdout (-)."),
    ] = None
    name: Annotated[str, typer.Option("--name", help="What the cluster is called in the file.")] = (
        "probed"
    )
    lab: Annotated[
        str | None, typer.Option("--lab", help="Measure the devices and links of a lab that is up.")
    ] = None
    run: Annotated[
        Path | None,
        typer.Option(
            "--run", help="Folder of a run: what its own traffic and computations showed."
        ),
    ] = None
    plan: Annotated[str | None, typer.Option("--plan", help="The plan that was run.")] = None
    profile: Profiles = None
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds", min=0.01, help="That each measurement takes, roughly.", callback=no_nan
        ),
    ] = 0.3
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on from what a probe with the same -o had measured when it was cut.",
        ),
    ] = False
    json: Json = False
    quiet: Quiet = False


@takes_options
def probe(options: ProbeOptions) -> None:
    """Measure devices and links, and write them as a cluster file.

    By itself it measures this machine's device; under torchrun, every rank's device and every link
    between ranks. With -o, measurements are kept in a file beside it until the probe is done. With
    --run nothing is measured again: the timeline of a run shows what its links carried and how fast
    its devices were.

    \b
    Example:
        argosy probe -o cluster.toml
        torchrun --nnodes 4 ... -m argosy probe -o cluster.toml
        argosy probe --run run --plan plan.json
    """
    if (options.run is None) != (options.plan is None):
        raise refused("--run needs --plan" if options.plan is None else "--plan needs --run")
    if options.run is not None and options.plan is not None:
        refuse_options(
            given(options, "output", "lab", "resume"),
            "cannot be combined with --run, which repeats no measurement",
        )
        _of_run(options.run, options.plan, options)
        return
    refuse_options(given(options, "profile"), "needs --run")
    _measure(options)


def _measure(options: ProbeOptions) -> None:
    """Measure, and write the cluster file."""
    from argosy.cluster.probe_notes import ProbeNotes, read_notes

    output = _checked_output(options)
    kept = None if output is None else output.with_name(output.name + ".partial.json")
    if options.lab is not None:
        with progress("measuring devices and links", quiet=options.quiet):
            text: str | None = _in_lab(options.lab, options.name, options.seconds)
        notes = ProbeNotes()
    else:
        earlier = read_text(kept) if options.resume and kept is not None and kept.exists() else ""
        notes = read_notes(earlier, kept)
        text = _here(options.name, notes, options.seconds, quiet=options.quiet)
    if text is None:  # another rank writes the file
        return
    if output is not None:
        write_file(output, text.encode())
    if kept is not None:
        kept.unlink(missing_ok=True)
    if options.json:
        file = None if output is None else str(output)
        print_json("probe", {"file": file, "cluster": text, **notes.parts()})
    elif output is None:
        typer.echo(text, nl=False)
    else:
        typer.echo(f"wrote {output}")


def _checked_output(options: ProbeOptions) -> Path | None:
    """Return the file to write; None for stdout."""
    output = options.output
    if output == STDOUT:
        check_output(output, json=options.json)
        output = None
    if options.resume and options.lab is not None:
        raise excluded("--resume", "--lab")
    if options.resume and output is None:
        raise refused("--resume needs --output with the file of the interrupted probe")
    if output is not None:
        check_output(output)
    return output


def _of_run(folder: Path, plan: str, options: ProbeOptions) -> None:
    """Print what a run showed, beside what its plan assumed."""
    from argosy.adapt.recorded import seen_in
    from argosy.report.marks import percent
    from argosy.report.tables import plain_table
    from argosy.runtime.processes.run_folder import TIMELINE
    from argosy.timeline.file import load_timeline

    scenario = load_scenario(read_plan(plan), picked(ScenarioInputs, options))
    timeline = load_timeline(folder / TIMELINE)
    seen = seen_in(timeline, scenario.plan, scenario.chain, scenario.cluster, scenario.model)
    if options.json:
        print_json("probe", {"bandwidths": seen.bandwidths, "speeds": seen.speeds})
        return
    planned_rates = {link.name: link.bandwidth.at(0) for link in scenario.cluster.links}
    links = plain_table("link", ">planned with", ">seen")
    for name, rate in seen.bandwidths.items():
        links.add_row(name, RATE.short(planned_rates[name]), RATE.short(rate))
    devices = plain_table("device", ">speed seen")
    for name, speed in seen.speeds.items():
        devices.add_row(name, percent(speed))
    console = stdout_console()
    console.print(links)
    console.print()
    console.print(devices)


def _here(name: str, notes: ProbeNotes, seconds: float, *, quiet: bool) -> str | None:
    """Measure this machine, or all ranks under torchrun; return None if another rank writes the
    file."""
    with needs("measuring needs torch", "torch"):
        from argosy.measure.probe_worker import measure
    return measure(
        name, notes, seconds=seconds, report=lambda text: tell(f"measuring {text}", quiet=quiet)
    )


def _in_lab(lab: str, name: str, seconds: float) -> str:
    """Measure the devices and links of a lab."""
    import sys
    import tempfile

    from argosy.lab.lab import open_lab

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.toml"
        worker = [
            sys.executable,
            "-m",
            "argosy.measure.probe_worker",
            name,
            str(seconds),
            str(path),
        ]
        open_lab(lab).run(worker, timeout=600)
        return path.read_text(encoding="utf-8")
