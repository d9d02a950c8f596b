"""Make the stages by which a captured program is evaluated.

A program is captured as it trains. Its forward in eval mode has other operations: no dropout, and
running statistics in place of those of the batch. It is captured separately, and cut like the
training step:

    (1)  an operation that the training step has, too, in the same module and order, belongs to the
         same stage and layer
    (2)  any other operation belongs to the first stage that comes after its inputs and holds all
         weights and buffers that it reads
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher

from torch import nn

from argosy.errors import invalid
from argosy.plan.plan import Recompute
from argosy.runtime.graphs.cut import GraphCut
from argosy.runtime.graphs.samples import divide
from argosy.runtime.sources.maker import StageMaker
from argosy.runtime.sources.operations import GraphSource, mixes_samples
from argosy.runtime.stages.graph_stage import GraphStage
from argosy.workload.capture.forward import Forward
from argosy.workload.graph import Graph, GraphNode, Role

_HELD = (Role.PARAMETER, Role.BUFFER)


class EvaluationStages:
    """The stages of a captured program in eval mode, for the plan of a source."""

    def __init__(self, source: GraphSource, maker: StageMaker) -> None:
        self.source = source
        with _in_eval_mode(source.recipe.model):
            forward = maker.captured_now(source.plan)
        self.takes_short_batches = mixes_samples(forward) is None
        twins = _twins(source.cut.graph, forward.graph)
        stages = _stages(source.cut, forward, twins)
        layers = None if source.cut.layers is None else _layers(source.cut, forward, twins)
        self.cut = GraphCut(forward, stages, source.cut.num_stages, layers)
        self.cut.check_divided(
            [len(stage.replicas) for stage in source.plan.stages], source.plan.num_micro_batches
        )
        self._check()

    def _check(self) -> None:
        """Raise an ``InputError`` if a stage reads what it does not hold, or changes a buffer."""
        if self.cut.graph.updates:
            actual, expected = "a buffer that changes in eval mode", "buffers that stay as they are"
            raise invalid("evaluate", actual, expected)
        for index in range(self.cut.num_stages):
            missing = _held(self.cut, index) - _held(self.source.cut, index)
            if missing:
                actual = f"{min(missing)} in stage {index}, which does not hold it"
                expected = "a program that reads weights in the same order as in training"
                raise invalid("evaluate", actual, expected)

    def programs(self, trained: Mapping[int, GraphStage]) -> dict[int, GraphStage]:
        """Return the programs of a rank's stages, in place of those that train."""
        programs: dict[int, GraphStage] = {}
        for index, training in trained.items():
            program = GraphStage(
                self.cut,
                index,
                self.source.recipe.model,
                recompute=Recompute.NONE,
                device=training.device,
                seed=training.seed,
            )
            program.autocast, program.gate = training.autocast, training.gate
            if program.gate is not None:
                program.places = self._places(index)
            programs[index] = program
        return programs

    def _places(self, stage: int) -> list[int]:
        """Return, by segment of a stage, the one of the training step whose weights it reads."""
        layers = self.source.cut.segment_layers(stage)
        places = [
            max(0, bisect_right(layers, layer) - 1) for layer in self.cut.segment_layers(stage)
        ]
        for place, segment in zip(places, self.cut.segments[stage], strict=True):
            trained = self.source.cut.segments[stage][place].reads
            missing = _weights(self.cut, segment.reads) - _weights(self.source.cut, trained)
            if missing:
                actual = (
                    f"{min(missing)} in layer {layers[place]}, which does not read it in training"
                )
                raise invalid("evaluate", actual, "a plan without ZeRO 3")
        return places


@contextlib.contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.train(False)
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _weights(cut: GraphCut, values: Iterable[int]) -> set[str]:
    known = (cut.graph.values[value] for value in values)
    return {value.name for value in known if value.role is Role.PARAMETER}


def _held(cut: GraphCut, stage: int) -> set[str]:
    part = cut.parts[stage]
    return {cut.graph.values[value].name for value in (*part.weights, *part.buffers)}


def _twins(training: Graph, evaluation: Graph) -> list[int | None]:
    """Return, by operation in eval mode, the index of the training step's by (1)."""
    rows, own = (
        [(node.op, node.module) for node in graph.nodes] for graph in (training, evaluation)
    )
    twins: list[int | None] = [None] * len(own)
    for block in SequenceMatcher(None, rows, own, autojunk=False).get_matching_blocks():
        for at in range(block.size):
            twins[block.b + at] = block.a + at
    return twins


def _stages(cut: GraphCut, forward: Forward, twins: Sequence[int | None]) -> list[int]:
    """Return the stage of every operation by (1) and (2)."""
    names = [_held(cut, stage) for stage in range(cut.num_stages)]
    stages: list[int] = []
    of_batch = divide(forward).of_batch
    for node, twin in zip(forward.graph.nodes, twins, strict=True):
        before = _latest(stages, node, forward.graph, of_batch)
        if twin is not None:
            stages.append(max(before, cut.stages[twin]))
            continue
        values = (forward.graph.values[value] for value in node.inputs)
        read = {value.name for value in values if value.role in _HELD}
        own = (stage for stage in range(before, cut.num_stages) if read <= names[stage])
        stages.append(next(own, before))
    return stages


def _layers(cut: GraphCut, forward: Forward, twins: Sequence[int | None]) -> list[int]:
    """Return the layer of every operation by (1) and (2)."""
    assert cut.layers is not None
    readers: dict[str, set[int]] = {}
    for node, layer in zip(cut.graph.nodes, cut.layers, strict=True):
        for name in _weights(cut, node.inputs):
            readers.setdefault(name, set()).add(layer)
    layers: list[int] = []
    of_batch = divide(forward).of_batch
    for node, twin in zip(forward.graph.nodes, twins, strict=True):
        before = _latest(layers, node, forward.graph, of_batch)
        if twin is not None:
            layers.append(max(before, cut.layers[twin]))
            continue
        values = (forward.graph.values[value] for value in node.inputs)
        read = [readers.get(value.name, set()) for value in values if value.role is Role.PARAMETER]
        later = [min((at for at in own if at >= before), default=before) for own in read]
        layers.append(max(later, default=before))
    return layers


def _latest(numbers: Sequence[int], node: GraphNode, graph: Graph, of_batch: set[int]) -> int:
    """Return the largest number of the operations that compute a node's inputs from the batch.

    Every stage that reads a value of weights alone computes it again.
    """
    read = of_batch.intersection(node.inputs)
    makers = (graph.producer[value] for value in read if value in graph.producer)
    return max((numbers[maker] for maker in makers), default=0)
