"""Initial values one weight at a time, so that no rank ever holds a whole model and every plan begins with the same.

``Recording`` lets a program build its model as usual, but on the meta device: shapes without memory. It writes down
every operation that made or changed a tensor's values. Random ones also run once on a scratch tensor of their shape,
so that the generator goes through the same states as in an ordinary build, and its state before each is kept.
``materialise`` then replays, for the tensors asked for, what led to their values:

    (1)  the operations that wrote the storage of a tensor, and those that wrote what they read, backwards to the first
    (2)  in their order, each random one from its own state of the generator

which gives the very bits of the ordinary build. Small tensors that are not random exist at once, so that programs may
read them. A program that reads other values while it builds cannot be recorded and is told so by torch; those of
torch's own initialisers that do are written down as one operation each.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from argosy.runtime.agreement import described

_SMALL = 2**16
"""Elements up to which a tensor that is not random is made at once."""
_META = torch.device("meta")
_READING = ("_no_grad_trunc_normal_", "orthogonal_", "sparse_", "dirac_")
"""Initialisers of ``nn.init`` that read values, and so do nothing on the meta device."""


@dataclass(frozen=True)
class _Place:
    """A tensor as a window on a storage."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _Step:
    """One operation that wrote something."""

    function: Any
    arguments: Any
    keywords: Any
    reads: frozenset[int]
    writes: tuple[int, ...]
    made: tuple[_Place | None, ...]
    """Its results, where they are new."""
    random_state: Tensor | None


