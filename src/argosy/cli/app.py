"""Build the tree of commands.

Importing this module loads the readers of inputs. Each command imports what searches, simulates,
runs or draws when it runs.
"""

from __future__ import annotations

from typing import Annotated

import typer

from argosy import __version__
from argosy.cli.catalogue.calibrate import calibrate
from argosy.cli.catalogue.cluster import cluster_app
from argosy.cli.catalogue.devices import devices
from argosy.cli.catalogue.importing import import_cluster
from argosy.cli.catalogue.init import init
from argosy.cli.catalogue.models import models
from argosy.cli.completion import completion
from argosy.cli.gravity.commands import nbody_app
from argosy.cli.planning.compare import compare
from argosy.cli.planning.explain import explain
from argosy.cli.planning.export import export
from argosy.cli.planning.plan import plan
from argosy.cli.planning.report import report
from argosy.cli.planning.simulate import simulate
from argosy.cli.planning.trace import trace
from argosy.cli.running.demo import demo
from argosy.cli.running.doctor import doctor
from argosy.cli.running.lab import lab_app
from argosy.cli.running.probe import probe
from argosy.cli.running.profile import profile
from argosy.cli.running.run import run

# The command ``argosy``.
app = typer.Typer(
    help="Plan, simulate and run parallel training on unequal devices over a changing network.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    """Print the version and exit if it was requested."""
    if wanted:
        typer.echo(f"argosy {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Plan, simulate and run parallel training on unequal devices over a changing network.

    \b
    Begin with:
        argosy demo
        argosy plan -m gpt2-xl -c two-cards -b 64 --dtype fp16 -o plan.json
        argosy explain plan.json
    """


# The commands in the order in which help lists them.
COMMANDS = (
    demo,
    init,
    doctor,
    plan,
    compare,
    explain,
    simulate,
    run,
    trace,
    calibrate,
    export,
    probe,
    profile,
    report,
    devices,
    models,
    completion,
)
for command in COMMANDS:
    app.command()(command)
app.command(name="import")(import_cluster)
app.add_typer(cluster_app, name="cluster")
app.add_typer(nbody_app, name="nbody")
app.add_typer(lab_app, name="lab")
