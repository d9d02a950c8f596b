"""Run a stage of a captured program: call the operations of its part of the forward one by one;
torch differentiates them.

Recomputation, deferred gradients and gathered weights work segment by segment (``graphs.cut``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from argosy.plan.plan import Recompute
from argosy.runtime.graphs.calls import (
    RANDOM,
    drawn,
    filled,
    function,
    results,
    run_node,
    tensor_constants,
)
from argosy.runtime.graphs.cut import GraphCut, StageSegment
from argosy.runtime.graphs.samples import SampleDependence, SampleDim
from argosy.runtime.stages.carry import Carry
from argosy.runtime.stages.compiling import CompiledOperations
from argosy.runtime.stages.defer import Deferral
from argosy.runtime.stages.moment import Moment
from argosy.runtime.stages.parameters import Catalogue, Weight
from argosy.runtime.stages.stage import LayerGate, deferring, recomputed
from argosy.workload.capture.modules import called, module_path
from argosy.workload.graph import MODULE, OWN_GRADIENT, Argument, GraphNode, OwnGradient, Ref, Role

OwnBackward = Callable[[Sequence[Tensor]], list[Tensor]]
"""A function from gradients of results to gradients of inputs."""
_CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
"""Convolutions by their number of spatial dims."""


class GraphStage:
    """A ``StageProgram`` that is made of operations."""

    def __init__(
        self,
        cut: GraphCut,
        index: int,
        model: nn.Module,
        *,
        recompute: Recompute,
        device: torch.device,
        seed: int,
        is_compiled: bool = False,
    ) -> None:
        self.cut, self.part, self.segments = cut, cut.parts[index], cut.segments[index]
        self.is_last = index == cut.num_stages - 1
        self.recompute, self.device, self.seed = recompute, device, seed
        self.gate: LayerGate | None = None
        self.places: Sequence[int] = range(len(self.segments))
        """The parts of the gate that gather the weights of the segments."""
        self.deferral: Deferral | None = None
        self.owners = {
            value: owner(model, cut.graph.values[value].name) for value in self.part.weights
        }
        self.buffers = {
            value: owner(model, cut.graph.values[value].name) for value in self.part.buffers
        }
        self.constants = tensor_constants(cut.graph, device)
        self.whole: dict[int, Tensor] = {}
        """Values that are computed from the whole batch of this step."""
        self.changed: dict[int, Tensor] = {}
        """The values of buffers after this step."""
        self.plain = {value: node.inputs[0] for value, node in self._transposed_weights()}
        self.compiled = CompiledOperations(self) if is_compiled else None
        self.model = model
        self.autocast: torch.dtype | None = None
        """The dtype of products in modules that are called as one operation, if it is not that of
        their weights."""

    def begin(self, batch: Any, moment: Moment) -> None:
        """Compute the values that depend on the whole batch."""
        self.changed.clear()
        if not self.part.whole:
            return
        graph = self.cut.graph
        leaves = {keystr(path): leaf for path, leaf in tree_flatten_with_path(batch)[0]}
        held: dict[int, Any] = dict(self.constants)
        nodes = self.cut.forward.nodes(moment.samples)
        read = {value for index in self.part.whole_operations for value in nodes[index].inputs}
        inputs = [value for value in read if graph.values[value].role is Role.INPUT]
        held |= {value: leaves[graph.values[value].name].to(self.device) for value in inputs}
        with torch.no_grad():
            for index in self.part.whole_operations:
                held.update(results(nodes[index], self._call(nodes[index], held, moment)))
        self.whole = {value: held[value] for value in self.part.whole}

    def finish(self) -> None:
        """Change buffers, once for all micro-batches, after the last backward that reads them."""
        with torch.no_grad():
            for value, after in self.changed.items():
                held = self._held(value)
                assert held is not None
                held.copy_(after)

    def _held(self, value: int) -> Tensor | None:
        """Return the current tensor of a weight or buffer of the stage."""
        if value in self.owners:
            module, name = self.owners[value]
            return module._parameters[name]
        module, name = self.buffers[value]
        return module._buffers[name]

    @property
    def needs_batch(self) -> bool:
        return bool(self.part.inputs)

    @property
    def num_layers(self) -> int:
        return len(self.segments)

    def users(self, weight: Weight) -> list[int]:
        return segments_with(self.cut, self.segments, weight)

    def _transposed_weights(self) -> Iterator[tuple[int, GraphNode]]:
        for index in self.part.operations:
            node = self.cut.graph.nodes[index]
            if (
                node.op == "aten.t.default"
                and self.cut.graph.values[node.inputs[0]].role is Role.PARAMETER
            ):
                for value in node.outputs:
                    if value is not None:
                        yield value, node

    def __call__(self, carry: Carry, batch: Any, moment: Moment) -> Carry:
        received = {
            value: self.cut.places[value].back(tensor)
            for value, tensor in zip(self.part.receives, carry or (), strict=True)
        }

        held: dict[Any, Any] = {**self.given(batch, moment), **received}
        segments = (self.joined,) if self._is_joined() else self.segments
        for at, segment in zip(self.places, segments, strict=False):
            once = partial(self.run_segment, segment, moment=moment)
            run = recomputed(self.recompute, deferring(self.deferral, once), draws=False)
            given = self.read_by(segment, held)
            held.update(
                self.gate.run(at, run, (given,), {}) if self.gate is not None else run(given)
            )
        for buffer, after in self.part.updates:
            self.changed.setdefault(buffer, held[after].detach())
        if self.is_last:
            assert self.cut.graph.loss is not None
            result: Tensor = held[self.cut.graph.loss]
            return result
        return tuple(
            self.cut.places[value].to_front(self._sent(value, held[value]))
            for value in self.part.sends
        )

    def _sent(self, value: int, tensor: Tensor) -> Tensor:
        """Return a value for later stages, detached if no gradient reaches it."""
        return tensor if value in self.cut.differentiated else tensor.detach()

    def _is_joined(self) -> bool:
        """Return whether the stage is compiled as one graph: nothing happens between its
        segments."""
        return self.compiled is not None and self.gate is None and self.recompute is Recompute.NONE

    @cached_property
    def joined(self) -> StageSegment:
        """Return all segments of the stage as one."""
        nodes = [self.cut.graph.nodes[index] for index in self.part.operations]
        made = {value for node in nodes for value in node.outputs}
        loss = [self.cut.graph.loss] if self.is_last and self.cut.graph.loss is not None else []
        leaves = dict.fromkeys(
            [*self.part.sends, *(after for _, after in self.part.updates), *loss]
        )
        reads = {value for segment in self.segments for value in segment.reads} - made
        return StageSegment(self.part.operations, frozenset(reads), tuple(leaves))

    def read_by(self, segment: StageSegment, held: dict[Any, Any]) -> dict[Any, Any]:
        """Return the held values that a segment reads."""
        return {value: held[value] for value in segment.reads if value in held}

    def run_segment(
        self, segment: StageSegment, given: dict[Any, Any], *, moment: Moment
    ) -> dict[Any, Any]:
        """Run a segment and return the values that are read after it.

        Its weights and buffers are read here, since they are only now gathered.
        """
        own = {
            value: self._held(value)
            for value in segment.reads
            if value in self.owners or value in self.buffers
        }
        return self.compute(segment, {**given, **own}, moment)

    def given(self, batch: Any, moment: Moment) -> dict[int, Any]:
        """Return constants, and the rows of the batch and of values computed from the whole
        batch."""
        held: dict[int, Any] = dict(self.constants)
        for value, tensor in self.whole.items():
            place = self.cut.places.get(value)
            held[value] = tensor if place is None else _rows_at(tensor, place, moment)
        if self.part.inputs:
            leaves = {keystr(path): leaf for path, leaf in tree_flatten_with_path(batch)[0]}
            held |= {value: leaves[self.cut.graph.values[value].name] for value in self.part.inputs}
        return held

    def compute(
        self, segment: StageSegment, held: dict[Any, Any], moment: Moment
    ) -> dict[Any, Any]:
        """Run the operations of a segment and return the values that are read after it."""
        if self.compiled is not None:
            return self.compiled.run(segment, held, moment)
        nodes = self.cut.forward.nodes(moment.samples, moment.total)
        for index in segment.operations:
            node = nodes[index]
            made = self._call(node, held, moment)
            parts = self.scaled(index, made if isinstance(made, (tuple, list)) else (made,), moment)
            results = zip(node.outputs, parts, strict=True)
            held.update({value: part for value, part in results if value is not None})
        return {value: held[value] for value in segment.leaves}

    def scaled(self, index: int, parts: Sequence[Any], moment: Moment) -> Sequence[Any]:
        """Return the results of an operation, with sums over the samples of this part scaled as if
        over all samples (``samples``, (4))."""
        if index not in self.cut.division.totals or moment.samples == moment.total:
            return parts
        kinds, outputs = self.cut.division.kinds, self.cut.graph.nodes[index].outputs
        totals = [value is not None and kinds[value] is SampleDependence.TOTAL for value in outputs]
        factor = moment.total / moment.samples
        return [part * factor if total else part for part, total in zip(parts, totals, strict=True)]

    def _call(self, node: GraphNode, held: dict[int, Any], moment: Moment) -> Any:
        args = [self._fill(part, held) for part in node.arguments]
        if node.op in RANDOM:
            return self.drawn(node, args, moment)
        if node.op == OWN_GRADIENT:
            return self.own_gradient(node, args, moment)
        if node.op == MODULE:
            return self.through_module(node, args)
        call = self.resolved(node, held)
        return call.function(*call.arguments, **call.keywords)

    def resolved(self, node: GraphNode, held: dict[int, Any]) -> FunctionCall:
        """Return the function call of an operation whose inputs are held."""
        args = [self._fill(part, held) for part in node.arguments]
        weight = self.weight(node.arguments[-1] if node.arguments else None)
        keywords = {key: self._fill(part, held) for key, part in node.keywords}
        return resolved(node.op, args, keywords, None if weight is None else held[weight])

    def drawn(
        self,
        node: GraphNode,
        args: list[Any],
        moment: Moment,
        take: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Return random numbers shaped like the first argument; ``take`` returns this device's part
        of the positions if the tensor is cut."""
        value = node.outputs[0]
        assert value is not None
        positions = _positions(args[0], self.cut.places.get(value), moment)
        places = positions if take is None else take(positions)
        return drawn(node.op, args, places, seed=self.seed, step=moment.step)

    def through_module(self, node: GraphNode, args: list[Any]) -> list[Tensor | None]:
        """Return what a module returns, and nothing for what it keeps. The module reads its own
        parameters, and sends tokens to other devices if they have some of its experts."""
        given, _, call, *_ = args
        module = self.model.get_submodule(module_path(call))
        with torch.autocast(
            self.device.type, self.autocast, enabled=self.autocast is not None, cache_enabled=False
        ):
            return [*called(module, call, given), None]

    def own_gradient(self, node: GraphNode, args: list[Any], moment: Moment) -> Any:
        """Return results whose gradients are computed by the operations that the program's own
        backward was traced as."""
        results, inputs, saved, number = args
        own = self.cut.graph.own_gradients[number]
        nodes = self.cut.forward.own_gradient(number, moment.samples, moment.total)
        read = node.inputs[len(results) + len(inputs) :]
        held = {
            **self.constants,
            **dict(zip(read, (tensor.detach() for tensor in saved), strict=True)),
        }

        def backward(gradients: Sequence[Tensor]) -> list[Tensor]:
            computed: dict[int, Any] = {**held, **dict(zip(own.given, gradients, strict=True))}
            for inner in nodes:
                run_node(inner, computed, self.device)
            return [computed[value] for value in own.gradients]

        whole = self.on_whole(own, backward)
        return _OwnGradient.apply(whole, len(results), *results, *inputs)

    def on_whole(self, own: OwnGradient, backward: OwnBackward) -> OwnBackward:
        """Return a backward that is applied to whole gradients, as they are in this stage."""
        return backward

    def weight(self, argument: Argument) -> int | None:
        """Return the weight whose transpose an argument is, or None."""
        return self.plain.get(argument.value) if isinstance(argument, Ref) else None

    def _fill(self, argument: Argument, held: dict[int, Any]) -> Any:
        return filled(argument, held.__getitem__, self.device)


