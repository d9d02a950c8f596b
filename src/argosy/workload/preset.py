"""Read models by name: the TOML files of ``data/models``, and files like them.

    name = "llama-3-8b"                 source = "where the figures come from"
    parameters = 8_030_261_248          published count; a config with another count is rejected
    sequence_length = 8192              dtype = "bf16"             optimizer = "adamw"

    [config]                            the keys of a Hugging Face config.json

Only ``name`` and ``[config]`` are required.
"""

from __future__ import annotations

from dataclasses import dataclass

from argosy.bundled import Bundled
from argosy.document import Document, JsonObject, Schema, validate
from argosy.dtype import Dtype
from argosy.errors import InputError, Problem, in_order, raise_any
from argosy.workload.fields import Count, DtypeField, Name, Natural, OptimizerField
from argosy.workload.huggingface import ModelConfig, read_config


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A model that comes with the settings it is usually trained with; None: not stated."""

    name: str
    config: ModelConfig
    source: str = ""
    sequence_length: int | None = None
    """Tokens."""
    dtype: Dtype | None = None
    optimizer: str | None = None


class _PresetFile(Schema):
    makes = Preset

    name: Name
    config: JsonObject
    source: str = ""
    parameters: Natural | None = None
    sequence_length: Count | None = None
    dtype: DtypeField | None = None
    optimizer: OptimizerField | None = None


_BUNDLED = Bundled("models", ".toml")
# Returns the names of the models that come with Argosy, sorted.
preset_names = _BUNDLED.names


def read_preset(name: str) -> Preset:
    """Return a model that comes with Argosy."""
    return preset_of(_BUNDLED.read(name))


def preset_of(document: Document) -> Preset:
    """Return the preset in a document; raise one ``InputError`` with every problem in it and in its
    config."""
    problems: list[Problem] = []
    try:
        content = validate(document, _PresetFile)
    except InputError as error:
        problems += error.problems
    try:
        config = (
            read_config(document.inside("config"))
            if isinstance(document.data.get("config"), dict)
            else None
        )
    except InputError as error:
        problems += error.problems
    raise_any(in_order(problems))
    assert config is not None, "a valid preset has a config"
    counted = config.architecture.parameters
    if content.parameters not in (None, counted):
        expected = f"{counted}, the count of its config"
        raise document.error(("parameters",), expected, content.parameters)
    preset: Preset = content.value(config=config)
    return preset
