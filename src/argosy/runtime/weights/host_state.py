"""Keep optimizer state in host memory, and bring it to the device piece by piece in an update.

A piece is up to ``PIECE_BYTES`` of state: several weights, or, for optimizers that treat every
element alone, a part of one. While a piece is updated the next one arrives and the one before
leaves, on streams of their own; the device has two pieces at most. The arithmetic is the
optimizer's own, on the device, so the result is the same to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from argosy.cost.memory import PIECE_BYTES, UPDATED_BYTES
from argosy.runtime.weights.host_memory import CopyStream, HostBuffers

_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        "Adadelta",
        "Adagrad",
        "Adam",
        "Adamax",
        "AdamW",
        "ASGD",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    )
)
"""Optimizers that update every element from its own gradient and state alone."""
# Bytes of state per element that are assumed before there is any state, as for Adam in float32.
_USUAL_WIDTH = 8


@dataclass(eq=False)
class UpdatePart:
    """Elements of a weight that are updated together; all of them unless it is cut."""

    group: int
    weight: nn.Parameter
    begin: int
    end: int
    updated: nn.Parameter
    """The weight itself, or a view of these elements."""

    @property
    def is_whole(self) -> bool:
        return self.updated is self.weight


@dataclass(eq=False)
class UpdatePiece:
    """A group of parts that are updated together."""

    parts: list[UpdatePart]
    arrived: list[torch.cuda.Event | None] = field(default_factory=list)
    left: list[torch.cuda.Event | None] = field(default_factory=list)
    state: list[dict[str, Any]] = field(default_factory=list)
    """The state of each part, on the device."""


class HostState:
    """An optimizer's state that is kept in host memory."""

    def __init__(self, device: torch.device, memory: HostBuffers) -> None:
        self.device = device
        self.memory = memory
        self.inward, self.outward = CopyStream(device), CopyStream(device)
        self.before: dict[nn.Parameter, dict[str, Any]] = {}
        """The state of the weights before the current update."""
        self.after: dict[nn.Parameter, dict[str, Any]] = {}
        """The state of the weights in host memory after the current update."""

    def step(self, optimizer: Optimizer) -> None:
        """Update all weights that have a gradient."""
        groups = [group["params"] for group in optimizer.param_groups]
        pieces = list(self._pieces(optimizer))
        weights = dict.fromkeys(part.weight for piece in pieces for part in piece.parts)
        self.before = {weight: optimizer.state.pop(weight, {}) for weight in weights}
        self.after = {weight: dict(state) for weight, state in self.before.items()}
        try:
            for at, piece in enumerate(pieces):
                if at:
                    self._let_go(pieces[at - 1])
                else:
                    self._bring(piece)
                if at + 1 < len(pieces):
                    self._bring(pieces[at + 1])
                self._update(optimizer, piece)
        finally:
            for group, parameters in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = parameters
            optimizer.state.update({weight: state for weight, state in self.after.items() if state})
            self.before, self.after = {}, {}
        if pieces:
            self._let_go(pieces[-1])
        self.outward.finish()

    def _pieces(self, optimizer: Optimizer) -> Iterator[UpdatePiece]:
        cuts = type(optimizer) in _ELEMENTWISE
        parts: list[UpdatePart] = []
        room = PIECE_BYTES
        for number, group in enumerate(optimizer.param_groups):
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                width = max(1, _state_width(optimizer, weight))
                is_flat = weight.is_contiguous() and weight.grad.is_contiguous()
                most = max(1, PIECE_BYTES // width) if cuts and is_flat else weight.numel()
                for part in _cut(number, weight, most):
                    size = (part.end - part.begin) * width
                    if parts and size > room:
                        yield UpdatePiece(parts)
                        parts, room = [], PIECE_BYTES
                    parts.append(part)
                    room -= size
        if parts:
            yield UpdatePiece(parts)

    def _bring(self, piece: UpdatePiece) -> None:
        """Begin to copy the state of a piece to the device."""
        for part in piece.parts:
            state: dict[str, Any] = {}
            for name, value in self.before[part.weight].items():
                state[name] = value
                if _is_divided(value, part.weight):
                    source = value if part.is_whole else value.view(-1)[part.begin : part.end]
                    state[name] = torch.empty_like(source, device=self.device)
                    piece.arrived.append(self.inward.copy(state[name], source))
                elif isinstance(value, Tensor) and not part.is_whole:
                    # for example a step count, which every part increases
                    state[name] = value.clone()
                elif isinstance(value, Tensor) and value.dim():
                    state[name] = value.to(self.device)
            piece.state.append(state)

    def _update(self, optimizer: Optimizer, piece: UpdatePiece) -> None:
        for event in piece.arrived:
            self.inward.await_copy(event)
        for part, state in zip(piece.parts, piece.state, strict=True):
            if state:
                optimizer.state[part.updated] = state
            if not part.is_whole:
                gradient = part.weight.grad
                assert gradient is not None
                part.updated.grad = gradient.view(-1)[part.begin : part.end]
        for number, group in enumerate(optimizer.param_groups):
            group["params"] = [part.updated for part in piece.parts if part.group == number]
        optimizer.step()
        piece.state = [optimizer.state.pop(part.updated, {}) for part in piece.parts]
        for part, state in zip(piece.parts, piece.state, strict=True):
            kept = self.after[part.weight]
            for name, value in state.items():
                kept[name] = self._sent(piece, part, kept.get(name), value)

    def _sent(self, piece: UpdatePiece, part: UpdatePart, kept: Any, value: Any) -> Any:
        """Return where a value of the state is kept: in host memory if it has the shape of what was
        updated."""
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        if not _is_divided(value, part.updated):
            return value.to("cpu")
        if not self.memory.holds(kept):
            kept = self.memory.empty(part.weight.shape, value.dtype)
        target = kept if part.is_whole else kept.view(-1)[part.begin : part.end]
        piece.left.append(self.outward.copy(target, value))
        return kept

    def _let_go(self, piece: UpdatePiece) -> None:
        """Free a piece's memory on the device once it is copied back."""
        for event in piece.left:
            self.outward.await_copy(event)
        piece.state, piece.left, piece.arrived = [], [], []


def update_weights(optimizer: Optimizer, state: HostState | None) -> None:
    """Make one step of an optimizer, whose state is in host memory unless ``state`` is None.

    State on the device is updated in groups of weights, because torch's update of many weights at
    once holds a copy of all of them for a moment. Every weight is updated as in a single call.
    """
    if state is not None:
        state.step(optimizer)
        return
    groups = [group["params"] for group in optimizer.param_groups]
    if not _has_temporary_copies(optimizer):
        optimizer.step()
        return
    try:
        for parts in list(_updated_together(optimizer)):
            for group, parameters in zip(optimizer.param_groups, parts, strict=True):
                group["params"] = parameters
            optimizer.step()
    finally:
        for group, parameters in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = parameters


def _has_temporary_copies(optimizer: Optimizer) -> bool:
    """Return whether an update is known to treat every weight alone and to hold copies of all."""
    if type(optimizer) not in _ELEMENTWISE:
        return False
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False
    return not all(group.get("fused") for group in optimizer.param_groups)


def _updated_together(optimizer: Optimizer) -> Iterator[list[list[nn.Parameter]]]:
    """Yield, for every call of the optimizer, the weights of each of its groups, up to
    ``UPDATED_BYTES`` of state or one weight."""
    empty: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
    parts, room = [list(part) for part in empty], UPDATED_BYTES
    for number, group in enumerate(optimizer.param_groups):
        for weight in group["params"]:
            size = 0 if weight.grad is None else weight.numel() * _state_width(optimizer, weight)
            if size > room and any(parts):
                yield parts
                parts, room = [list(part) for part in empty], UPDATED_BYTES
            parts[number].append(weight)
            room -= size
    yield parts


def _state_width(optimizer: Optimizer, weight: nn.Parameter) -> int:
    """Return the bytes of state per element of a weight."""
    state = optimizer.state.get(weight)
    if not state:
        return _USUAL_WIDTH
    return sum(value.element_size() for value in state.values() if _is_divided(value, weight))


def _is_divided(value: Any, weight: nn.Parameter) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == weight.shape


def _cut(group: int, weight: nn.Parameter, most: int) -> Iterator[UpdatePart]:
    if weight.numel() <= most:
        yield UpdatePart(group, weight, 0, weight.numel(), weight)
        return
    flat = weight.detach().view(-1)
    for begin in range(0, weight.numel(), most):
        end = min(begin + most, weight.numel())
        yield UpdatePart(group, weight, begin, end, nn.Parameter(flat[begin:end]))
