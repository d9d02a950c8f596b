"""Run ``argosy models``: list the models that come with the package."""

from __future__ import annotations

from argosy.cli.options import Json, Width
from argosy.cli.terminal import print_json, stdout_console
from argosy.workload.load import load_model, preset_names


def models(json: Json = False, width: Width = None) -> None:
    """List the models that can be named instead of a config file.

    \b
    Example:
        argosy models
    """
    from argosy.report.tables import plain_table

    chains = [load_model(name) for name in preset_names()]
    if json:
        fields = ("name", "parameters", "sequence_length", "dtype", "optimizer", "source")
        rows = [
            {"layers": len(chain.layers), **{field: getattr(chain, field) for field in fields}}
            for chain in chains
        ]
        print_json("models", {"models": rows})
        return
    table = plain_table("model", ">parameters", ">layers", ">sequence", "dtype", "optimizer")
    for chain in chains:
        sizes = (
            f"{chain.parameters / 1e9:.4g} B",
            str(len(chain.layers)),
            str(chain.sequence_length),
        )
        table.add_row(chain.name, *sizes, str(chain.dtype), chain.optimizer)
    stdout_console(width).print(table)
