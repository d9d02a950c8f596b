"""A stage of a captured program: the operations of its part of the forward, called one by one, differentiated by torch.

What is recomputed, put off or gathered is so for the stage as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from argosy.plan.plan import Recompute
from argosy.runtime.calls import filled, function, mask_key, random_mask, tensor_constants
from argosy.runtime.carry import Carry
from argosy.runtime.defer import Deferral
from argosy.runtime.graphcut import GraphCut
from argosy.runtime.moment import Moment
from argosy.runtime.parameters import Weight, places_of
from argosy.runtime.samples import Place, place_of_mask
from argosy.runtime.stage import LayerGate, deferring, recomputed
from argosy.workload.graph import Argument, Node, Ref, Role

_CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
MASK = "argosy.bernoulli.default"


class GraphStage:
    """A ``StageProgram`` made of operations."""

    def __init__(
        self, cut: GraphCut, index: int, model: nn.Module, *, recompute: Recompute, device: torch.device, seed: int
    ) -> None:
        self.cut, self.part = cut, cut.parts[index]
        self.is_last = index == cut.num_stages - 1
        self.recompute, self.device, self.seed = recompute, device, seed
        self.gate: LayerGate | None = None
        self.deferral: Deferral | None = None
        self.owners = {value: owner(model, cut.graph.values[value].name) for value in self.part.weights}
        self.buffers = {value: owner(model, cut.graph.values[value].name) for value in self.part.buffers}
        self.constants = tensor_constants(cut.graph, device)
        self.masked = dict(self._masked())
        """By the number of a mask, where the samples of what it masks are."""
        self.plain = {value: node.inputs[0] for value, node in self._transposed_weights()}
        self.draws = any(_is_random(cut.graph.nodes[index].op) for index in self.part.operations)

    @property
    def needs_batch(self) -> bool:
        return bool(self.part.inputs)

    @property
    def num_layers(self) -> int:
        return 1

    def users(self, weight: Weight) -> list[int]:
        del weight
        return [0]

    def _masked(self) -> Iterator[tuple[int, Place | None]]:
        for index in self.part.operations:
            node = self.cut.graph.nodes[index]
            if node.op == MASK:
                place, value = node.arguments[2], node.outputs[0]
                assert isinstance(place, int)
                assert value is not None
                yield place, place_of_mask(self.cut.forward, value, self.cut.places)

    def _transposed_weights(self) -> Iterator[tuple[int, Node]]:
        for index in self.part.operations:
            node = self.cut.graph.nodes[index]
            if node.op == "aten.t.default" and self.cut.graph.values[node.inputs[0]].role is Role.PARAMETER:
                for value in node.outputs:
                    if value is not None:
                        yield value, node

    def __call__(self, carry: Carry, batch: Any, moment: Moment) -> Carry:
        received = {
            value: self.cut.places[value].back(tensor)
            for value, tensor in zip(self.part.receives, carry or (), strict=True)
        }
        run = recomputed(self.recompute, deferring(self.deferral, _Once(self, batch, moment)), draws=self.draws)
        made = self.gate.run(0, run, (received,), {}) if self.gate is not None else run(received)
        if self.is_last:
            return made[0]
        return tuple(
            self.cut.places[value].to_front(tensor) for value, tensor in zip(self.part.sends, made, strict=True)
        )

    def given(self, batch: Any) -> dict[int, Any]:
        """Weights, buffers, constants and rows of the batch."""
        held: dict[int, Any] = dict(self.constants)
        held |= {value: module._parameters[name] for value, (module, name) in self.owners.items()}
        held |= {value: module._buffers[name] for value, (module, name) in self.buffers.items()}
        if self.part.inputs:
            leaves = {keystr(path): leaf for path, leaf in tree_flatten_with_path(batch)[0]}
            held |= {value: leaves[self.cut.graph.values[value].name] for value in self.part.inputs}
        return held

    def compute(self, held: dict[int, Any], moment: Moment) -> None:
        """Every operation of the stage; what they make joins what is held."""
        nodes = self.cut.forward.nodes(moment.samples)
        for index in self.part.operations:
            node = nodes[index]
            made = self._call(node, held, moment)
            parts = made if isinstance(made, (tuple, list)) else (made,)
            held.update({v: p for v, p in zip(node.outputs, parts, strict=True) if v is not None})

    def _call(self, node: Node, held: dict[int, Any], moment: Moment) -> Any:
        args = [self._fill(part, held) for part in node.arguments]
        if node.op == MASK:
            return self.mask(args, moment)
        weight = self.weight(node.arguments[-1] if node.arguments else None)
        keywords = {key: self._fill(part, held) for key, part in node.keywords}
        return apply(node.op, args, keywords, None if weight is None else held[weight])

    def mask(self, args: list[Any], moment: Moment, take: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """A random mask like its first argument; ``take`` gives this device's part of positions, where it is cut."""
        like, keep, place = args
        positions = _positions(like, self.masked[place], moment)
        key = mask_key(self.seed, moment.step, place)
        return random_mask(positions if take is None else take(positions), keep, key=key, dtype=like.dtype)

    def weight(self, argument: Argument) -> int | None:
        """The weight whose transpose an argument is."""
        return self.plain.get(argument.value) if isinstance(argument, Ref) else None

    def _fill(self, argument: Argument, held: dict[int, Any]) -> Any:
        return filled(argument, held.__getitem__, self.device)


