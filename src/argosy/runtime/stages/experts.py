"""Share experts among devices: tokens are sent to the devices that hold their experts, and results
are sent back.

Modules of experts have the form that ``workload.capture.experts`` describes. With e devices, each
of which holds some consecutive experts:

    (1)  a token is sent once for each of its experts, in their order: an all-to-all
    (2)  every device runs its own experts on the tokens it received, with weights of 1
    (3)  results are sent back the same way, multiplied by their weights and added up per token

A holder of experts may be a tensor-parallel group, whose members divide its experts. Every member
has the tokens of its group. Then

    (4)  a member sends tokens only to the devices with its own place in other holders, for the
         experts that they have. Its results are partial sums, which the group adds up

A backward exchanges as much: gradients of results are sent out, gradients of tokens come back
(``sim.tasks.exchange``, (3)).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from argosy.errors import invalid
from argosy.runtime.communication.collectives import Group, offsets, swap_uneven
from argosy.runtime.communication.marks import Exchanging
from argosy.runtime.processes.ranks import ExpertSeat
from argosy.space.operations.sharding import unit_counts
from argosy.workload.capture.experts import expert_modules


class ExpertModules:
    """The modules of experts of a model, as they were before devices shared any of them."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._whole: dict[int, tuple[nn.Module, int, Callable[..., Tensor]]] = {
            id(module): (module, _number(module), module.forward)
            for module in expert_modules(layers)
        }

    def within(self, layers: Iterable[nn.Module]) -> tuple[nn.Module, ...]:
        """Return the modules of experts in given layers, each once."""
        modules = {id(module): module for layer in layers for module in layer.modules()}
        return tuple(module for key, module in modules.items() if key in self._whole)

    def count(self, module: nn.Module) -> int:
        """Return the number of experts of a module on all devices; 0 if it has none."""
        return self._whole[id(module)][1] if id(module) in self._whole else 0

    def share_out(self, module: nn.Module, group: ExpertGroup) -> None:
        """Make a module, whose parameters are this device's part, send tokens to the other
        devices."""
        _, count, forward = self._whole[id(module)]
        numbers = [experts_at(count, group.shares, seat) for seat in group.seats]
        positions = torch.full((count,), -1)
        for position, number in enumerate(number for own in numbers for number in own):
            positions[number] = position
        counts = [len(own) for own in numbers]
        routed = partial(_routed, module, forward, group, counts, positions)
        _set(module, counts[group.member], routed)

    def restore(self) -> None:
        """Make every module run all of its experts itself."""
        for module, count, forward in self._whole.values():
            _set(module, count, forward)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Make every module run all of its experts itself, in the context."""
        shared = [(module, _number(module), module.forward) for module, *_ in self._whole.values()]
        self.restore()
        try:
            yield
        finally:
            for module, count, forward in shared:
                _set(module, count, forward)


def _number(module: nn.Module) -> int:
    count = module.num_experts
    assert isinstance(count, int)
    return count


def _set(module: nn.Module, count: int, forward: Callable[..., Tensor]) -> None:
    module.num_experts = count  # type: ignore[assignment]
    module.forward = forward


@dataclass(frozen=True)
class ExpertGroup:
    """A group of devices that holds all experts together, as used by one of them."""

    shares: tuple[float, ...]
    """The shares of the experts by place; holders have consecutive experts in the order of
    places."""
    seats: tuple[ExpertSeat, ...]
    """The places of the members of the process group."""
    member: int
    """This device's index in the process group."""
    group: Group
    exchanging: Exchanging

    def swap(self, rows: Tensor, receiving: Sequence[int], sending: Sequence[int]) -> Tensor:
        """Exchange rows with all members; return the rows that they sent to this one, in their
        order."""
        if len(self.seats) == 1:
            return rows
        row_size = rows[0].numel() if len(rows) else torch.Size(rows.shape[1:]).numel()
        received_sizes = [count * row_size for count in receiving]
        sent_sizes = [count * row_size for count in sending]
        with self.exchanging():
            flat = swap_uneven(rows.flatten(), received_sizes, sent_sizes, group=self.group)
        return flat.view(-1, *rows.shape[1:])


