"""Convert block latencies published with Cephalo to a chain and profiles.

    model_latencies.json   model -> GPU kind -> tokens -> dtype -> times of one block
    model_stats.json       model -> hidden size, number of blocks, parameters per block and in all

The meaning of the figures was found by comparing them with physical limits and with Cephalo's own
profiler:

    (1) Times are milliseconds, of the kernels alone, without gaps between them: one block of Llama
        13B takes an A100 18.7 ms in fp32, 17.6 TFLOP/s of the 19.5 that fp32 allows; so products
        are not tf32. float16 is autocast.
    (2) Full entries are [fit, fit, forward, backward]: the n-th number of a list is for a
        micro-batch of n.
    (3) Entries with two fits alone, times of slope x n + intercept, become their values at 1 and 5
        samples, the range that Cephalo's profiler takes by default: between the two, interpolation
        is the fit.
    (4) Entries with one fit, or one slope, hold forward and backward together. They make no
        profile; the chain's source names the omitted kinds. A kind without a profile is rejected
        when it is planned for, as no FLOP are known either.
    (5) Only a block was timed. Embedding and head take no time here; of their parameters, mostly
        two tables of 49,152 tokens, half are counted with the first block and half with the last.
    (6) The bytes that a block keeps inside were not published: kept bytes are those of its input,
        which is all that full recomputation keeps, as Cephalo trains.
    (7) A vision model has 197 tokens, not the 512 of the file's key: 196 patches of an image of
        224 x 224 and a class token, as its parameters outside the blocks add up.

``model_memory.json`` is not read: it holds GiB of a whole sharded model on the worst GPU of a
cluster, neither per block nor per kind. Two oddities are imported unchanged: P40 and L4 sometimes
get faster with more samples, and with 4096 tokens the times of 2 samples on H100 (13.0 ms, 25.0 ms,
...) look typed in rather than measured.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from argosy.document import Document, Schema, read_json, validate
from argosy.dtype import Dtype
from argosy.errors import InputError, Problem
from argosy.units import finite
from argosy.workload.chain import Chain, Layer
from argosy.workload.fields import Count, Natural
from argosy.workload.profile import Profile, ProfileRow
from argosy.workload.settings import parse_settings

CATALOGUE_NAMES = {
    "a100x40": "A100-40GB",
    "a100x80": "A100-80GB",
    "a10g": "A10G",
    "a6000": "RTX-A6000",
    "h100-nvl": "H100-NVL",
    "l4": "L4",
    "l40s": "L40S",
    "rtx3090": "RTX-3090",
    "rtx_3090": "RTX-3090",
    "t4": "T4",
    "v100": "V100-16GB",
    "v100x16": "V100-16GB",
    "v100x32": "V100-32GB",
}
"""The catalogue's name for each of Cephalo's GPU kinds. A name that is not here is kept: ``p40``,
``v100-pciex16``, and ``p100``, which has 12 GB while the catalogue's P100 has 16."""

# Cephalo's names of dtypes.
_DTYPES = {Dtype.FP32: "float32", Dtype.FP16: "float16"}
# Micro-batches at which a fit is evaluated (3).
_FITTED = (1, 5)
# Tokens of a vision model (7).
_IMAGE_TOKENS = 197

Times = dict[int, tuple[float, float]]
"""Forward and backward milliseconds by micro-batch."""


class _Stats(Schema):
    hidden_size: Count
    num_layers: Count
    parameters_per_layer: Natural
    total_parameters: Natural


def read_cephalo(
    folder: Path | str,
    model: str,
    *,
    sequence_length: int = 512,
    dtype: Dtype = Dtype.FP32,
    optimizer: str = "adam",
) -> tuple[Chain, dict[str, Profile]]:
    """Return the model per sample, and the measured times of its blocks by the catalogue's device
    kinds."""
    folder = Path(folder)
    parse_settings(
        sequence_length=sequence_length, dtype=dtype, optimizer=optimizer, fused_attention=False
    )
    stats_table = read_json(folder / "model_stats.json").chosen("model", model)
    tokens = _IMAGE_TOKENS if "vit" in model else sequence_length
    layers = _layers(stats_table, validate(stats_table, _Stats), tokens, dtype)
    times, left_out = _times(
        read_json(folder / "model_latencies.json").chosen("model", model), sequence_length, dtype
    )
    source = "blocks measured by Cephalo (benson-guo/cephalo)"
    if left_out:
        kinds = ", ".join(left_out)
        source += f"; omitted because forward and backward were not separated: {kinds}"
    chain = Chain(
        name=model,
        layers=layers,
        sequence_length=tokens,
        dtype=dtype,
        optimizer=optimizer,
        source=source,
    )
    profiles = {
        kind: Profile(
            device=kind,
            model=model,
            rows=_rows(times[kind], dtype),
            layers=layers,
            sequence_length=tokens,
        )
        for kind in sorted(times)
    }
    return chain, profiles


