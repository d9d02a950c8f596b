"""Read and write calibrations as JSON files, version 1.

    {version, constants: {passes, forward_floor, ..., blocking}, fitted: [name, ...], source,
     errors: {...}}

Constants that ``constants`` omits have the defaults of the cost model; seconds and bytes are plain
numbers. ``fitted``, ``source`` and ``errors`` record the origin of the constants for people.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from argosy.bundled import Bundled
from argosy.cost.calibration import Calibration
from argosy.document import Document, JsonObject, Schema, Word, is_there, read_json, validate
from argosy.errors import Mismatch, bad_input, closest
from argosy.units import finite
from argosy.workload.fields import Amount, Count, DtypeField
from argosy.workload.systems import Buffers, Selective

# Version of the file format.
VERSION = 1


def _above_zero(value: object) -> object:
    number = finite(value)
    if number is None or number <= 0:
        raise Mismatch(value, "a finite number above 0")
    return number


def _share(value: object) -> object:
    share = finite(value)
    if share is None or not 0 < share <= 1:
        raise Mismatch(value, "a share above 0, at most 1")
    return share


def _share_or_not(value: object) -> object:
    if isinstance(value, bool):
        return value
    share = finite(value)
    if share is None or not 0 <= share <= 1:
        raise Mismatch(value, "true, false or a share from 0 to 1")
    return share


SharedOrNot = Annotated[bool | float, BeforeValidator(_share_or_not)]
Positive = Annotated[float, BeforeValidator(_above_zero)]
PartOfOne = Annotated[float, BeforeValidator(_share)]


class _Constants(Schema):
    forward_peak: PartOfOne | None = Calibration.forward_peak
    backward_peak: PartOfOne | None = Calibration.backward_peak
    attention_peak: PartOfOne | None = Calibration.attention_peak
    passes: Positive | None = Calibration.passes
    forward_floor: Amount = Calibration.forward_floor
    backward_floor: Amount = Calibration.backward_floor
    split_launches: Positive = Calibration.split_launches
    gathered: Amount = Calibration.gathered
    forward_start: Amount = Calibration.forward_start
    backward_start: Amount = Calibration.backward_start
    profile_factor: Positive = Calibration.profile_factor
    spread: Amount = Calibration.spread
    bandwidth: PartOfOne = Calibration.bandwidth
    nic_bandwidth: PartOfOne | None = Calibration.nic_bandwidth
    latency: Amount = Calibration.latency
    reduction: PartOfOne = Calibration.reduction
    blocking: SharedOrNot = Calibration.blocking
    prefetch: bool = Calibration.prefetch
    process_bytes: Amount = Calibration.process_bytes
    activation_factor: Positive = Calibration.activation_factor
    tuned_kernels: bool = Calibration.tuned_kernels
    compiled: bool = Calibration.compiled
    fused_loss: bool = Calibration.fused_loss
    buffers: Word[Buffers] = Calibration.buffers
    sequence_parallel: bool = Calibration.sequence_parallel
    selective: Word[Selective] = Calibration.selective
    stops_early: bool = Calibration.stops_early
    shard: Count | None = Calibration.shard
    repeats_exchanges: bool = Calibration.repeats_exchanges
    gradient_dtype: DtypeField | None = Calibration.gradient_dtype
    reduce_dtype: DtypeField | None = Calibration.reduce_dtype
    async_tensor: bool = Calibration.async_tensor


class _File(Schema):
    version: Literal[1]
    constants: _Constants
    fitted: list[str] = Field(default_factory=list)
    source: str = ""
    errors: JsonObject = Field(default_factory=dict)


_BUNDLED = Bundled("calibrations", ".json")
# Returns the names of the calibrations that come with Argosy.
calibration_names = _BUNDLED.names


def read_calibration(path: Path | str) -> Calibration:
    """Read a calibration from a file, or by name one that comes with Argosy."""
    names = calibration_names()
    if str(path) in names:
        document = _BUNDLED.read(str(path))
    elif not is_there(path) and "/" not in str(path) and not Path(path).suffix:
        expected = f"a file, or one of the calibrations {', '.join(names)}"
        raise bad_input(expected, str(path), "--calibration", suggestion=closest(str(path), names))
    else:
        document = read_json(path)
    return Calibration(**validate(document, _File).constants.model_dump())


def constants_of(document: Document) -> Calibration:
    """Read a table of constants; those it omits have their defaults."""
    return Calibration(**validate(document, _Constants).model_dump())


def calibration_to_dict(calibration: Calibration) -> JsonObject:
    return asdict(calibration)


def dumps_calibration(
    calibration: Calibration,
    *,
    fitted: tuple[str, ...] = (),
    source: str = "",
    errors: JsonObject | None = None,
) -> str:
    content = {
        "version": VERSION,
        "constants": calibration_to_dict(calibration),
        "fitted": list(fitted),
        "source": source,
        "errors": errors or {},
    }
    return json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n"
