"""Profile a transformer by its shape alone: a preset or a config, per micro-batch, tensor width and
dtype.

Its embedding, one of its blocks and its head are built with random weights, whole or as the slice
that one device of a tensor-parallel group has (``slices``), and timed (``stack``). Nothing is
downloaded, and no data is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from argosy.dtype import Dtype
from argosy.errors import InputError, impossible
from argosy.measure.profile import ProfileSettings, Report
from argosy.measure.slices import check_sliceable
from argosy.measure.stack import Stack, measure_stack
from argosy.workload.architecture import Architecture
from argosy.workload.profile import Profile, ProfileRow

LAYERS = ("embedding", "block", "head")
"""Kinds of layers that are measured."""
_DTYPES = {Dtype.FP32: torch.float32, Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16}
"""The dtype of weights and activations, by the dtype of a profile."""


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The numbers of samples, widths and dtypes that are measured of a model."""

    samples: tuple[int, ...]
    widths: tuple[int, ...]
    dtypes: tuple[Dtype, ...]
    tokens: int
    """Tokens per sample."""


def profile_shape(architecture: Architecture, shapes: Shapes, settings: ProfileSettings) -> Profile:
    """Return the profile of a model on this process's card, or its CPU.

    Known rows are not measured again. Widths that do not divide the model, and sizes that do not
    fit into memory, are reported and skipped.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = replace(settings, sequence_length=shapes.tokens)
    report, rows = settings.report, list(settings.known)
    done = {(row.layer, row.micro_batch, row.tensor_width, row.dtype) for row in rows}
    cases = _cases(settings.name, architecture, shapes, report)
    todo = [case for case in cases if case not in done]
    for number, (layer, samples, width, dtype) in enumerate(todo, 1):
        title = f"{layer} with {samples} x {shapes.tokens} tokens, width {width}, {dtype}"
        report(f"{title}, {number} of {len(todo)}")
        try:
            stack = Stack(
                architecture=architecture,
                kind=layer,
                samples=samples,
                tokens=shapes.tokens,
                width=width,
                dtype=_DTYPES[dtype],
                device=device,
                is_compiled=settings.is_compiled,
            )
            times = measure_stack(stack, seconds=settings.seconds)
        except torch.OutOfMemoryError:
            report(f"{title}: does not fit into memory, skipped")
            continue
        row = ProfileRow(
            layer=layer,
            micro_batch=samples,
            tensor_width=width,
            dtype=dtype,
            forward_seconds=times.forward_seconds,
            backward_seconds=times.backward_seconds,
            peak_bytes=times.peak_bytes,
        )
        rows.append(row)
        settings.save(settings.profile(rows))
    if not rows:
        raise impossible("measure", "no batch size fits into memory", "smaller --samples")
    return settings.profile(rows)


def _cases(
    name: str, architecture: Architecture, shapes: Shapes, report: Report
) -> Iterator[tuple[str, int, int, Dtype]]:
    for dtype in shapes.dtypes:
        for width in sorted(set(shapes.widths)):
            try:
                check_sliceable(architecture, tokens=shapes.tokens, width=width, name=name)
            except InputError as error:
                if width == min(shapes.widths):
                    raise
                report(f"no width {width}: {error}")
                continue
            for layer in LAYERS:
                for samples in sorted(set(shapes.samples)):
                    yield layer, samples, width, dtype
