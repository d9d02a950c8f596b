"""In which states a value is had: as it was made, and after at most one collective.

A value is *delivered* in a set of states: consumers take whichever of them they need, so one
all-gather serves all. From a replicated tensor any shard is a slice and a partial sum is "one
device keeps it", both free. What turns the state in which an operation leaves a value into a
delivery is

    (1)  partial -> whole          all-reduce             (2)  partial -> sharded      reduce-scatter
    (3)  sharded -> whole          all-gather             (4)  sharded -> other dim    all-to-all
    (5)  whole -> anything         a slice                (6)  sharded -> other ratios  re-shard

A parameter is *stored* in one state, its gradient must be delivered in that state, and it is used
as stored or after one all-gather; gathering what is stored in shards is what ZeRO and a parameter
server do. What another stage of a pipeline made arrives in shards where it can be cut, every device
its own, and is used so or after one all-gather.
"""

from __future__ import annotations

from dataclasses import dataclass

from argosy.cost.group import GroupCollective
from argosy.space.operations.sharding import PARTIAL, REPLICATED, State, by
from argosy.workload.graph import Graph, Role

OPTIMIZER_BYTES = 8
"""Per element of a parameter: two moments of Adam in fp32."""


@dataclass(frozen=True)
class Delivery:
    """The states in which a value can be taken, and the one a parameter is stored or a received
    value arrives in."""

    states: tuple[State, ...]
    stored: State | None = None

    def __post_init__(self) -> None:
        code = hash(
            (self.states, 0 if self.stored is None else self.stored)
        )  # the same in every process
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
    """One collective between two states of a value."""

    kind: GroupCollective
    before: State
    after: State


WHOLE = Delivery((REPLICATED,))


def deliveries(graph: Graph, value: int, cuts: tuple[State, ...]) -> tuple[Delivery, ...]:
    """Every delivery of a value that is worth considering."""
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
            found = [Delivery((state,)) for state in (REPLICATED, *partial, *cuts)]
            if len(graph.consumers[value]) > 1:
                found += [Delivery((PARTIAL, cut)) for cut in cuts if partial]
                found += [
                    Delivery((one, other)) for i, one in enumerate(cuts) for other in cuts[i + 1 :]
                ]
            return tuple(found)
    return (WHOLE,)


def conversions(made: State, delivery: Delivery) -> tuple[Conversion, ...] | None:
    """(1) to (6): what it takes to deliver a value that was made in a state; None if no one
    collective does."""
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
    """The collective from one state that is not replicated to another; between cuts of one dim a
    gather and a slice."""
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
    """Bytes that a value keeps occupied if it is whole, and the states in which it does; nothing if
    it is not kept."""
    described = graph.values[value]
    if described.role is Role.PARAMETER:
        assert delivery.stored is not None
        if value not in graph.trained:
            return float(described.num_bytes), (delivery.stored,)
        return 2 * described.num_bytes + OPTIMIZER_BYTES * described.elements, (delivery.stored,)
    if value in graph.kept and described.role in (Role.RESULT, Role.RECEIVED):
        return in_flight * described.num_bytes, delivery.states
    return 0.0, ()
