"""Experts shared out over devices: tokens go to the devices that hold the experts they were routed
to, and back.

A module of experts is one with a number ``num_experts``, whose own parameters all have that many
entries in their first dim, and that is called with tokens (t, width), the numbers of the experts of
each (t, k) and their weights (t, k). That is how Hugging Face's mixtures of experts are made since
transformers 5. With e devices, of which device j holds some consecutive experts:

    (1)  a token is sent once for each of its experts, in their order: an all-to-all
    (2)  every device runs its own experts on what it received, with weights of 1
    (3)  results go back the same way, are multiplied by their weights and added up per token

A backward exchanges as much: gradients of results go there, gradients of tokens come back
(``sim.tasks.exchange``, (3)).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from argosy.errors import InputError, Problem
from argosy.runtime.communication.collectives import Group, offsets, swap_uneven
from argosy.runtime.communication.marks import Exchanging
from argosy.space.operations.sharding import unit_counts


def expert_modules(layers: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """The modules of experts in some layers, each once."""
    seen = set()
    for module in (module for layer in layers for module in layer.modules()):
        if id(module) not in seen and _has_experts(module):
            seen.add(id(module))
            yield module


def _has_experts(module: nn.Module) -> bool:
    count = getattr(module, "num_experts", None)
    own = list(module.parameters(recurse=False))
    if not isinstance(count, int) or not own or list(module.children()) != _activations(module):
        return False
    wanted = [name for name in inspect.signature(type(module).forward).parameters if name != "self"]
    return len(wanted) == 3 and all(p.dim() > 1 and p.shape[0] == count for p in own)


def _activations(module: nn.Module) -> list[nn.Module]:
    """Children without parameters."""
    return [child for child in module.children() if not list(child.parameters())]


def expert_count(module: nn.Module) -> int:
    count = module.num_experts
    assert isinstance(count, int)
    return count


@dataclass(frozen=True)
class ExpertGroup:
    """Devices that hold all experts together, as one of them sees it."""

    shares: tuple[float, ...]
    """Of the experts, by place: holders have consecutive ones in the order of their places."""
    places: tuple[int, ...]
    """Of the members of the process group."""
    member: int
    """This device's number in the process group."""
    group: Group
    exchanging: Exchanging

    def swap(self, rows: Tensor, receiving: Sequence[int], sending: Sequence[int]) -> Tensor:
        """The rows that the members sent to this one, in their order."""
        each = rows[0].numel() if len(rows) else torch.Size(rows.shape[1:]).numel()
        with self.exchanging():
            flat = swap_uneven(
                rows.flatten(), [count * each for count in receiving], [count * each for count in sending],
                group=self.group,
            )  # fmt: skip
        return flat.view(-1, *rows.shape[1:])

    def numbers(self, count: int) -> list[list[int]]:
        """Of so many experts, those of each member of the process group."""
        counts = unit_counts(count, self.shares)
        begins = offsets(counts)
        return [list(range(begins[place], begins[place] + counts[place])) for place in self.places]


def share_out(module: nn.Module, group: ExpertGroup) -> None:
    """Have a module, whose parameters are this device's part, send tokens to the other devices;
    called once."""
    numbers = group.numbers(expert_count(module))
    module.num_experts = len(numbers[group.member])  # type: ignore[assignment]
    every = torch.tensor([number for own in numbers for number in own])
    module.forward = partial(
        _routed, module, module.forward, group, [len(own) for own in numbers], every.argsort()
    )


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
    """(1) to (3). ``counts``: experts of each member; ``positions``: of the experts in the order of
    members."""
    if tokens.dim() != 2 or numbers.dim() != 2 or numbers.shape != weights.shape:
        found = f"tensors of shapes {tuple(tokens.shape)}, {tuple(numbers.shape)} and {tuple(weights.shape)}"
        expected = "tokens (t, width), numbers of experts (t, k) and their weights (t, k)"
        raise InputError([Problem(path=type(module).__name__, found=found, expected=expected)])
    pairs = positions.to(numbers.device)[numbers.flatten()]
    order = pairs.argsort(stable=True)
    rows = order // numbers.shape[1]
    met = torch.bincount(pairs, minlength=sum(counts))
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


def _own_results(
    module: nn.Module, own: Callable[..., Tensor], received: Tensor, ids: Tensor, dtype: torch.dtype
) -> Tensor:
    """(2). Without tokens nothing is computed, but gradients pass as they do elsewhere: all devices
    of a group exchange in a backward, and the experts get a gradient of zero, as in one process."""
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
    result: Tensor = _Swapped.apply(rows, group, receiving, sending)  # type: ignore[no-untyped-call]
    return result


class _Swapped(torch.autograd.Function):
    """Rows to other devices; their gradients back."""

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
