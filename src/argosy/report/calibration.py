"""Build tables about measured runs: errors of predictions, the constants, the worst cases."""

from __future__ import annotations

from dataclasses import fields

from rich.table import Table

from argosy.calibrate.fit import Errors
from argosy.calibrate.study import Study
from argosy.cost.calibration import Calibration
from argosy.report.tables import plain_table
from argosy.units import SIZE, TIME

MEANINGS = {
    "forward_peak": "share of the peak, forward",
    "backward_peak": "share of the peak, backward",
    "attention_peak": "share of the peak, attention proper",
    "passes": "of kept bytes over the memory bus",
    "forward_floor": "least seconds of a layer",
    "backward_floor": "least seconds of a layer",
    "split_launches": "of a split layer over a whole one's",
    "gathered": "of whole outputs, where tensors are split",
    "forward_start": "seconds beside a layer's work",
    "backward_start": "seconds beside a layer's work",
    "profile_factor": "of seconds in profiles",
    "spread": "of the speeds of equal devices",
    "bandwidth": "share of a link's bandwidth",
    "nic_bandwidth": "share of it, outside nodes",
    "latency": "more for every message",
    "reduction": "share of it for sums of gradients",
    "blocking": "share of transfers that devices wait for",
    "prefetch": "ZeRO exchanges layer by layer",
    "process_bytes": "of a device, before the model",
    "activation_factor": "memory over bytes of activations",
    "tuned_kernels": "kernels are tuned by hand for the generation",
    "compiled": "kernels between products are fused",
    "fused_loss": "no copies of logits",
    "buffers": "temporary tensors of",
    "sequence_parallel": "of tensor-parallel groups",
    "selective": "recomputation means",
    "stops_early": "last products are not repeated",
    "shard": "devices that divide ZeRO's state",
    "repeats_exchanges": "backwards exchange again",
    "gradient_dtype": "of kept gradients",
    "reduce_dtype": "of gradients that are summed",
    "async_tensor": "groups exchange beside products",
}
"""The meaning of every constant, kept short because a line of the table has 80 columns."""


# What is shown for a constant without a value.
_UNSTATED = {
    "reduce_dtype": "as kept",
    "gradient_dtype": "as weights",
    "nic_bandwidth": "as inside",
    "shard": "all",
}


# The number of runs in the table of the worst predictions.
_WORST = 5


def shown_constant(calibration: Calibration, name: str) -> str:
    """Return the value of a constant with its unit."""
    value = getattr(calibration, name)
    if value is None:
        return _UNSTATED.get(name, "by kind")
    if name == "latency" or name.endswith(("_floor", "_start")):
        return TIME.short(value)
    if name == "process_bytes":
        return SIZE.short(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else f"{value:.3g}"


def constant_table(study: Study) -> Table:
    """Return a table of every constant that shows which were fitted."""
    table = plain_table("constant", ">value", "meaning", "")
    for field in fields(Calibration):
        fitted = _how_found(study, field.name)
        table.add_row(
            field.name, shown_constant(study.calibration, field.name), MEANINGS[field.name], fitted
        )
    return table


def _how_found(study: Study, name: str) -> str:
    """Return how the value of a constant was found, in a few words."""
    names = {"peak", name} if name in ("forward_peak", "backward_peak") else {name}
    if names & set(study.unidentified):
        return "not told by these runs"
    return "fitted" if names & set(study.names) else ""


def error_table(study: Study) -> Table:
    """Return a table of the errors of time and memory on runs that were not used for the fit."""
    table = plain_table(
        "error of", "runs", "median", "mean", "90 % below", "worst", "rank correlation"
    )
    rows: list[tuple[str, Errors | None]] = [
        ("seconds", study.seconds),
        ("peak memory", study.memory),
    ]
    for name, errors in rows:
        if errors is not None:
            table.add_row(name, *error_cells(errors))
    return table


def error_cells(errors: Errors) -> list[str]:
    """Return the cells of a table for the errors of predictions."""
    shares = (errors.median, errors.mean, errors.ninetieth, errors.worst)
    return [str(errors.count), *(f"{100 * share:.1f} %" for share in shares), f"{errors.rank:.3f}"]


def worst_table(study: Study) -> Table:
    """Return a table of the runs whose predictions are furthest off."""
    table = plain_table("furthest off", ">measured", ">predicted", ">error")
    for predicted_run in study.worst(_WORST):
        times = (TIME.format(predicted_run.run.seconds), TIME.format(predicted_run.seconds))
        table.add_row(predicted_run.run.name, *times, f"{100 * predicted_run.error:+.1f} %")
    return table
