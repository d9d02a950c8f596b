"""Run ``argosy lab up | run | card | change | show | down``: emulate a cluster on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from argosy.cli.inputs import parse_rate
from argosy.cli.names import known_name
from argosy.cli.options import Json, Quiet, no_nan
from argosy.cli.terminal import print_json
from argosy.cluster.file import load_cluster
from argosy.errors import bad_input

if TYPE_CHECKING:
    from argosy.lab.lab import Lab

lab_app = typer.Typer(
    help="Emulate a cluster on this machine.", no_args_is_help=True, rich_markup_mode=None
)

LabName = Annotated[
    str, typer.Argument(metavar="LAB", help="A lab that is up.", show_default=False)
]
Timeout = Annotated[
    float,
    typer.Option("--timeout", help="Seconds after which everything is ended.", callback=no_nan),
]


@lab_app.command()
def up(
    source: Annotated[
        str,
        typer.Argument(
            metavar="CLUSTER", help="A cluster.toml, or a bundled name.", show_default=False
        ),
    ],
    name: Annotated[
        str | None, typer.Option("--name", help="What to call it; by default as its cluster.")
    ] = None,
    no_shares: Annotated[
        bool, typer.Option("--no-shares", help="Let every device have what core time it gets.")
    ] = False,
    json: Json = False,
) -> None:
    """Build a lab of a cluster file.

    A host for every node, a shaped cable for every link, a share of a core for every device.

    \b
    Example:
        argosy lab up cluster.toml --name trial
    """
    from argosy.lab.lab import Lab
    from argosy.lab.layout import not_emulated

    cluster = load_cluster(source)
    lab = Lab(cluster, name=name or cluster.name[:20], shares=not no_shares)
    lab.up()
    missing = not_emulated(cluster)
    if json:
        print_json("lab up", {**_described(lab), "not_emulated": list(missing)})
        return
    typer.echo(f"lab {lab.name} is up: {cluster!r}")
    for host in lab.layout.hosts:
        shares = ", ".join(
            device if no_shares else f"{device} ({100 * lab.share_of(device):.0f} % of a core)"
            for device in host.devices
        )
        typer.echo(f"  {host.name}  {host.address}  {shares}")
    for note in missing:
        typer.echo(f"  not emulated: {note}")


@lab_app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    context: typer.Context,
    name: LabName,
    timeout: Timeout = 3600.0,
    clock: Annotated[
        str,
        typer.Option(
            "--clock", help="The traces begin at the launch, or when the program says it is ready."
        ),
    ] = "launch",
    devices: Annotated[
        str | None,
        typer.Option(
            "--devices", help="Those to run on, in the order of their ranks; by default all."
        ),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Run a command once per device of a lab.

    The command gets torchrun's environment. Its lines are shown after the device's name. If one
    device fails, the others are ended and the exit code is 4.

    \b
    Example:
        argosy lab run trial -- python train.py
    """
    import sys

    from argosy.lab.lab import LabClock, open_lab

    command = _command(context)
    began = LabClock(known_name("--clock", clock, LabClock))
    lab = open_lab(name)
    names = None if devices is None else devices.split(",")
    lab.run(
        command, devices=names, timeout=timeout, clock=began, echo=None if quiet else sys.stdout
    )


@lab_app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def card(
    context: typer.Context,
    source: Annotated[
        str, typer.Argument(metavar="CLUSTER", help="A cluster file.", show_default=False)
    ],
    timeout: Timeout = 3600.0,
) -> None:
    """Run a command once per device, all on one NVIDIA card in shares.

    Each device of the cluster file gets a share of the card's multiprocessors in proportion to its
    speed.

    \b
    Example:
        argosy lab card unequal.toml -- python train.py
    """
    from argosy.lab.card import SharedCard, shares_of

    command = _command(context)
    with SharedCard(shares_of(load_cluster(source))) as shared:
        job = shared.run(command, timeout=timeout)
    for device, lines in job.output.items():
        for line in lines:
            typer.echo(f"{device}: {line}")


@lab_app.command()
def change(
    name: LabName,
    what: Annotated[
        str,
        typer.Argument(
            help="An edge such as v0.nic, or a device such as v0.1.", show_default=False
        ),
    ],
    value: Annotated[
        str,
        typer.Argument(help='A bandwidth such as "20 Mbit/s", or a speed such as 0.5; 0 is down.'),
    ],
    json: Json = False,
) -> None:
    """Change a link's bandwidth or a device's speed while jobs run.

    \b
    Example:
        argosy lab change trial h1.nic "20 Mbit/s"
    """
    from argosy.lab.lab import open_lab

    lab = open_lab(name)
    is_device = what in lab.cluster.device_index
    changed = _speed(value) if is_device else 0.0 if value == "0" else parse_rate("VALUE", value)
    lab.change(what, changed)
    if json:
        print_json(
            "lab change",
            {"lab": lab.name, "what": what, "speed" if is_device else "bytes_per_second": changed},
        )


@lab_app.command()
def show(json: Json = False) -> None:
    """List the labs that are up on this machine.

    \b
    Example:
        argosy lab show
    """
    from argosy.lab.lab import open_lab
    from argosy.lab.record import records

    labs = [open_lab(record.name) for record in records()]
    if json:
        print_json("lab show", {"labs": [_described(lab) for lab in labs]})
        return
    for lab in labs:
        typer.echo(f"{lab.name}  {lab.cluster!r}")
    if not labs:
        typer.echo("no lab is up")


@lab_app.command()
def down(
    name: Annotated[
        str | None, typer.Argument(metavar="LAB", help="A lab that is up; without one, all.")
    ] = None,
    json: Json = False,
) -> None:
    """Remove a lab, or all, with whatever runs in them.

    \b
    Example:
        argosy lab down trial
    """
    from argosy.lab import lab as labs
    from argosy.lab.record import records

    names = [record.name for record in records()] if name is None else [labs.open_lab(name).name]
    for lab_name in names:
        labs.down(lab_name)
    if json:
        print_json("lab down", {"labs": names})
        return
    for lab_name in names:
        typer.echo(f"lab {lab_name} is down")
    if not names:
        typer.echo("no lab is up")


def _command(context: typer.Context) -> list[str]:
    """Return the command that follows the options, with or without ``--`` before it."""
    command = [word for at, word in enumerate(context.args) if at or word != "--"]
    if not command:
        raise bad_input("a command after --", where="COMMAND")
    return command


def _described(lab: Lab) -> dict[str, object]:
    """Return a lab as a dict for JSON."""
    return {
        "name": lab.name,
        "cluster": lab.cluster.name,
        "hosts": [
            {"name": host.name, "address": host.address, "devices": host.devices}
            for host in lab.layout.hosts
        ],
    }


def _speed(text: str) -> float:
    """Parse a relative speed."""
    try:
        speed = float(text)
    except ValueError:
        speed = -1.0
    if not 0 <= speed <= 1:
        raise bad_input("a speed from 0 (lost) to 1 (full)", text, "VALUE")
    return speed