class FunctionCall(NamedTuple):
    """A function with the arguments that it is called with."""

    function: Callable[..., Any]
    arguments: list[Any]
    keywords: dict[str, Any]


def apply(op: str, args: list[Any], keywords: dict[str, Any], weight: Tensor | None) -> Any:
    """Call the function of one operation (``resolved``)."""
    call = resolved(op, args, keywords, weight)
    return call.function(*call.arguments, **call.keywords)


def resolved(op: str, args: list[Any], keywords: dict[str, Any], weight: Any) -> FunctionCall:
    """Return the function call of one operation.

    Products with weights become the functions that they were written as, so that their gradients
    can be deferred. ``weight`` is the one whose transpose the last argument is.
    """
    if op == "aten.mm.default" and weight is not None:
        return FunctionCall(F.linear, [args[0], weight], {})
    if op == "aten.addmm.default" and weight is not None and not keywords:
        return FunctionCall(F.linear, [args[1], weight, args[0]], {})
    if op == "aten.convolution.default" and not args[6]:
        x, kernel, bias, stride, padding, dilation, _, _, groups = args
        return FunctionCall(
            _CONVOLUTIONS[len(stride)], [x, kernel, bias, stride, padding, dilation, groups], {}
        )
    return FunctionCall(function(op), args, keywords)


