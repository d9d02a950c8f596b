"""Read and write layers in files: of a measured model, and of a captured program in its plan.

    {name, kind, parameters, activation_bytes, output_bytes, forward_flop?, backward_flop?,
     operations?, ...}

Amounts are per sample. Fields that equal their defaults are not written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from typing import Annotated, Any

from pydantic import BeforeValidator

from argosy.document import Document, JsonObject, Schema, validate
from argosy.errors import Mismatch, Problem, raise_any
from argosy.workload.chain import Frozen, Layer
from argosy.workload.fields import Amount, Count, Name, Natural

# Largest number of operations of a program: more is a mistake, and each is checked.
_MOST_OPERATIONS = 1_000_000


def _range(value: object) -> object:
    if not isinstance(value, list) or len(value) != 2:
        raise Mismatch(value, "the first operation and one past the last, such as [0, 40]")
    if any(isinstance(number, int) and number > _MOST_OPERATIONS for number in value):
        raise Mismatch(value, f"operations up to {_MOST_OPERATIONS}")
    return value


class FrozenSchema(Schema):
    """A schema that has every field of ``Frozen``."""

    makes = Frozen

    parameters: Natural
    bytes: Amount
    expert_parameters: Natural = 0
    expert_bytes: Amount = 0.0
    active_share: Amount = 1.0
    tied_bytes: Amount = 0.0
    packed_parameters: Natural = 0
    packed_bytes: Amount = 0.0
    unpacked_bytes: Amount = 0.0
    forward_bytes: Amount = 0.0
    has_backward: bool = True
    forward_share: Amount = 1.0
    backward_share: Amount = 1.0


class LayerSchema(Schema):
    """A schema that has every field of ``Layer``."""

    makes = Layer

    name: Name
    kind: Name
    parameters: Natural
    activation_bytes: Amount
    output_bytes: Amount
    forward_flop: Amount = 0.0
    backward_flop: Amount = 0.0
    selective_bytes: Amount = 0.0
    selective_flop: Amount = 0.0
    score_bytes: Amount = 0.0
    stream_bytes: Amount = 0.0
    working_bytes: Amount = 0.0
    loss_bytes: Amount = 0.0
    reduced_bytes: Amount = 0.0
    active_parameters: Natural | None = None
    expert_parameters: Natural = 0
    num_experts: Natural = 0
    routed_bytes: Amount = 0.0
    key_value_bytes: Amount = 0.0
    moved_bytes: Amount | None = None
    attention_flop: Amount = 0.0
    last_flop: Amount = 0.0
    second_flop: Amount = 0.0
    launches: Amount | None = None
    operations: Annotated[list[Natural], BeforeValidator(_range)] | None = None
    max_tensor_width: Count = 1
    max_context: Count = 1
    tied_to: Natural | None = None
    tied_parameters: Natural = 0
    frozen: FrozenSchema | None = None
    summed_parameters: Natural | None = None


class _LayersSchema(Schema):
    layers: list[LayerSchema]


def layers_to_dict(layers: Sequence[Layer]) -> JsonObject:
    """Return the fields of layers, which ``layers_of`` reads back to equal layers."""
    return {"layers": [layer_to_dict(layer) for layer in layers]}


def layer_to_dict(layer: Layer) -> JsonObject:
    """Return the fields of a layer, which ``LayerSchema`` reads back to an equal layer."""
    content = without_defaults(layer)
    return (
        content if layer.frozen is None else {**content, "frozen": without_defaults(layer.frozen)}
    )


def layers_of(document: Document) -> tuple[Layer, ...]:
    """Return the layers of a captured program in a document; raise one ``InputError`` with every
    problem."""
    content = validate(document, _LayersSchema)
    problems = [
        *layer_problems(document, content.layers),
        *_operation_problems(document, content.layers),
    ]
    raise_any(problems)
    return tuple(layer.value() for layer in content.layers)


def without_defaults(value: Any) -> JsonObject:
    """Return the fields of a dataclass that differ from their defaults."""
    pairs = [(field, getattr(value, field.name)) for field in fields(value)]
    return {
        field.name: content
        for field, content in pairs
        if field.default is MISSING or content != field.default
    }


def layer_problems(document: Document, layers: Sequence[LayerSchema]) -> Iterator[Problem]:
    """Yield names that are not unique, and ties to layers that do not exist."""
    seen: set[str] = set()
    for index, layer in enumerate(layers):
        if layer.name in seen:
            yield document.problem(
                ("layers", index, "name"), "a name that no other layer has", layer.name
            )
        seen.add(layer.name)
        if layer.tied_to is not None and layer.tied_to >= len(layers):
            expected = f"the index of a layer, below {len(layers)}"
            yield document.problem(("layers", index, "tied_to"), expected, layer.tied_to)


def _operation_problems(document: Document, layers: Sequence[LayerSchema]) -> Iterator[Problem]:
    """Yield a range of operations that does not follow the one before, from operation 0 on."""
    if not layers:
        yield document.problem(("layers",), "at least one layer", "[]")
    begin = 0
    for index, layer in enumerate(layers):
        first, end = layer.operations or (-1, -1)
        if first != begin or end <= first:
            actual = "none" if layer.operations is None else str(layer.operations)
            yield document.problem(
                ("layers", index, "operations"), f"at least one operation from {begin} on", actual
            )
            return
        begin = end
