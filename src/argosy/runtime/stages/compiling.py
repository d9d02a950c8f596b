"""Compile stages by ``torch.compile``: a stage becomes one graph; in the last stage, all but its
last layer does.

    (1)  layers      The first run of a stage is eager and finds which layers draw random masks.
                     Without masks and without a gate around layers (ZeRO 2 and 3), the stage is
                     compiled as a whole; otherwise layer by layer, and layers with masks stay
                     eager: their masks depend on step and sample, not on a generator. The model's
                     last layer and the loss stay eager too, since their calls are watched
                     (``weighing``).
    (2)  operations  The operations of a captured program are written as a torch.fx graph, one for
                     each number of samples; layer by layer if they are recomputed or gathered.
                     Random numbers are drawn before, by the same rule, and passed to the graph.

A compiled backward is one piece, so a schedule that splits backwards cannot run compiled stages;
neither can collectives run inside one, as in tensor-parallel groups. Shapes are fixed: another
number of samples is compiled again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from argosy.errors import Problem, invalid, raise_any
from argosy.plan.plan import Plan
from argosy.runtime.graphs.calls import RANDOM, function
from argosy.runtime.stages.moment import Moment
from argosy.workload.graph import MODULE, OWN_GRADIENT

if TYPE_CHECKING:
    from argosy.runtime.graphs.cut import StageSegment
    from argosy.runtime.stages.graph_stage import GraphStage

BACKEND = "inductor"
"""The backend of torch.compile."""
# Compiled variants that one function may have, since the stages and layers of a rank share it;
# beyond its own limit of 8 torch would run eagerly.
_MOST_VARIANTS = 256


def compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _MOST_VARIANTS)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, _MOST_VARIANTS)
    return torch.compile(call, backend=BACKEND, dynamic=False)


def check_compilable(plan: Plan) -> None:
    """Raise an ``InputError`` that lists what in a plan compiled stages cannot run."""
    problems = []
    if plan.schedule.kind.is_split:
        expected = (
            "a schedule that does not split backwards, because a compiled backward is one piece"
        )
        problems.append(Problem("schedule", str(plan.schedule.kind), expected))
    for index, stage in enumerate(plan.stages):
        for name, value in (
            ("tensor width", max(replica.width for replica in stage.replicas) // stage.context),
            ("context", stage.context),
            ("expert", stage.expert),
        ):
            if value > 1:
                expected = (
                    f"{name} 1 for compiled stages, because devices exchange tensors inside a stage"
                )
                problems.append(Problem(f"stages[{index}]", f"{name} {value}", expected))
        if stage.offload.activations is not None:
            expected = (
                "no offload of activations for compiled stages, "
                "which keep them in graphs of their own"
            )
            problems.append(Problem(f"stages[{index}].offload", "activations", expected))
    raise_any(problems)


def _check_no_module(stage: GraphStage) -> None:
    nodes = (stage.cut.graph.nodes[index] for index in stage.part.operations)
    node = next((node for node in nodes if node.op == MODULE), None)
    if node is not None:
        actual = f"{node.module}, whose operations depend on data"
        raise invalid("program", actual, "operations that can be compiled; leave out --compile")


class CompiledOperations:
    """The compiled operations of one stage, which run as graphs (2)."""

    def __init__(self, stage: GraphStage) -> None:
        self.stage = stage
        self.random = {
            index for index in stage.part.operations if stage.cut.graph.nodes[index].op in RANDOM
        }
        own = [
            index
            for index in stage.part.operations
            if stage.cut.graph.nodes[index].op == OWN_GRADIENT
        ]
        if own:
            node = stage.cut.graph.nodes[own[0]]
            actual = f"a backward of the program's own ({node.source or node.name})"
            expected = "operations that torch differentiates, for stages that are compiled"
            raise invalid("program", actual, expected)
        _check_no_module(stage)
        self.graphs: dict[
            tuple[StageSegment, int, int], tuple[tuple[int, ...], Callable[..., Any]]
        ] = {}
        """By segment, samples of this part and samples of all: the values that are passed, and the
        compiled call."""

    def run(self, segment: StageSegment, held: dict[int, Any], moment: Moment) -> dict[int, Any]:
        """Run a segment and return the values that are read after it."""
        self._draw(segment, held, moment)
        key = (segment, moment.samples, moment.total)
        if key not in self.graphs:
            self.graphs[key] = self._written(segment, held, moment)
        given, call = self.graphs[key]
        results: Sequence[Tensor] = call(*(held[value] for value in given))
        return dict(zip(segment.leaves, results, strict=True))

    def _draw(self, segment: StageSegment, held: dict[int, Any], moment: Moment) -> None:
        graph, forward = self.stage.cut.graph, self.stage.cut.forward
        for index in self.random.intersection(segment.operations):
            node = forward.nodes(moment.samples, moment.total)[index]
            like, value = node.inputs[0], node.outputs[0]
            assert value is not None
            dtype = getattr(torch, graph.values[like].dtype)
            shape = forward.shape(like, moment.samples)
            given = torch.empty((), dtype=dtype, device=self.stage.device).expand(shape)
            held[value] = self.stage.drawn(node, [given, *node.arguments[1:]], moment)

    def _written(
        self, segment: StageSegment, held: dict[int, Any], moment: Moment
    ) -> tuple[tuple[int, ...], Callable[..., Any]]:
        stage, graph = self.stage, fx.Graph()
        tracer = fx.proxy.GraphAppendingTracer(graph)
        given = tuple(value for value, tensor in held.items() if isinstance(tensor, Tensor))
        known: dict[int, Any] = dict(held)
        known |= {value: fx.Proxy(graph.placeholder(f"value_{value}"), tracer) for value in given}
        nodes = stage.cut.forward.nodes(moment.samples, moment.total)
        for index in segment.operations:
            if index in self.random:
                continue
            node = nodes[index]
            call = stage.resolved(node, known)
            result = tracer.create_proxy(
                "call_function", call.function, tuple(call.arguments), call.keywords
            )
            is_several = len(node.outputs) > 1 or _makes_list(node.op)
            several: Any = result
            parts = [several[at] for at in range(len(node.outputs))] if is_several else [result]
            parts = list(stage.scaled(index, parts, moment))
            known.update({v: p for v, p in zip(node.outputs, parts, strict=True) if v is not None})
        graph.output([known[value].node for value in segment.leaves])
        return given, compiled(fx.GraphModule(torch.nn.Module(), graph))


def _makes_list(op: str) -> bool:
    """Return whether an operation returns a list of tensors, even if it has one element."""
    schema = getattr(function(op), "_schema", None)
    return schema is not None and any("List" in str(result.type) for result in schema.returns)