class _OwnGradient(torch.autograd.Function):
    """An identity on results whose backward is a given function of their gradients."""

    @staticmethod
    def forward(
        ctx: Any, backward: Callable[..., list[Tensor]], count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.find, ctx.count = backward, count
        results = tuple(tensor.view_as(tensor) for tensor in tensors[:count])
        integral = [
            result
            for result in results
            if not result.is_floating_point() and not result.is_complex()
        ]
        ctx.mark_non_differentiable(*integral)
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (None, None, *[None] * ctx.count, *ctx.find(gradients))


def segments_with(cut: GraphCut, segments: Sequence[StageSegment], weight: Weight) -> list[int]:
    """Return the segments that read a weight."""
    values = cut.graph.values
    own = {
        number
        for number, value in enumerate(values)
        if value.role is Role.PARAMETER and value.name == weight.name
    }
    return [at for at, segment in enumerate(segments) if not own.isdisjoint(segment.reads)]


def expert_modules_of(cut: GraphCut, model: nn.Module) -> dict[int, list[nn.Module]]:
    """Return the modules of experts whose experts devices can share, by stage."""
    modules: dict[int, dict[int, nn.Module]] = {}
    for node, stage in zip(cut.graph.nodes, cut.stages, strict=True):
        if node.num_experts:
            module = model.get_submodule(module_path(str(node.arguments[2])))
            modules.setdefault(stage, {})[id(module)] = module
    return {stage: list(own.values()) for stage, own in modules.items()}


def owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, last = name.rpartition(".")
    return model.get_submodule(path), last


def _rows_at(whole: Tensor, place: SampleDim, moment: Moment) -> Tensor:
    """Return the rows of a part; those of samples that fill up a short batch are the last ones."""
    first, end = moment.first_sample, moment.first_sample + moment.samples
    if end <= moment.total:
        return place.rows(whole, first, moment.samples)
    numbers = torch.arange(first, end, device=whole.device).clamp(max=moment.total - 1)
    return place.back(place.to_front(whole)[numbers])


def _positions(like: Tensor, place: SampleDim | None, moment: Moment) -> Tensor:
    """Return each element's position in the tensor of the whole global batch, samples first."""
    if place is None:
        return torch.arange(like.numel(), device=like.device).view(like.shape)
    front = place.to_front(torch.empty(like.shape, device="meta")).shape
    elements = like.numel() // moment.samples
    first = (
        torch.arange(moment.first_sample, moment.first_sample + moment.samples, device=like.device)
        * elements
    )
    return place.back((first[:, None] + torch.arange(elements, device=like.device)).view(front))


def graph_weights(catalogue: Catalogue, cut: GraphCut) -> tuple[Weight, ...]:
    """Return every parameter of the model; those that no operation reads are frozen, in stage 0."""
    stages: dict[str, list[int]] = {}
    for index, part in enumerate(cut.parts):
        for value in part.weights:
            stages.setdefault(cut.graph.values[value].name, []).append(index)
    for weight in catalogue.weights:
        if weight.name not in stages:
            weight.parameter.requires_grad_(False)
    return tuple(
        replace(weight, stages=tuple(stages.get(weight.name, [0]))) for weight in catalogue.weights
    )
