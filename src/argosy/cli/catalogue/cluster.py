"""Run ``argosy cluster show`` and ``argosy cluster check``."""

from __future__ import annotations

from typing import Annotated

import typer

from argosy.cli.options import Json, Width
from argosy.cli.terminal import print_json, stdout_console
from argosy.cluster.file import load_cluster

cluster_app = typer.Typer(
    help="Look at a cluster file.", no_args_is_help=True, rich_markup_mode=None
)

Source = Annotated[
    str,
    typer.Argument(
        metavar="CLUSTER", help="A cluster.toml, or a bundled name.", show_default=False
    ),
]


@cluster_app.command()
def show(source: Source, json: Json = False, width: Width = None) -> None:
    """Show the nodes, devices and links of a cluster, and their changes.

    \b
    Example:
        argosy cluster show mixed-16
    """
    from argosy.report.clusters import change_table, cluster_to_dict, link_table, node_table

    cluster = load_cluster(source)
    if json:
        print_json("cluster show", cluster_to_dict(cluster))
        return
    console = stdout_console(width)
    console.print(f"{cluster!r}\n")
    console.print(node_table(cluster))
    for table in (link_table(cluster), change_table(cluster)):
        if table.row_count:
            console.print()
            console.print(table)


@cluster_app.command()
def check(source: Source, json: Json = False) -> None:
    """Check a cluster file and report all problems.

    Exit code 0 and one line, or 2 and a line for every problem.

    \b
    Example:
        argosy cluster check cluster.toml
    """
    cluster = load_cluster(source)
    if json:
        print_json("cluster check", {"name": cluster.name, "hash": cluster.hash, "fine": True})
    else:
        typer.echo(f"{cluster!r}: fine")