def _layers(document: Document, stats: _Stats, tokens: int, dtype: Dtype) -> tuple[Layer, ...]:
    """Return the layers of a model by (5) and (6)."""
    rest = stats.total_parameters - stats.num_layers * stats.parameters_per_layer
    if rest < 0:
        expected = f"at least {stats.num_layers} blocks of {stats.parameters_per_layer}"
        raise document.error(("total_parameters",), expected, stats.total_parameters)
    hidden = float(tokens * stats.hidden_size * dtype.bytes)
    block = Layer(
        name="block",
        kind="block",
        forward_flop=0.0,
        backward_flop=0.0,
        parameters=stats.parameters_per_layer,
        activation_bytes=hidden,
        output_bytes=hidden,
    )
    layers = [replace(block, name=f"block.{index}") for index in range(stats.num_layers)]
    layers[0] = replace(layers[0], parameters=layers[0].parameters + rest - rest // 2)
    layers[-1] = replace(layers[-1], parameters=layers[-1].parameters + rest // 2, output_bytes=0.0)
    return tuple(layers)


def _times(
    document: Document, sequence_length: int, dtype: Dtype
) -> tuple[dict[str, Times], list[str]]:
    """Return the times by device kind, and the kinds that (4) omits."""
    times: dict[str, Times] = {}
    left_out: list[str] = []
    problems: list[Problem] = []
    tokens, name = str(sequence_length), _DTYPES.get(dtype, str(dtype))
    for kind, lengths in document.data.items():
        dtypes = lengths.get(tokens, {}) if isinstance(lengths, dict) else None
        if not isinstance(dtypes, dict):
            problems.append(
                document.problem((kind, tokens), "tables: tokens, and in them dtypes", lengths)
            )
            continue
        if name not in dtypes:
            continue
        entry, known = dtypes[name], CATALOGUE_NAMES.get(kind, kind)
        entry_times = _entry_times(entry)
        if _is_combined(entry):
            left_out.append(kind)
        elif entry_times is None:
            fits = "[[slope, intercept], [slope, intercept]]"
            expected = f"{fits} and, per micro-batch, two lists of milliseconds"
            problems.append(document.problem((kind, tokens, name), expected, entry))
        elif known in times:
            problems.append(document.problem((kind, tokens, name), f"one entry for {known}", kind))
        else:
            times[known] = entry_times
    if problems:
        raise InputError(sorted(problems, key=lambda problem: problem.line or 0))
    if not times:
        raise document.error(
            (), f"forward and backward times for {tokens} tokens in {name}; {_measured(document)}"
        )
    return times, sorted(left_out)


def _is_combined(entry: object) -> bool:
    """Return whether an entry holds forward and backward together (4)."""
    return _is_number(entry) or (
        isinstance(entry, list) and len(entry) == 2 and all(map(_is_number, entry))
    )


def _entry_times(entry: object) -> Times | None:
    """Return the times of an entry by (2) or (3); None if it is neither."""
    if not isinstance(entry, list) or len(entry) not in (2, 4):
        return None
    lists = [
        part if isinstance(part, list) and all(map(_is_number, part)) else [] for part in entry
    ]
    if len(lists) == 2 and all(len(fit) == 2 for fit in lists):
        (ahead, start), (back, begin) = lists
        times = {n: (ahead * n + start, back * n + begin) for n in _FITTED}
    elif len(lists) == 4 and len(lists[2]) == len(lists[3]):
        times = dict(enumerate(zip(lists[2], lists[3], strict=True), start=1))
    else:
        return None
    milliseconds = [value for pair in times.values() for value in pair]
    return times if milliseconds and all(0 <= value < math.inf for value in milliseconds) else None


def _is_number(value: object) -> bool:
    return finite(value) is not None


def _measured(document: Document) -> str:
    """Return the tokens and dtypes that a file has, as text.

    >>> times = {"t4": {"512": {"float16": 1.5}}, "l4": {"512": {"float32": 2}}}
    >>> _measured(Document("f.json", times, {}))
    'the file has 512 float16, 512 float32'
    """
    pairs = {
        (tokens, name)
        for lengths in document.data.values()
        if isinstance(lengths, dict)
        for tokens, dtypes in lengths.items()
        if isinstance(dtypes, dict)
        for name in dtypes
    }
    return "the file has " + ", ".join(f"{tokens} {name}" for tokens, name in sorted(pairs))


def _rows(times: Times, dtype: Dtype) -> tuple[ProfileRow, ...]:
    return tuple(
        ProfileRow(
            layer="block",
            micro_batch=micro_batch,
            tensor_width=1,
            dtype=dtype,
            forward_seconds=forward / 1e3,
            backward_seconds=backward / 1e3,
        )
        for micro_batch, (forward, backward) in sorted(times.items())
    )
