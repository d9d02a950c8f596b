"""Turn operations of a graph into calls: names into torch functions, symbols into constants.

A call for ``aten.view`` reshapes, because a shard need not have the memory layout of the whole
tensor. Random masks are a hash (SplitMix64) of seed, step, place in the program and position of the
element in the *whole* tensor, so a rank draws its shard alone and every layout draws the same mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from argosy.runtime.graphs import attention
from argosy.workload.graph import Argument, Graph, GraphNode, Ref, Symbol

UNIFORM = "argosy.uniform.default"
"""The operation that draws uniform random numbers."""
RANDOM = {"argosy.bernoulli.default", UNIFORM}
"""Operations that draw random numbers."""
RESHAPES = {"aten.view.default", "aten._unsafe_view.default", "aten.reshape.default"}
"""Operations that are called as ``aten.reshape``."""


@cache
def function(op: str) -> Callable[..., Any]:
    """Return the function that an operation's name calls.

    >>> function("aten.add.Tensor") is torch.ops.aten.add.Tensor
    True
    """
    if op in RESHAPES:
        return torch.ops.aten.reshape.default
    if op in attention.FUNCTIONS:
        return attention.FUNCTIONS[op]
    namespace, name, overload = op.split(".")
    if namespace == "argosy":
        import argosy.workload.capture.decompose
        import argosy.workload.capture.modules  # noqa: F401 (registers an operation)
    function: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    return function


def constant(symbol: Symbol, device: torch.device) -> Any:
    """Return the torch constant that a symbol stands for."""
    return device if symbol.text == "device" else getattr(torch, symbol.text.removeprefix("torch."))


def filled(argument: Argument, values: Callable[[int], Any], device: torch.device) -> Any:
    """Return an argument with values and constants in place of their names."""
    if isinstance(argument, Ref):
        return values(argument.value)
    if isinstance(argument, Symbol):
        return constant(argument, device)
    if isinstance(argument, tuple):
        return [filled(part, values, device) for part in argument]
    return argument


def tensor_constants(graph: Graph, device: torch.device) -> dict[int, Tensor]:
    """Return the constant values of a graph as tensors."""
    return {
        index: torch.tensor(
            elements, dtype=getattr(torch, graph.values[index].dtype), device=device
        )
        for index, elements in graph.constants
    }


def random_numbers(positions: Tensor, *, key: int, dtype: torch.dtype) -> Tensor:
    """Return numbers between 0 and 1, both excluded, from the hash of each position and the key."""
    half = 0.5 if dtype is torch.float64 else 2.0**29
    numbers = _hashed(positions, key)
    coarse = numbers if dtype is torch.float64 else (numbers >> 30) << 30
    return ((coarse.double() + half) * 2.0**-53).to(dtype)


def random_mask(positions: Tensor, keep: float, *, key: int, dtype: torch.dtype) -> Tensor:
    """Return ones with probability ``keep``, else zeros, from the hash of each position and the
    key."""
    return (_hashed(positions, key).double() * 2.0**-53 < keep).to(dtype)


def _hashed(positions: Tensor, key: int) -> Tensor:
    """Return a hash of 53 bits for each position (SplitMix64)."""
    x = positions * -7046029254386353131 + key
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return (x >> 11) & ((1 << 53) - 1)


def drawn(op: str, arguments: Sequence[Any], positions: Tensor, *, seed: int, step: int) -> Tensor:
    """Compute a random operation, given the positions of its elements in the whole tensor."""
    like, *rest = arguments
    key = mask_key(seed, step, rest[-1])
    if op == UNIFORM:
        return random_numbers(positions, key=key, dtype=like.dtype)
    return random_mask(positions, rest[0], key=key, dtype=like.dtype)


def mask_key(seed: int, step: int, place: int) -> int:
    """Return a 63-bit key for one mask of one step."""
    mixed = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + place * 0x94D049BB133111EB) & (
        2**63 - 1
    )
    return mixed ^ (mixed >> 29)


def run_node(
    node: GraphNode, held: dict[int, Any], device: torch.device, *, seed: int = 0, step: int = 0
) -> None:
    """Run one operation in one process, and add its results to ``held``."""
    args = [filled(part, held.__getitem__, device) for part in node.arguments]
    kwargs = {key: filled(part, held.__getitem__, device) for key, part in node.keywords}
    if node.op in RANDOM:
        positions = torch.arange(args[0].numel(), device=device).view(args[0].shape)
        made: Any = drawn(node.op, args, positions, seed=seed, step=step)
    else:
        made = function(node.op)(*args, **kwargs)
    held.update(results(node, made))


def results(node: GraphNode, made: Any) -> Iterator[tuple[int, Any]]:
    """Yield what a call of an operation has made, by the number of the value."""
    parts = made if isinstance(made, (tuple, list)) else (made,)
    for value, part in zip(node.outputs, parts, strict=True):
        if value is not None:
            yield value, part
