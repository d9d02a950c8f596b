"""Define how a tensor-parallel group shares the operations of a captured program, as plan files
store it.

The runtime executes these programs as they are. States are written as in
``space.operations.sharding``: ``whole``, ``partial`` (a sum not yet done), ``dim 1 / 8`` (cut along
dim 1 into eight units).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from argosy.document import JsonObject, Schema
from argosy.workload.fields import Count, LayerRange, Natural


@dataclass(frozen=True, kw_only=True)
class Delivered:
    """A list of states in which a tensor can be read, if it can be read in others than the one in
    which it was made."""

    output: int
    """Index of the tensor among the results of its operation."""
    states: tuple[str, ...]
    way: str = ""
    """Method of the collective that changes the state; empty for a slice, which sends nothing."""


@dataclass(frozen=True, kw_only=True)
class SharedOperation:
    """An operation of a segment that a group shares."""

    op: str
    takes: tuple[str, ...]
    """State of each tensor that the operation reads."""
    leaves: tuple[str, ...]
    """State of each result."""
    units: int = 0
    """Number of units of work of which each device does its share; 0: every device does all of
    it."""
    local: str = ""
    """Name of a local implementation, if the operation itself does not work on a shard; else
    empty."""
    delivered: tuple[Delivered, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SharedSegment:
    """A set of layers that a group shares in the same way."""

    layers: tuple[int, ...]
    operations: tuple[SharedOperation, ...]
    """Operations of each of the layers."""


@dataclass(frozen=True, kw_only=True)
class SharedWeight:
    """A weight that is not whole on every device."""

    name: str
    stored: str
    delivered: Delivered | None = None


@dataclass(frozen=True, kw_only=True)
class GroupProgram:
    """A program by which groups with these ratios run a range of layers on ``samples`` samples at a
    time."""

    first: int
    end: int
    """One past the last layer."""
    ratios: tuple[float, ...]
    """Shares of the work, in the order of ranks."""
    samples: int
    weights: tuple[SharedWeight, ...]
    segments: tuple[SharedSegment, ...]

    def operations(self, layer: int) -> tuple[SharedOperation, ...]:
        """Return the operations of a layer; none if the program does not have it."""
        return next(
            (segment.operations for segment in self.segments if layer in segment.layers), ()
        )


class DeliveredSchema(Schema):
    makes = Delivered

    output: Natural = 0
    states: list[str] = Field(min_length=1)
    way: str = ""


class SharedOperationSchema(Schema):
    makes = SharedOperation

    op: str
    takes: list[str] = Field(default_factory=list)
    leaves: list[str] = Field(default_factory=list)
    units: Natural = 0
    local: str = ""
    delivered: list[DeliveredSchema] = Field(default_factory=list)


class SharedSegmentSchema(Schema):
    makes = SharedSegment

    layers: list[Natural] = Field(min_length=1)
    operations: list[SharedOperationSchema]


class SharedWeightSchema(Schema):
    makes = SharedWeight

    stored: str
    delivered: DeliveredSchema | None = None


class GroupProgramSchema(Schema):
    makes = GroupProgram

    layers: LayerRange
    ratios: list[Annotated[float, Field(gt=0, le=1)]] = Field(min_length=2)
    samples: Count
    weights: dict[str, SharedWeightSchema] = Field(default_factory=dict)
    segments: list[SharedSegmentSchema]

    def value(self, **others: Any) -> Any:
        first, end = self.layers
        weights = tuple(weight.value(name=name) for name, weight in sorted(self.weights.items()))
        return super().value(first=first, end=end, weights=weights, **others)


def group_program_to_dict(program: GroupProgram) -> JsonObject:
    """Return the fields of a program, which ``GroupProgramSchema`` reads back to an equal value."""
    return {
        "layers": [program.first, program.end],
        "ratios": list(program.ratios),
        "samples": program.samples,
        "weights": {weight.name: dict(_weight_fields(weight)) for weight in program.weights},
        "segments": [
            {
                "layers": list(segment.layers),
                "operations": [
                    dict(_operation_fields(operation)) for operation in segment.operations
                ],
            }
            for segment in program.segments
        ],
    }


def _weight_fields(weight: SharedWeight) -> Iterator[tuple[str, Any]]:
    yield "stored", weight.stored
    if weight.delivered is not None:
        yield "delivered", dict(_delivered_fields(weight.delivered))


def _operation_fields(operation: SharedOperation) -> Iterator[tuple[str, Any]]:
    yield "op", operation.op
    yield "takes", list(operation.takes)
    yield "leaves", list(operation.leaves)
    if operation.units:
        yield "units", operation.units
    if operation.local:
        yield "local", operation.local
    if operation.delivered:
        yield "delivered", [dict(_delivered_fields(value)) for value in operation.delivered]


def _delivered_fields(delivered: Delivered) -> Iterator[tuple[str, Any]]:
    if delivered.output:
        yield "output", delivered.output
    yield "states", list(delivered.states)
    if delivered.way:
        yield "way", delivered.way
