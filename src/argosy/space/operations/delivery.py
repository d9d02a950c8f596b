"""List the states in which a value is available: as it was made, and after at most one collective.

A value is *delivered* in a set of states: consumers take whichever of them they need, so one
all-gather serves all. From a replicated tensor any shard is a slice and a partial sum is "one
device keeps it", both free. An operation leaves a value in one state; a delivery takes

    (1)  partial -> whole          all-reduce            (2)  partial -> sharded      reduce-scatter
    (3)  sharded -> whole          all-gather            (4)  sharded -> other dim    all-to-all
    (5)  whole -> anything         a slice

A parameter is *stored* in one state, its gradient must be delivered in that state, and it is used
as stored or after one all-gather; gathering what is stored in shards is what ZeRO and a parameter
server do.
"""

from __future__ import annotations

from dataclasses import dataclass

from argosy.cost.group import GroupCollective
from argosy.space.operations.sharding import PARTIAL, REPLICATED, State
from argosy.workload.graph import Graph, Role


@dataclass(frozen=True)
class Delivery:
    """The states in which a value can be taken, and the one in which a parameter is stored."""

    states: tuple[State, ...]
    stored: State | None = None

    def __post_init__(self) -> None:
        # Unlike the hash of a string, this code is equal in every process.
        code = hash((self.states, 0 if self.stored is None else self.stored))
        object.__setattr__(self, "_code", code)

    def __hash__(self) -> int:
        return self._code  # type: ignore[attr-defined]

    @property
    def is_gathered(self) -> bool:
        """Return whether a parameter is stored in shards and used whole."""
        return self.stored is not None and self.stored not in self.states

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
    """Return what delivers a value that was made in a state, by (1) to (5).

    Return None if no single collective does.
    """
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