class Recording(TorchDispatchMode):
    """While entered, tensors are made on the meta device and what made them is written down."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[_Step] = []
        self.kept: dict[int, Tensor] = {}
        """One tensor per storage on the meta device: their addresses must not be used again."""

    def __enter__(self) -> Self:
        self._originals = {name: getattr(nn.init, name) for name in _READING if hasattr(nn.init, name)}
        for name, original in self._originals.items():
            setattr(nn.init, name, functools.partial(self._whole, original))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for name, original in self._originals.items():
            setattr(nn.init, name, original)

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """What runs on scratch tensors is not to be recorded."""
        super().__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            super().__enter__()  # type: ignore[no-untyped-call]

    def _whole(self, original: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Write an initialiser down as one random operation."""
        if tensor.is_meta:
            with self._paused():
                state = _advance(original, (tensor, *args), kwargs)
            place = _place(tensor)
            where = frozenset({place.storage})
            self.steps.append(_Step(original, (place, *args), kwargs, where, (place.storage,), (), state))
            return tensor
        result: Tensor = original(tensor, *args, **kwargs)
        return result

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        if tensors and not any(tensor.is_meta for tensor in tensors):
            return function(*args, **kwargs)
        is_random = torch.Tag.nondeterministic_seeded in function.tags
        if not tensors and not is_random and _is_small(function, args, kwargs):
            return function(*args, **kwargs)
        meta_args, meta_kwargs = tree_map(_to_meta, (args, kwargs))
        if "device" in kwargs or not tensors:
            meta_kwargs["device"] = _META
        state = _advance(function, args, kwargs) if is_random else None
        result = function(*meta_args, **meta_kwargs)
        self._write_down(function, args, kwargs, result, state)
        return result

    def _write_down(self, function: Any, args: Any, kwargs: Any, result: Any, state: Tensor | None) -> None:
        reads = frozenset(_storage(leaf) for leaf in tree_iter((args, kwargs)) if _is_recorded(leaf))
        results = [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor)]
        made = tuple(_place(leaf) if _storage(leaf) not in reads else None for leaf in results)
        changed = [_storage(leaf) for leaf in _changed(function, args, kwargs) if _is_recorded(leaf)]
        writes = (*(place.storage for place in made if place is not None), *changed)
        for leaf in results:
            self.kept.setdefault(_storage(leaf), leaf.detach())
        if writes:
            arguments, keywords = tree_map(_remember, (args, {k: v for k, v in kwargs.items() if k != "device"}))
            self.steps.append(_Step(function, arguments, keywords, reads, writes, made, state))

    def materialise(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Real tensors, on the CPU, with the values that the recorded program gave; real ones as they are."""
        wanted = list(tensors)
        real: dict[int, Tensor] = {}
        for step in self._needed({_storage(tensor) for tensor in wanted if tensor.is_meta}):
            _replay(step, real)
        return [_window(real[_storage(tensor)], _place(tensor)) if tensor.is_meta else tensor for tensor in wanted]

    def digest(self, module: nn.Module) -> str:
        """A hash of all that decides the initial values of a module: if it is the same, so are they."""
        tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        numbers: dict[int, int] = {}

        def content(leaf: Any) -> bytes:
            place = _place(leaf) if _is_recorded(leaf) else leaf
            if not isinstance(place, _Place):
                return described(place)
            number = numbers.setdefault(place.storage, len(numbers))  # addresses differ between processes
            return f"{number} {place.dtype} {place.shape} {place.stride} {place.offset}".encode()

        digest = hashlib.sha256()
        for step in self._needed({_storage(tensor) for _, tensor in tensors if tensor.is_meta}):
            name = str(step.function) if isinstance(step.function, OpOverload) else step.function.__qualname__
            leaves = tree_iter((step.arguments, step.keywords, step.made, step.random_state))
            digest.update(b"\n".join([name.encode(), *map(content, leaves)]))
        for name, tensor in tensors:
            digest.update(name.encode() + content(tensor))
        return digest.hexdigest()

    def _needed(self, storages: set[int]) -> Sequence[_Step]:
        """(1)."""
        needed = []
        for step in reversed(self.steps):
            if not storages.isdisjoint(step.writes):
                needed.append(step)
                storages |= step.reads
        return needed[::-1]


def _replay(step: _Step, real: dict[int, Tensor]) -> None:
    """(2)."""

    def value(leaf: Any) -> Any:
        return _window(real[leaf.storage], leaf) if isinstance(leaf, _Place) else leaf

    args, kwargs = tree_map(value, (step.arguments, step.keywords))
    before = torch.get_rng_state()
    try:
        if step.random_state is not None:
            torch.set_rng_state(step.random_state)
        result = step.function(*args, **kwargs)
    finally:
        torch.set_rng_state(before)
    for place, leaf in zip(step.made, (x for x in tree_iter(result) if isinstance(x, Tensor)), strict=False):
        if place is not None:
            real[place.storage] = _laid_out(leaf, place)


def _laid_out(leaf: Tensor, place: _Place) -> Tensor:
    """Some operations lay out their result otherwise than they do on the meta device."""
    if tuple(leaf.stride()) == place.stride and leaf.storage_offset() == place.offset:
        return leaf
    return torch.empty_strided(place.shape, place.stride, dtype=leaf.dtype).copy_(leaf)


def _advance(function: Any, args: Any, kwargs: Any) -> Tensor:
    """Run a random operation on scratch tensors of the same shapes; the generator's state before."""
    state = torch.get_rng_state()

    def scratch(leaf: Any) -> Any:
        return torch.empty_like(leaf, device="cpu") if isinstance(leaf, Tensor) and leaf.is_meta else leaf

    real_args, real_kwargs = tree_map(scratch, (args, {k: v for k, v in kwargs.items() if k != "device"}))
    function(*real_args, **real_kwargs)
    return state


def _is_small(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether a tensor is made whose values are known (not ``empty``, which waits for them) and few."""
    if "empty" in str(function):
        return False
    result = function(*args, **{**kwargs, "device": _META})
    return isinstance(result, Tensor) and result.numel() <= _SMALL


def _to_meta(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, Tensor) and not leaf.is_meta else leaf


def _is_recorded(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_meta


def _remember(leaf: Any) -> Any:
    return _place(leaf) if _is_recorded(leaf) else leaf


def _changed(function: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operation writes to."""
    changed = []
    for index, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            changed.append(args[index] if index < len(args) else kwargs.get(argument.name))
    return changed


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _place(tensor: Tensor) -> _Place:
    shape, stride, offset = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
    return _Place(_storage(tensor), tensor.dtype, shape, stride, offset)


def _window(real: Tensor, place: _Place) -> Tensor:
    """The same window on a real storage."""
    if real.dtype != place.dtype:
        real = real.view(place.dtype)
    return real.as_strided(place.shape, place.stride, place.offset)
