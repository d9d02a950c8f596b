"""Describe the call of a module without its values: results, FLOP, kept bytes, and the dims along
which the call may be divided.

Shapes, FLOP and kept bytes come from an assumed routing (``routing``). They are counted at the
sizes of a trace, and grow evenly with the samples: two counts give all others.

Whether a module computes every sample by itself is tried on random numbers: with parts of its
tensors it must return parts of its results, for numbers that spread tokens over experts and for
numbers that crowd them on a few. Large modules are tried on few rows, and with weights whose rows
are equal, so that they need no memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from argosy.workload.capture.initial import storage_of
from argosy.workload.capture.routing import (
    AssumedLists,
    AssumedRouting,
    UnforeseenError,
    kept_bytes,
)

# A module whose call takes more FLOP than this is tried on few rows.
_MOST_FLOP = 2e9
_FEW_ROWS = 12
# A weight of more elements is tried with equal rows.
_MOST_DRAWN = 2**22


@dataclass(frozen=True)
class Sized:
    """A record that lists the results of a call for one number of samples."""

    shapes: tuple[tuple[int, ...], ...]
    """The shapes of its results, and of a tensor that stands for what it keeps."""
    dtypes: tuple[str, ...]
    flop: int


@dataclass(frozen=True)
class Description:
    """A record that describes the call of a module as one operation."""

    labels: str
    """The labels of all tensors, as in the table of sharding rules."""
    spec: TreeSpec
    """The structure of what the module returns."""
    plain: tuple[Any, ...]
    """Its leaves: None for a tensor, otherwise a list with the leaf."""
    experts: int
    sized: Sized

    def filled(self, results: Sequence[Tensor]) -> list[Any]:
        """Return the leaves of what the module returns."""
        tensors = iter(results)
        return [next(tensors) if leaf is None else leaf[0] for leaf in self.plain]


@dataclass
class Descriptions:
    """A record that keeps what earlier traces found of calls."""

    calls: dict[object, Description] = field(default_factory=dict)
    """By what decides a call: class, weights, shapes of tensors and plain numbers."""
    counts: dict[object, dict[int, tuple[tuple[tuple[int, ...], ...], Description]]] = field(
        default_factory=dict
    )
    """By path of a module and number of samples: the shapes that it was given."""
    labels: dict[object, str] = field(default_factory=dict)

    def fitted(
        self, path: object, shapes: tuple[tuple[int, ...], ...], samples: int
    ) -> Description | None:
        """Return a description for another number of samples than two known ones; None if its
        shapes do not follow from theirs."""
        known = sorted(self.counts.get(path, {}).items())[:2]
        if len(known) < 2 or samples in self.counts[path]:
            return None
        (first, (fewer, description)), (second, (more, other)) = known

        def at(a: int, b: int) -> int:
            return a + (b - a) * (samples - first) // (second - first)

        def grown(
            a: tuple[tuple[int, ...], ...], b: tuple[tuple[int, ...], ...]
        ) -> tuple[tuple[int, ...], ...]:
            pairs = zip(a, b, strict=True)
            return tuple(tuple(map(at, left, right)) for left, right in pairs)

        ranks = [[len(shape) for shape in given] for given in (fewer, more, shapes)]
        if ranks[0] != ranks[1] or ranks[0] != ranks[2] or grown(fewer, more) != shapes:
            return None
        sized = Sized(
            grown(description.sized.shapes, other.sized.shapes),
            description.sized.dtypes,
            at(description.sized.flop, other.sized.flop),
        )
        return Description(
            description.labels, description.spec, description.plain, description.experts, sized
        )


def describe(
    module: nn.Module, path: str, args: Any, kwargs: Any, samples: int, known: Descriptions
) -> Description:
    """Return a description of a call; raise ``UnforeseenError`` if it cannot be one operation."""
    leaves, spec = tree_flatten((args, kwargs))
    shapes = tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor))
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, bool, int, float, str, type(None))):
            raise UnforeseenError(f"is called with {type(leaf).__name__}")
    if not shapes:
        raise UnforeseenError("is called without tensors")
    description = known.fitted(path, shapes, samples)
    if description is None:
        held = tuple((tuple(t.shape), t.dtype, t.requires_grad) for _, t in _held(module))
        plain = tuple(
            (tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in leaves
        )
        key = (type(module), module.training, held, plain, str(spec))
        if key not in known.calls:
            ranks = tuple(len(shape) for shape in shapes)
            form = (type(module), module.training, held, ranks, str(spec))
            known.calls[key] = _described(_Call(module, leaves, spec), form, known)
        description = known.calls[key]
    known.counts.setdefault(path, {})[samples] = (shapes, description)
    return description


def _held(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


@dataclass
class _Call:
    """A call of a module with given leaves."""

    module: nn.Module
    leaves: list[Any]
    spec: TreeSpec

    def run(self, held: dict[str, Tensor], given: Sequence[Tensor]) -> Any:
        tensors = iter(given)
        leaves = [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return functional_call(self.module, held, args, kwargs)

    @property
    def given(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]


def _described(call: _Call, key: object, known: Descriptions) -> Description:
    with _alone():
        leaves, spec, sized = _assumed(call)
        skewed = _assumed(call, skewed=True)[2]
        if skewed.shapes[:-1] != sized.shapes[:-1]:
            raise UnforeseenError("returns tensors whose shapes depend on the routing")
        if key not in known.labels:
            known.labels[key] = _labels(call, sized)
    plain = tuple(None if isinstance(leaf, Tensor) else [leaf] for leaf in leaves)
    return Description(known.labels[key], spec, plain, 0, sized)


@contextmanager
def _alone() -> Iterator[None]:
    """Run what follows outside of the trace that is under way."""
    with (
        _disable_current_modes(),
        torch.random.fork_rng(devices=[]),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        yield


def _assumed(call: _Call, *, skewed: bool = False) -> tuple[list[Any], TreeSpec, Sized]:
    """Return the leaves that a call returns, their structure, and their sizes."""

    def empty(tensor: Tensor) -> Tensor:
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return made.requires_grad_(tensor.requires_grad and made.is_floating_point())

    held = {name: empty(tensor) for name, tensor in _held(call.module)}
    given = [empty(tensor) for tensor in call.given]
    routing = AssumedRouting(
        fixed={storage_of(tensor) for tensor in (*held.values(), *given)}, skewed=skewed
    )
    with routing, AssumedLists(routing):
        made, kept = kept_bytes(lambda: call.run(held, given), routing.fixed)
    leaves, spec = tree_flatten(made)
    results = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, bool, int, float, str, type(None))):
            raise UnforeseenError(f"returns {type(leaf).__name__}")
    if not results or not given[0].dim():
        raise UnforeseenError("returns no tensors")
    rows = tuple(given[0].shape[: _num_leading(given[0].dim())])
    each = math.ceil(kept / max(math.prod(rows), 1))
    shapes = (*(tuple(result.shape) for result in results), (*rows, each))
    dtypes = (*(str(result.dtype).removeprefix("torch.") for result in results), "uint8")
    return leaves, spec, Sized(shapes, dtypes, routing.flop)


def _num_leading(rank: int) -> int:
    """Return the number of dims that may hold samples and positions."""
    return max(1, min(2, rank - 1))


def _labels(call: _Call, sized: Sized) -> str:
    """Return the labels of a call whose first one or two dims may be divided, as far as it may."""
    given = _drawn_shapes(call, sized.flop)
    rank = len(given[0])
    letters: dict[tuple[int, int], str] = {}
    """The letter of each (tensor, dim), results behind what is given."""
    for dim, letter in zip(range(_num_leading(rank)), "ns", strict=False):
        cut = [
            at for at, shape in enumerate(given) if shape[dim : dim + 1] == given[0][dim : dim + 1]
        ]
        trials = (_apart(call, given, cut, dim, crowded=crowded) for crowded in (False, True))
        if given[0][dim] > 1 and all(trials):
            results = range(len(given), len(given) + len(sized.shapes))
            letters |= {(at, dim): letter for at in (*cut, *results)}
    held = [(tensor.dim(), -1) for _, tensor in _held(call.module)]
    ends = [(len(tensor.shape), at) for at, tensor in enumerate(call.given)]
    made = [(len(shape), len(given) + at) for at, shape in enumerate(sized.shapes)]

    def words(tensors: Sequence[tuple[int, int]]) -> str:
        return ",".join(
            "".join(letters.get((at, dim), ".") for dim in range(count)) for count, at in tensors
        )

    return f"{words([*ends, *held])}->{words(made)}"


def _drawn_shapes(call: _Call, flop: int) -> list[tuple[int, ...]]:
    """Return the shapes that a call is tried on: its own, or few rows if it takes many FLOP."""
    shapes = [tuple(tensor.shape) for tensor in call.given]
    base = shapes[0]
    if flop <= _MOST_FLOP:
        return shapes
    few = {size: min(size, _FEW_ROWS) for size in base[: max(1, len(base) - 1)]}
    return [
        tuple(few.get(size, size) if dim < 2 else size for dim, size in enumerate(shape))
        for shape in shapes
    ]


def _apart(
    call: _Call, shapes: Sequence[tuple[int, ...]], cut: Sequence[int], dim: int, *, crowded: bool
) -> bool:
    """Return whether parts of what a module is given make parts of its results."""
    generator = torch.Generator().manual_seed(int(crowded))
    held = {name: _weight(tensor, generator) for name, tensor in _held(call.module)}
    given = [
        _drawn(tensor, shape, generator, crowded=crowded)
        for tensor, shape in zip(call.given, shapes, strict=True)
    ]
    size = shapes[0][dim]
    first = size // 2 + (size > 2)

    def results(begin: int, count: int) -> list[Tensor]:
        parts = [
            tensor.narrow(dim, begin, count) if at in cut else tensor
            for at, tensor in enumerate(given)
        ]
        made = tree_flatten(call.run(held, [part.clone() for part in parts]))[0]
        return [leaf for leaf in made if isinstance(leaf, Tensor)]

    try:
        with torch.no_grad():
            whole = results(0, size)
            parts = results(0, first), results(first, size - first)
        return all(
            made.dim() > dim and _equal(made, torch.cat(pair, dim))
            for made, *pair in zip(whole, *parts, strict=True)
        )
    except Exception:  # a module may raise anything on parts of its tensors
        return False


def _equal(whole: Tensor, parts: Tensor) -> bool:
    if whole.shape != parts.shape:
        return False
    close = torch.allclose(whole, parts, rtol=1e-4, atol=1e-5, equal_nan=True)
    return close if whole.is_floating_point() else bool((whole == parts).all())


def _weight(like: Tensor, generator: torch.Generator) -> Tensor:
    """Return random numbers for a weight; a large one has equal rows."""
    shape = tuple(like.shape)
    size = shape if like.numel() <= _MOST_DRAWN else shape[-1:]
    drawn = _drawn(like, size, generator)
    return (drawn / math.sqrt(shape[-1]) if len(shape) > 1 else drawn).expand(shape)


def _drawn(
    like: Tensor, shape: Sequence[int], generator: torch.Generator, *, crowded: bool = False
) -> Tensor:
    """Return random numbers for a tensor; crowded rows are almost equal."""
    if not like.is_floating_point():
        return torch.randint(0, 2, tuple(shape), generator=generator).to(like.dtype)
    dtype = like.dtype if like.dtype.itemsize > 2 else torch.float32
    drawn = torch.randn(tuple(shape), generator=generator, dtype=dtype)
    if crowded:
        return drawn * 0.3 + torch.randn(shape[-1], generator=generator, dtype=dtype)
    return drawn
