"""Read and write profiles as JSON files, version 1.

    {version, device, model, sequence_length?, measured?, compiled?,
     rows:   [{layer, micro_batch, tensor_width, dtype, forward_seconds, backward_seconds,
               peak_bytes?}],
     layers: [{name, kind, parameters, activation_bytes, output_bytes, forward_flop?,
               backward_flop?, ...}]?}

``layers`` is the measured model itself, amounts per sample, for models that no config describes; it
may hold every field of ``Layer``. Fields that equal their defaults are not written; keys are
sorted. Profiles that come with Argosy are in ``data/profiles`` and are named by their files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from argosy.bundled import Bundled
from argosy.document import Document, JsonObject, Schema, is_there, parse_json, read_json, validate
from argosy.errors import Problem, bad_input, closest, in_order, raise_any
from argosy.workload.fields import Amount, Count, DtypeField, Name
from argosy.workload.layers_file import LayerSchema, layer_problems, layer_to_dict, without_defaults
from argosy.workload.profile import Profile, ProfileRow

# Version of the file format.
VERSION = 1


class _Row(Schema):
    makes = ProfileRow

    layer: Name
    micro_batch: Count
    tensor_width: Count
    dtype: DtypeField
    forward_seconds: Amount
    backward_seconds: Amount
    peak_bytes: Amount | None = None


class ProfileSchema(Schema):
    makes = Profile

    version: Literal[1]
    device: Name
    model: Name
    sequence_length: Count = 1
    measured: str = ""
    compiled: bool = False
    rows: list[_Row]
    layers: list[LayerSchema] = Field(default_factory=list)


_BUNDLED = Bundled("profiles", ".json")
# Returns the names of the profiles that come with Argosy, sorted.
profile_names = _BUNDLED.names


def read_profile(path: Path | str) -> Profile:
    """Read a profile from a file, or by name one that comes with Argosy."""
    if str(path) in profile_names():
        return profile_of(_BUNDLED.read(str(path)))
    if not is_there(path) and "/" not in str(path) and not Path(path).suffix:
        names = profile_names()
        expected = f"a file, or one of the profiles {', '.join(names)}"
        raise bad_input(expected, str(path), "--profile", suggestion=closest(str(path), names))
    return profile_of(read_json(path))


def parse_profile(text: str, *, file: str) -> Profile:
    return profile_of(parse_json(text, file=file))


def profile_of(document: Document) -> Profile:
    """Return the profile in a document; raise one ``InputError`` with every problem in it."""
    content = validate(document, ProfileSchema)
    problems = [*layer_problems(document, content.layers), *_row_problems(document, content)]
    raise_any(in_order(problems))
    profile: Profile = content.value()
    return profile


def profile_to_dict(profile: Profile) -> JsonObject:
    """Return the fields of a profile, which ``profile_of`` reads back to an equal profile."""
    content: JsonObject = {
        "version": VERSION,
        "device": profile.device,
        "model": profile.model,
        "sequence_length": profile.sequence_length,
        "rows": [without_defaults(row) for row in profile.rows],
    }
    if profile.measured:
        content["measured"] = profile.measured
    if profile.compiled:
        content["compiled"] = True
    if profile.layers:
        content["layers"] = [layer_to_dict(layer) for layer in profile.layers]
    return content


def dump_profile(profile: Profile) -> str:
    """Return JSON that ``parse_profile`` reads back to an equal profile."""
    return json.dumps(profile_to_dict(profile), indent=1, sort_keys=True) + "\n"


def write_profile(profile: Profile, path: Path | str) -> None:
    Path(path).write_text(dump_profile(profile), encoding="utf-8")


def _row_problems(document: Document, content: ProfileSchema) -> Iterator[Problem]:
    if not content.rows:
        yield document.problem(("rows",), "at least one row", content.rows)
    known = sorted({name for layer in content.layers for name in (layer.name, layer.kind)})
    seen: dict[tuple[object, ...], int] = {}
    for index, row in enumerate(content.rows):
        if known and row.layer not in known:
            suggestion = closest(row.layer, known)
            place = ("rows", index, "layer")
            yield document.problem(
                place, "the name or kind of a layer", row.layer, suggestion=suggestion
            )
        key = (row.layer, row.micro_batch, row.tensor_width, row.dtype)
        if key in seen:
            sizes = f"micro-batch {row.micro_batch}, tensor width {row.tensor_width}"
            actual = f"{row.layer}, {sizes}, {row.dtype}"
            expected = f"a measurement that rows[{seen[key]}] does not hold"
            yield document.problem(("rows", index), expected, actual)
        seen.setdefault(key, index)
