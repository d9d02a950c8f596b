"""Run ``argosy devices``: list the catalogue of device kinds."""

from __future__ import annotations

import math
from typing import Any

from argosy.cli.options import Json, Width
from argosy.cli.terminal import print_json, stdout_console
from argosy.cluster.catalogue import catalogue
from argosy.cluster.device import DeviceKind
from argosy.dtype import Dtype
from argosy.units import RATE, SIZE


def devices(json: Json = False, width: Width = None) -> None:
    """List the device kinds that a cluster file can name.

    Memory, memory bandwidth and dense TFLOP/s per dtype, as their makers state them.

    \b
    Example:
        argosy devices --json
    """
    from argosy.report.tables import plain_table

    if json:
        print_json("devices", {"devices": [_to_dict(kind) for kind in catalogue()]})
        return
    table = plain_table("kind", ">memory", ">bandwidth", *(f">{dtype}" for dtype in Dtype))
    for kind in catalogue():
        rates = dict(kind.flops)
        cells = [f"{rates[dtype] / 1e12:.4g}" if dtype in rates else "-" for dtype in Dtype]
        memory = SIZE.short(kind.memory)
        bandwidth = RATE.short(kind.memory_bandwidth)
        table.add_row(kind.name, memory, bandwidth, *cells)
    console = stdout_console(width)
    console.print(table)
    console.print(
        "\nTFLOP/s are dense datasheet peaks; --json adds the source of each figure.", style="dim"
    )


def _to_dict(kind: DeviceKind) -> dict[str, Any]:
    """Return a device kind as a dict for JSON."""
    from dataclasses import asdict

    content = asdict(kind)
    content["flops"] = dict(kind.flops)
    content["reached"]["products"] = dict(kind.reached.products)
    content["tuned"]["products"] = dict(kind.tuned.products)
    if math.isinf(kind.exchange_rate):
        content["exchange_rate"] = None
    return content