def apply(op: str, args: list[Any], keywords: dict[str, Any], weight: Tensor | None) -> Any:
    """One operation; products with weights as what they were written as, so that their gradients can wait. ``weight``
    is the one whose transpose the last argument is."""
    if op == "aten.mm.default" and weight is not None:
        return F.linear(args[0], weight)
    if op == "aten.addmm.default" and weight is not None and not keywords:
        return F.linear(args[1], weight, args[0])
    if op == "aten.convolution.default" and not args[6]:
        x, kernel, bias, stride, padding, dilation, _, _, groups = args
        return _CONVOLUTIONS[len(stride)](x, kernel, bias, stride, padding, dilation, groups)
    return function(op)(*args, **keywords)


class _Once:
    """The operations of one micro-batch; buffers change only the first time they run."""

    def __init__(self, stage: GraphStage, batch: Any, moment: Moment) -> None:
        self.stage, self.batch, self.moment = stage, batch, moment
        self.has_run = False
        self.found: dict[int, Any] = {}

    def __call__(self, received: dict[int, Tensor]) -> list[Tensor]:
        stage, part = self.stage, self.stage.part
        held = {**stage.given(self.batch), **self.found, **received}
        stage.compute(held, self.moment)
        if not self.has_run:
            self.has_run = True
            for buffer, after in part.updates:
                self.found[buffer] = held[buffer].clone()
                held[buffer].copy_(held[after].detach())
        loss = stage.cut.graph.loss
        return [held[loss]] if stage.is_last and loss is not None else [held[value] for value in part.sends]


def _is_random(op: str) -> bool:
    """Whether an operation draws from torch's generators; masks do not."""
    return op != MASK and torch.Tag.nondeterministic_seeded in getattr(function(op), "tags", ())


def owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, last = name.rpartition(".")
    return model.get_submodule(path), last


def _positions(like: Tensor, place: Place | None, moment: Moment) -> Tensor:
    """Each element's place in the tensor of the whole global batch, samples first."""
    if place is None:
        return torch.arange(like.numel(), device=like.device).view(like.shape)
    front = place.to_front(torch.empty(like.shape, device="meta")).shape
    each = like.numel() // moment.samples
    first = torch.arange(moment.first_sample, moment.first_sample + moment.samples, device=like.device) * each
    return place.back((first[:, None] + torch.arange(each, device=like.device)).view(front))


def graph_weights(model: nn.Module, cut: GraphCut) -> tuple[Weight, ...]:
    """Every parameter of the model, tied ones once; those that no operation reads stay as they are, in stage 0."""
    stages: dict[str, list[int]] = {}
    for index, part in enumerate(cut.parts):
        for value in part.weights:
            stages.setdefault(cut.graph.values[value].name, []).append(index)
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    weights = []
    for name, parameter in model.named_parameters():
        if name not in stages:
            parameter.requires_grad_(False)
        others = tuple(other for other in aliases[id(parameter)] if other != name)
        weights.append(Weight(name, parameter, tuple(stages.get(name, [0])), places_of(model, parameter), others))
    return tuple(weights)
