"""Cut a captured forward into stages: the operations that each runs, the values that it sends on,
and the weights that it holds.

A cut assigns a stage to every operation, as ``solve.programs.stagecut`` does. From it follow:

    (1)  an operation that depends on the batch runs once, in its stage; a value that a later stage
         reads is sent on from stage to stage until the last one that reads it
    (2)  a value that does not depend on the batch (position biases, masks) is computed again by
         every stage that reads it; all of them hold the weights that it needs, as with tied weights
    (3)  every stage is given its rows of the batch, so inputs are not sent on
    (4)  a value made of the whole batch (``samples``) is computed by every stage that reads it,
         once in a step

A stage is a list of segments: the operations of each of its layers. Weights are gathered for one
segment at a time, and activations are recomputed by segment. (2) holds between segments as well as
between stages, so that no part of a gathered weight outlives its segment.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from argosy.errors import InputError, Problem, invalid
from argosy.runtime.graphs.samples import SampleDependence, divide
from argosy.workload.capture.forward import Forward
from argosy.workload.capture.write import DETACH
from argosy.workload.graph import OWN_GRADIENT, GraphNode, Role, references

_CAST = "aten._to_copy.default"
"""The operation that casts to another dtype, which autocast inserts."""
ADDED = (DETACH, OWN_GRADIENT)
"""Operations that only a captured forward has, in addition to those of the captured step."""


@dataclass(frozen=True)
class StagePart:
    """A stage of a cut forward; it lists operations by index and values by number."""

    operations: tuple[int, ...]
    receives: tuple[int, ...]
    sends: tuple[int, ...]
    weights: tuple[int, ...]
    buffers: tuple[int, ...]
    inputs: tuple[int, ...]
    updates: tuple[tuple[int, int], ...]
    """Pairs of a buffer or frozen weight and the value that it has after the step."""
    whole: tuple[int, ...]
    """Values that are computed from the whole batch."""
    whole_operations: tuple[int, ...]
    """The operations that compute these values."""


@dataclass(frozen=True)
class StageSegment:
    """Operations of a stage that are recomputed, and whose weights are gathered, together."""

    operations: tuple[int, ...]
    reads: frozenset[int]
    """Values that it reads and does not compute."""
    leaves: tuple[int, ...]
    """Values that are read after it."""


def _passed_on(node: GraphNode) -> Iterable[int]:
    """Return the values to which an operation passes gradients; with a backward of its own, these
    are only some of its inputs."""
    return references(node.arguments[1]) if node.op == OWN_GRADIENT else node.inputs


class GraphCut:
    """A forward with the stage that each of its operations belongs to."""

    def __init__(
        self,
        forward: Forward,
        stages: Sequence[int],
        num_stages: int,
        layers: Sequence[int] | None = None,
    ) -> None:
        """Cut a forward. ``layers`` holds the layer of each operation if stages consist of layers;
        otherwise a stage is one segment."""
        self.forward, self.num_stages = forward, num_stages
        self.layers = layers
        self.graph = forward.graph
        self.division = divide(forward)
        self.of_batch, self.places = self.division.of_batch, self.division.places
        self._given = tuple(stages)
        self.stages = self._with_loss_last(stages)
        self._check_order()

    def _with_loss_last(self, stages: Sequence[int]) -> tuple[int, ...]:
        """Return the stages with the loss in the last one; values that have no samples any more,
        such as its sums, move to the first stage that reads them."""
        assert self.graph.loss is not None
        moved = list(stages)
        moved[self.graph.producer[self.graph.loss]] = self.num_stages - 1
        for index in range(len(moved) - 1, -1, -1):
            made = [value for value in self.graph.nodes[index].outputs if value is not None]
            readers = [moved[reader] for value in made for reader in self.graph.consumers[value]]
            if readers and all(
                value in self.of_batch and value not in self.places for value in made
            ):
                moved[index] = max(moved[index], min(readers))
        return tuple(moved)

    def _check_order(self) -> None:
        if min(self.stages) < 0 or max(self.stages) >= self.num_stages:
            actual = f"stage {max(self.stages) if min(self.stages) >= 0 else min(self.stages)}"
            raise invalid("cut", actual, f"stages 0 to {self.num_stages - 1}")
        for index, node in enumerate(self.graph.nodes):
            for value in node.inputs:
                maker = self.graph.producer.get(value)
                late = (
                    maker is not None
                    and value in self.of_batch
                    and self.stages[maker] > self.stages[index]
                )
                if late and maker is not None and maker not in self.division.whole:
                    source = self.graph.nodes[maker].name
                    actual = f"{node.name} in stage {self.stages[index]}, which reads {source}"
                    expected = f"stage {self.stages[maker]} or a later one"
                    raise invalid("cut", actual, expected)

    @cached_property
    def differentiated(self) -> frozenset[int]:
        """Return the values to which the loss passes gradients.

        The inputs of all other values get no gradient, as in one process. Zeros would not be the
        same, because AdamW would decay a weight whose gradient is zero.
        """
        assert self.graph.loss is not None
        reached = {self.graph.loss}
        for node in reversed(self.graph.nodes):
            if node.op != DETACH and reached.intersection(node.outputs):
                reached.update(_passed_on(node))
        return frozenset(reached)

    @cached_property
    def parts(self) -> tuple[StagePart, ...]:
        return tuple(self._part(stage) for stage in range(self.num_stages))

    def _part(self, stage: int) -> StagePart:
        """Return what a stage runs, sends and holds by (1) to (4)."""
        graph, whole = self.graph, self.division.whole
        mine = [
            index
            for index, at in enumerate(self.stages)
            if at == stage and index not in whole and self._runs_once(index)
        ]
        early = {value for index in self._with_free(mine) for value in graph.nodes[index].inputs}
        mine += [
            graph.producer[after]
            for before, after in graph.updates
            if before in early and after not in self.of_batch
        ]
        made = {
            value for index in mine for value in graph.nodes[index].outputs if value is not None
        }
        updates = tuple(pair for pair in graph.updates if pair[1] in made)
        operations = self._with_free(mine)
        read = [value for index in operations for value in graph.nodes[index].inputs]
        loss = [graph.loss] if stage == self.num_stages - 1 and graph.loss is not None else []
        taken = sorted({value for value in (*read, *loss) if graph.producer.get(value) in whole})

        held = {*read, *(before for before, _ in updates)}

        def given(role: Role) -> tuple[int, ...]:
            return tuple(sorted({value for value in held if graph.values[value].role is role}))

        return StagePart(
            operations=operations,
            receives=self._crossing(stage - 1) if stage else (),
            sends=self._crossing(stage) if stage + 1 < self.num_stages else (),
            weights=given(Role.PARAMETER),
            buffers=given(Role.BUFFER),
            inputs=given(Role.INPUT),
            updates=updates,
            whole=tuple(taken),
            whole_operations=self._ancestors(taken),
        )

    @cached_property
    def segments(self) -> tuple[tuple[StageSegment, ...], ...]:
        """Return the segments of every stage."""
        return tuple(tuple(self._segments(stage)) for stage in range(self.num_stages))

    def _segments(self, stage: int) -> Iterator[StageSegment]:
        graph, part = self.graph, self.parts[stage]
        own: dict[int, list[int]] = {}
        for index in part.operations:
            if self._runs_once(index):
                own.setdefault(self._layer(index, stage), []).append(index)
        groups = [self._with_free(indices) for _, indices in sorted(own.items())]
        results = {*part.sends, *(after for _, after in part.updates), graph.loss}
        later = {
            value: at
            for at, group in enumerate(groups)
            for index in group
            for value in graph.nodes[index].inputs
        }
        for at, group in enumerate(groups):
            made = {
                value
                for index in group
                for value in graph.nodes[index].outputs
                if value is not None
            }
            once = {
                value
                for index in group
                if self._runs_once(index)
                for value in graph.nodes[index].outputs
                if value is not None
            }
            read = {value for index in group for value in graph.nodes[index].inputs}
            read |= {before for before, after in part.updates if after in made}
            leaves = sorted(
                value for value in once if value in results or later.get(value, at) > at
            )
            yield StageSegment(operations=group, reads=frozenset(read - made), leaves=tuple(leaves))

    def segment_layers(self, stage: int) -> list[int]:
        """Return the layer of every segment of a stage."""
        once = filter(self._runs_once, self.parts[stage].operations)
        return sorted({self._layer(index, stage) for index in once})

    def _layer(self, index: int, stage: int) -> int:
        """Return the layer of an operation, or the first layer of its stage if it was moved there
        from an earlier stage; 0 if stages do not consist of layers."""
        if self.layers is None:
            return 0
        return max(self.layers[index], self._first_layers.get(stage, 0))

    @cached_property
    def _first_layers(self) -> dict[int, int]:
        """Return the first layer of each stage."""
        assert self.layers is not None
        return {
            stage: layer
            for layer, stage in sorted(zip(self.layers, self._given, strict=True), reverse=True)
        }

    def _runs_once(self, index: int) -> bool:
        """Return whether an operation depends on the batch or counts steps."""
        return any(
            value in self.of_batch or value in self._counted
            for value in self.graph.nodes[index].outputs
        )

    @cached_property
    def _counted(self) -> frozenset[int]:
        return frozenset(after for _, after in self.graph.updates)

    def _ancestors(self, values: Sequence[int]) -> tuple[int, ...]:
        """Return all operations that given values are computed by."""
        ancestors: set[int] = set()
        todo = list(values)
        while todo:
            maker = self.graph.producer.get(todo.pop())
            if maker is not None and maker not in ancestors:
                ancestors.add(maker)
                todo += self.graph.nodes[maker].inputs
        return tuple(sorted(ancestors))

    def _with_free(self, mine: Sequence[int]) -> tuple[int, ...]:
        """Add to some operations those that compute their inputs and need no batch (2)."""
        wanted, todo = set(mine), list(mine)
        while todo:
            for value in self.graph.nodes[todo.pop()].inputs:
                maker = self.graph.producer.get(value)
                free = value not in self.of_batch and maker not in self.division.whole
                if maker is not None and maker not in wanted and free:
                    wanted.add(maker)
                    todo.append(maker)
        return tuple(sorted(wanted))

    def _crossing(self, boundary: int) -> tuple[int, ...]:
        """Return the values that stage ``boundary`` sends to the next."""
        crossing = []
        for value, maker in self.graph.producer.items():
            if value not in self.of_batch or maker in self.division.whole:
                continue
            readers = [self.stages[reader] for reader in self.graph.consumers[value]]
            if self.stages[maker] <= boundary < max(readers, default=-1):
                crossing.append(value)
        return tuple(sorted(crossing))

    def check_divided(self, replicas: Sequence[int], num_micro_batches: int) -> None:
        """Raise an ``InputError`` for the first operation whose result would depend on how samples
        are divided, and for values sent on whose samples are in no known order."""
        problem = next(
            itertools.chain(self._mixing(replicas, num_micro_batches), self._unordered()), None
        )
        if problem is not None:
            raise InputError([problem])

    def _unordered(self) -> Iterator[Problem]:
        for value in sorted({value for part in self.parts for value in part.sends}):
            if value not in self.places:
                node = self.graph.nodes[self.graph.producer[value]]
                stage = self.stages[self.graph.producer[value]]
                actual = (
                    "a value handed on whose samples are in no known order "
                    f"({node.op}, {node.source})"
                )
                yield Problem(f"stage {stage}", actual, "one dim with the samples in order")

    def _mixing(self, replicas: Sequence[int], num_micro_batches: int) -> Iterator[Problem]:
        kinds = self.division.kinds
        loss = self.graph.loss
        mixing = dict(self.division.mixing)
        for _, after in self.graph.updates:
            if kinds[after] not in (SampleDependence.FREE, SampleDependence.WHOLE):
                mixing.setdefault(
                    self.graph.producer[after], "changes a buffer depending on the samples"
                )
        if loss in self.graph.producer and kinds[loss] is SampleDependence.SAMPLES:
            mixing.setdefault(
                self.graph.producer[loss], "is the loss of one sample, and no mean or sum over all"
            )
        for index, how in sorted(mixing.items()):
            stage, node = self.stages[index], self.graph.nodes[index]
            if num_micro_batches > 1:
                why = f"the plan runs {num_micro_batches} micro-batches"
            elif replicas[stage] > 1:
                why = f"stage {stage} divides samples over {replicas[stage]} replicas"
            else:
                continue
            actual = f"{node.op} in {node.module or 'the loss'}, which {how}"
            expected = (
                "samples that are computed each by itself and a loss that is a mean or a sum, "
                f"because {why}"
            )
            suggestion = "a plan by `argosy plan --program` does not divide such a program"
            yield Problem(node.source or node.name, actual, expected, suggestion=suggestion)


def aligned(
    forward: Forward, stages: Sequence[int], plain: Forward | None = None
) -> tuple[int, ...]:
    """Return the stage of each operation of a forward, given the stages of a captured step.

    The step has no detachments, no backwards of its own and, unlike a forward traced under
    ``autocast``, no casts: these operations get the latest stage of their inputs.
    """
    expected = [node.op for node in (plain or forward).graph.nodes if node.op not in ADDED]
    if len(expected) != len(stages):
        actual = f"{len(stages)} operations"
        raise invalid(
            "cut",
            actual,
            f"{len(expected)}, the forward of the program",
            suggestion="make the plan from the model and batch that are trained",
        )
    result: list[int] = []
    at = 0
    for node in forward.graph.nodes:
        before = [
            result[forward.graph.producer[v]] for v in node.inputs if v in forward.graph.producer
        ]
        if node.op not in ADDED and at < len(expected) and node.op == expected[at]:
            result.append(stages[at])
            at += 1
        elif node.op in ADDED or node.op == _CAST:
            result.append(max(before, default=0))
        else:
            actual = f"{node.op} ({node.source})"
            wanted = expected[at] if at < len(expected) else "no further operation"
            raise invalid("cut", actual, wanted)
    return tuple(result)