def experts_at(count: int, shares: Sequence[float], seat: ExpertSeat) -> range:
    """Return the numbers of the experts that a device holds, out of ``count``; ``shares`` has the
    share of each holder. A holder has at least one expert for each of its devices."""
    counts = unit_counts(count, shares)
    own = unit_counts(counts[seat.place], seat.ratios)
    begin = offsets(counts)[seat.place] + offsets(own)[seat.member]
    return range(begin, begin + own[seat.member])


def _routed(
    module: nn.Module,
    own: Callable[..., Tensor],
    group: ExpertGroup,
    counts: Sequence[int],
    positions: Tensor,
    tokens: Tensor,
    numbers: Tensor,
    weights: Tensor,
) -> Tensor:
    """Apply (1) to (4). ``counts`` holds the number of experts of each member, ``positions`` the
    position of each expert in the order of members; -1 for one that no member has."""
    _check_call(module, tokens, numbers, weights)
    pairs = positions.to(numbers.device)[numbers.flatten()]
    order = pairs.argsort(stable=True)[int((pairs < 0).sum()) :]
    rows = order // numbers.shape[1]
    met = torch.bincount(pairs[order], minlength=sum(counts))
    members, local = len(counts), counts[group.member]
    theirs = group.swap(met, [local] * members, counts).view(members, local)
    sending = [int(part.sum()) for part in met.split(list(counts))]
    receiving = theirs.sum(1).tolist()
    received = _swapped(tokens[rows], group, receiving, sending)
    ids = (
        torch.arange(local, device=tokens.device)
        .repeat(members)
        .repeat_interleave(theirs.flatten())
    )
    results = _own_results(module, own, received, ids, weights.dtype)
    back = _swapped(results, group, sending, receiving)
    weighted = back * weights.flatten()[order].unsqueeze(-1)
    return torch.zeros_like(tokens).index_add(0, rows, weighted.to(tokens.dtype))


def _check_call(module: nn.Module, tokens: Tensor, numbers: Tensor, weights: Tensor) -> None:
    """Raise an ``InputError`` if a module is not called as experts are."""
    if tokens.dim() != 2 or numbers.dim() != 2 or numbers.shape != weights.shape:
        shapes = [tuple(tensor.shape) for tensor in (tokens, numbers, weights)]
        actual = f"tensors of shapes {shapes[0]}, {shapes[1]} and {shapes[2]}"
        expected = "tokens (t, width), numbers of experts (t, k) and their weights (t, k)"
        raise invalid(type(module).__name__, actual, expected)


def _own_results(
    module: nn.Module, own: Callable[..., Tensor], received: Tensor, ids: Tensor, dtype: torch.dtype
) -> Tensor:
    """Run this device's experts (2).

    Without tokens nothing is computed, but gradients are passed as on other devices: all devices of
    a group take part in the exchange of a backward, and the experts get a gradient of zero, as in
    one process.
    """
    if len(received):
        return own(
            received, ids.unsqueeze(-1), torch.ones(len(ids), 1, dtype=dtype, device=ids.device)
        )
    nothing = sum(
        (parameter.flatten()[:0].sum() for parameter in module.parameters()), received.new_zeros(())
    )
    return received + nothing


def _swapped(
    rows: Tensor, group: ExpertGroup, receiving: Sequence[int], sending: Sequence[int]
) -> Tensor:
    return _Swapped.apply(rows, group, receiving, sending)


class _Swapped(torch.autograd.Function):
    """An exchange of rows with other devices whose backward exchanges the gradients in reverse."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, group: ExpertGroup, receiving: Sequence[int], sending: Sequence[int]
    ) -> Tensor:
        ctx.group, ctx.receiving, ctx.sending = group, receiving, sending
        return group.swap(rows, receiving, sending)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return (
            ctx.group.swap(gradients[0].contiguous(), ctx.sending, ctx.receiving),
            None,
            None,
            None,
        )
