"""Follow the shapes of a module whose operations depend on data, under an assumed routing.

Such a module chooses experts by numbers that it computes, which a capture does not have. Here all
tensors are on the meta device, and only what follows from choices has contents:

    (1)  a choice among unknown numbers (top k, argmax, a sort) takes entries in turn: row r of k
         choices takes entries r k, r k + 1, ... modulo their number, each with the value 1 / k
    (2)  an operation on known tensors alone is computed, so counts of tokens, places of tokens and
         branches on them are known; any other result is unknown

So experts get equally many tokens, and a trace has the FLOP of tokens times choices. With
``skewed``, all rows choose the first entries instead: shapes that change with the routing show.
A module that reads an unknown tensor in another way raises ``UnforeseenError``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.flop_counter import flop_registry

from argosy.workload.capture.initial import place_of, storage_of, window, written_by

aten = torch.ops.aten
_META, _CPU = torch.device("meta"), torch.device("cpu")
_CHOICES: dict[Any, tuple[int, int]] = {
    aten.topk.default: (1, 1),
    aten.argmax.default: (-1, 0),
    aten.max.dim: (1, 1),
    aten.sort.default: (1, 1),
    aten.sort.stable: (1, 1),
    aten.argsort.default: (-1, 0),
}
"""Operations that choose entries, with the places of their values and of their indices among their
results; a value of -1: none."""
_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
"""Operations whose second argument holds indices, which may be masks."""
# The most elements of a tensor that is computed; a larger one is unknown.
_MOST_KNOWN = 2**26
# How every refusal of an unknown number ends.
_FOLLOWS = "that does not follow from top k, argmax or a sort"


class UnforeseenError(Exception):
    """A module does something that cannot be followed without values; the text states what."""


class AssumedRouting(TorchDispatchMode):
    """A mode that applies (1) and (2), and counts FLOP."""

    def __init__(self, *, fixed: set[int], skewed: bool = False) -> None:
        """Create a mode; ``fixed`` has the storages that a module must not change."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.fixed, self.skewed = fixed, skewed
        self.flop = 0
        self.contents: dict[int, Tensor] = {}
        """Contents of known tensors by storage."""
        self.alive: list[Tensor] = []
        """Known tensors, so that the keys of their storages stay unique."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(Tensor, self._on_meta, (args, kwargs or {}))
        if torch.Tag.nondeterministic_seeded in function.tags:
            raise UnforeseenError("draws random numbers")
        if function in _INDEXED:
            args = (args[0], [self._places(index) for index in args[1]], *args[2:])
            args = self._without_lists_of_lists(args)
        given = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        known = all(self._is_known(leaf) for leaf in given)
        changed = written_by(function, args, kwargs)
        aliases = any(result.alias_info is not None for result in function._schema.returns)
        if known and not aliases and not changed:
            return self._computed(function, args, kwargs)
        if changed:
            self._change(function, args, kwargs, changed, known)
        result = self._followed(function, args, kwargs)
        if function in _CHOICES:
            self._choose(function, args, kwargs, result)
        return result

    def _followed(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operation on shapes alone."""
        if function is aten._local_scalar_dense.default:
            raise UnforeseenError(f"reads a number {_FOLLOWS}")
        try:
            result = function(*args, **kwargs)
        except NotImplementedError as error:
            raise UnforeseenError(f"reads a number {_FOLLOWS}, by {function}") from error
        count = flop_registry.get(function._overloadpacket)
        if count is not None:
            self.flop += int(count(*args, **kwargs, out_val=result))
        return result

    def _computed(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operation on known tensors, or on none."""
        args, kwargs = tree_map_only(Tensor, self._content, (args, kwargs))
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _CPU}
        return tree_map_only(Tensor, self._on_meta, function(*args, **kwargs))

    def _change(
        self, function: Any, args: Any, kwargs: Any, changed: list[Any], known: bool
    ) -> None:
        """Change the contents of known tensors, or forget them."""
        if any(storage_of(tensor) in self.fixed for tensor in changed):
            raise UnforeseenError("changes a tensor that it is given or holds")
        if known:
            args, kwargs = tree_map_only(Tensor, self._content, (args, kwargs))
            function(*args, **kwargs)
            return
        for tensor in changed:
            self.contents.pop(storage_of(tensor), None)

    def _choose(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Set the results of a choice (1)."""
        values, indices = _CHOICES[function]
        results = result if isinstance(result, tuple) else (result,)
        chosen, size = results[indices], args[0].shape
        dim = self._dim(function, args, kwargs)
        if dim is None:
            raise UnforeseenError("chooses among all numbers of a tensor")
        is_kept = chosen.dim() == len(size)
        count = chosen.shape[dim] if is_kept else 1
        rows = chosen.numel() // max(count, 1)
        turn = torch.arange(count).unsqueeze(0)
        if not self.skewed:
            turn = turn + torch.arange(rows).unsqueeze(1) * (count if count < size[dim] else 1)
        turn = (turn % size[dim]).expand(rows, count)
        rest = [length for at, length in enumerate(size) if at != dim]
        laid = turn.reshape(*rest, count).movedim(-1, dim)
        self._know(chosen, laid if is_kept else laid.squeeze(dim))
        if values >= 0:
            self._know(results[0], torch.full(results[0].shape, 1.0 / max(count, 1)))

    @staticmethod
    def _dim(function: Any, args: Any, kwargs: Any) -> int | None:
        names = [argument.name for argument in function._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        dim = given.get("dim", None if function is aten.argmax.default else -1)
        return None if dim is None else int(dim) % args[0].dim()

    def _places(self, index: Tensor | None) -> Any:
        """Return an index by places instead of by a mask."""
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            return index
        if not self._is_known(index):
            raise UnforeseenError(f"uses a mask {_FOLLOWS}")
        return [self._on_meta(places) for places in self._content(index).nonzero(as_tuple=True)]

    @staticmethod
    def _without_lists_of_lists(args: tuple[Any, ...]) -> tuple[Any, ...]:
        flat: list[Any] = []
        for index in args[1]:
            flat += index if isinstance(index, list) else [index]
        return (args[0], flat, *args[2:])

    def listed(self, tensor: Tensor) -> Any:
        """Return the elements of a known tensor as nested lists."""
        if tensor.device != _META:
            return tensor.tolist()
        if not self._is_known(tensor):
            raise UnforeseenError(f"lists a number {_FOLLOWS}")
        return self._content(tensor).tolist()

    def _is_known(self, tensor: Tensor) -> bool:
        return storage_of(tensor) in self.contents

    def _content(self, tensor: Tensor) -> Tensor:
        return window(self.contents[storage_of(tensor)], place_of(tensor))

    def _on_meta(self, tensor: Tensor) -> Tensor:
        """Return a tensor on the meta device; one that has contents becomes known."""
        if tensor.device == _META:
            return tensor
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)
        if tensor.numel() <= _MOST_KNOWN:
            self._know(made, tensor.detach())
        return made

    def _know(self, tensor: Tensor, content: Tensor) -> None:
        laid = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        self.contents[storage_of(tensor)] = laid.copy_(content)
        self.alive.append(tensor)


class AssumedLists(TorchFunctionMode):
    """A mode that turns known tensors into lists; torch would look for the numbers of a tensor on
    the meta device."""

    def __init__(self, routing: AssumedRouting) -> None:
        super().__init__()
        self.routing = routing

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is Tensor.tolist:
            with _disable_current_modes():
                return self.routing.listed(args[0])
        return function(*args, **(kwargs or {}))


def kept_bytes(run: Callable[[], Any], without: set[int]) -> tuple[Any, int]:
    """Return what a call returns and the bytes that it keeps for its backward, besides the storages
    ``without``."""
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(storage_of(tensor), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()
    sizes = (
        tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in without
    )
    return result, sum(sizes)
