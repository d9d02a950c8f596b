"""Run ``argosy import``: write a cluster file from a file of another tool."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from argosy.cli.command import takes_options
from argosy.cli.inputs import parse_rate
from argosy.cli.options import Json
from argosy.cli.terminal import STDOUT, check_output, print_json, write_file
from argosy.cluster.file import build_cluster
from argosy.document import parse_toml, read_text
from argosy.errors import bad_input, refused

# The type of an option's value.
_Value = TypeVar("_Value")


class ImportSource(StrEnum):
    """The formats that can be imported."""

    HOSTFILE = "hostfile"
    SLURM = "slurm"
    TOPOLOGY = "slurm-topology"
    NCCL = "nccl-xml"
    SMI = "nvidia-smi"


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """The options that ``argosy import`` takes."""

    file: Annotated[Path, typer.Argument(help="The file to read.", show_default=False)]
    source: Annotated[
        ImportSource, typer.Option("--from", help="What the file is.", show_default=False)
    ]
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The cluster file to write, instead of stdout (-)."),
    ] = None
    name: Annotated[
        str, typer.Option("--name", help="What the cluster, or the node, is called.")
    ] = "imported"
    kind: Annotated[
        list[str] | None,
        typer.Option(
            "--kind",
            help="Kind of all devices (argosy devices), or TYPE=KIND, or HOSTS=KIND; repeatable.",
        ),
    ] = None
    per_host: Annotated[
        int, typer.Option("--per-host", min=1, max=10_000, help="Devices of a host.")
    ] = 8
    intra: Annotated[
        str | None, typer.Option("--intra", help='Between devices of a host, such as "300 GB/s".')
    ] = None
    nic: Annotated[str | None, typer.Option("--nic", help='Of a host, such as "100 Gbit/s".')] = (
        None
    )
    uplink: Annotated[
        str | None, typer.Option("--uplink", help="Of a switch, with slurm-topology.")
    ] = None
    json: Json = False


@takes_options
def import_cluster(options: ImportOptions) -> None:
    """Write a cluster file from hosts, Slurm, NCCL or nvidia-smi.

    \b
    Examples:
        argosy import hosts.txt --from hostfile --kind A100-80GB \\
            --intra "300 GB/s" --nic "100 Gbit/s"
        scontrol show node > nodes.txt
        argosy import nodes.txt --from slurm --kind a100=A100-80GB \\
            --intra "300 GB/s" --nic "100 Gbit/s" -o cluster.toml
        argosy import topo.xml --from nccl-xml -o cluster.toml
    """
    if options.output is not None:
        check_output(options.output, options.file, json=options.json)
    output = None if options.output == STDOUT else options.output
    text = _imported(options)
    cluster = build_cluster(parse_toml(text, file=str(output or "cluster.toml")), folder=Path())
    if output is not None:
        write_file(output, text.encode())
    if options.json:
        counts = {"nodes": len(cluster.nodes), "devices": len(cluster.devices)}
        file = None if output is None else str(output)
        print_json("import", {"file": file, "cluster": text, **counts})
    elif output is None:
        typer.echo(text, nl=False)
    else:
        typer.echo(f"wrote {output}: {cluster!r}")


def _imported(options: ImportOptions) -> str:
    """Return the text of the cluster file."""
    from argosy.cluster.imports.found import cluster_text
    from argosy.cluster.imports.hosts import HostFacts, read_hostfile, read_topology
    from argosy.cluster.imports.kinds import Kinds
    from argosy.cluster.imports.node_view import read_nccl, read_nvidia_smi
    from argosy.cluster.imports.slurm import read_slurm

    intra, nic = _rate("--intra", options.intra), _rate("--nic", options.nic)
    uplink = _rate("--uplink", options.uplink)
    source, name, file = options.source, options.name, str(options.file)
    text = read_text(options.file)
    kinds = options.kind or []
    source_note, given_kinds = f"{source} ({options.file.name})", Kinds.parse(kinds)
    if source in (ImportSource.NCCL, ImportSource.SMI):
        if given_kinds.by_name:
            raise bad_input("KIND without a name: the file has one node", kinds[0], "--kind")
        reader = read_nccl if source is ImportSource.NCCL else read_nvidia_smi
        return cluster_text(
            name,
            [reader(text, file, host=name, kind=given_kinds.everywhere, nic=nic)],
            source=source_note,
        )
    facts = HostFacts(
        kinds=given_kinds,
        per_host=options.per_host,
        intra=intra,
        nic=_needed("--nic", nic, "bandwidth"),
    )
    if source is ImportSource.HOSTFILE:
        return cluster_text(name, read_hostfile(text, file, facts), source=source_note)
    if source is ImportSource.SLURM:
        return cluster_text(name, read_slurm(text, file, facts), source=source_note)
    nodes, switches = read_topology(text, file, facts, _needed("--uplink", uplink, "bandwidth"))
    return cluster_text(name, nodes, switches, source=source_note)


def _rate(option: str, text: str | None) -> float | None:
    """Return the bytes per second of an option; None if it is not given."""
    return None if text is None else parse_rate(option, text)


def _needed(option: str, value: _Value | None, fact: str) -> _Value:
    """Return the value of an option that a format needs; raise ``InputError`` if it is missing."""
    if value is None:
        raise refused(f"{option} is needed: the file does not contain the {fact}")
    return value
