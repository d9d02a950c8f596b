"""List the states in which a value is available: as it was made, and after at most one collective.

A value is *delivered* in a set of states: consumers take whichever of them they need, so one
all-gather serves all. From a replicated tensor any shard is a slice and a partial sum is "one
device keeps it", both free. An operation leaves a value in one state; a delivery takes

    (1)  partial -> whole       all-reduce
    (2)  partial -> sharded     reduce-scatter
    (3)  sharded -> whole       all-gather
    (4)  sharded -> other dim   all-to-all
    (5)  whole -> anything      a slice
    (6)  sharded -> other ratios   re-shard

A parameter is *stored* in one state, its gradient must be delivered in that state, and it is used
as stored or after one all-gather; ZeRO and parameter servers gather what is stored in shards. A
value from another stage of a pipeline arrives in shards if it can be cut, one per device, and is
used as such or after one all-gather.
"""

from __future__ import annotations

from dataclasses import dataclass

from argosy.cost.group import GroupCollective
from argosy.space.operations.sharding import PARTIAL, REPLICATED, State, by
from argosy.workload.graph import Graph, Role

OPTIMIZER_BYTES = 8
"""Optimizer state per element of a trained parameter, in bytes: Adam's two moments in fp32."""


@dataclass(frozen=True)
class Delivery:
    """A set of states in which a value can be taken, and the state in which a parameter is stored
    or a received value arrives."""

    states: tuple[State, ...]
    stored: State | None = None

    def __post_init__(self) -> None:
        # Unlike the hash of a string, this code is equal in every process.
        code = hash((self.states, 0 if self.stored is None else self.stored))
        object.__setattr__(self, "_code", code)

    def __hash__(self) -> int:
        return self._code  # type: ignore[attr-defined, no-any-return]

    def has(self, state: State) -> bool:
        return REPLICATED in self.states or state in self.states

    def __str__(self) -> str:
        shown = " and ".join(map(str, self.states))
        return shown if self.stored in (None, self.states[0]) else f"{shown}, stored {self.stored}"


@dataclass(frozen=True)
class Conversion:
    """A collective that converts a value from one state to another."""

    kind: GroupCollective
    before: State
    after: State


WHOLE = Delivery((REPLICATED,))
"""The delivery of a value that every device has whole."""


def deliveries(graph: Graph, value: int, cuts: tuple[State, ...]) -> tuple[Delivery, ...]:
    """Return every delivery of a value that is worth considering."""
    described = graph.values[value]
    match described.role:
        case Role.PARAMETER:
            stored = (REPLICATED, *cuts)
            used = [Delivery((state,), state) for state in stored]
            return (*used, *(Delivery((REPLICATED,), state) for state in cuts))
        case Role.RECEIVED:
            gathered = Delivery((REPLICATED,), cuts[0] if cuts else REPLICATED)
            return (gathered, *(Delivery((state,), state) for state in cuts))
        case Role.RESULT:
            partial = (PARTIAL,) if described.is_floating else ()
            result = [Delivery((state,)) for state in (REPLICATED, *partial, *cuts)]
            if len(graph.consumers[value]) > 1:
                result += [Delivery((PARTIAL, cut)) for cut in cuts if partial]
                result += [
                    Delivery((first, second))
                    for i, first in enumerate(cuts)
                    for second in cuts[i + 1 :]
                ]
            return tuple(result)
    return (WHOLE,)


def conversions(made: State, delivery: Delivery) -> tuple[Conversion, ...] | None:
    """Return the conversions by (1) to (6) that deliver a value made in a state, or None if one
    collective is not enough."""
    missing = [state for state in delivery.states if state != made]
    if made == REPLICATED:
        return tuple(Conversion(GroupCollective.SLICE, made, state) for state in missing)
    if len(missing) > 1:
        return None
    if not missing:
        return ()
    (target,) = missing
    kind = collective(made, target)
    return None if kind is None else (Conversion(kind, made, target),)


def collective(made: State, target: State) -> GroupCollective | None:
    """Return the collective from one state that is not replicated to another; between cuts of one
    dim it is a gather, followed by a slice."""
    if made.is_sharded and target.is_sharded and by(made, target.segment) == target:
        return GroupCollective.RESHARD
    if target == PARTIAL:
        return None
    if made == PARTIAL:
        return (
            GroupCollective.ALL_REDUCE if target == REPLICATED else GroupCollective.REDUCE_SCATTER
        )
    return (
        GroupCollective.ALL_GATHER
        if target == REPLICATED or target.dim == made.dim
        else GroupCollective.ALL_TO_ALL
    )


def held_bytes(
    graph: Graph, value: int, delivery: Delivery, in_flight: int = 1
) -> tuple[float, tuple[State, ...]]:
    """Return the bytes that a value occupies if it is whole, and the states in which it is held; 0
    if it is not kept."""
    described = graph.values[value]
    if described.role is Role.PARAMETER:
        assert delivery.stored is not None
        if value not in graph.trained:
            return float(described.num_bytes), (delivery.stored,)
        return 2 * described.num_bytes + OPTIMIZER_BYTES * described.elements, (delivery.stored,)
    if value in graph.kept and described.role in (Role.RESULT, Role.RECEIVED):
        return in_flight * described.num_bytes, delivery.states
    return 0.0, ()
