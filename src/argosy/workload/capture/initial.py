"""Build a model without its weights, and make the weights later, one at a time.

``Recording`` lets a program build its model as usual, but keeps large tensors on the meta device:
shapes without memory. It records every operation that made or changed their values. Random
operations also run once on a scratch tensor of their shape, so that the generator goes through the
same states as in an ordinary build, and its state before each is kept. ``materialise`` then
replays, for given tensors, what led to their values:

    (1)  the operations that wrote the storage of a tensor, and those that wrote what they read,
         backwards to the first
    (2)  in their order, each random one from its own state of its generator

This gives the same bits as the ordinary build, on every rank, whatever part of the model it keeps.
Values that a program reads while it builds are materialised for it:

    (3)  tensors of up to ``SMALL`` elements exist at once
    (4)  numbers, lists and arrays that are read from a recorded tensor are replayed first, and so
         are the arguments of operations that write recorded values into a tensor that exists or
         that cannot run without values

``build_fake`` runs a user's ``build`` in this way. Without a seed it draws no random numbers for
large tensors.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from argosy.errors import invalid
from argosy.workload.capture.blame import blamed

if TYPE_CHECKING:
    from argosy.workload.capture.modules import OpaqueModules

# Expected behaviour of ``build``, for error messages.
BUILDS = "build() to return a model, a loss function and a batch"
LOSSES = "a loss function loss_fn(model, batch), which calls the model"
# Elements up to which a tensor exists at once.
SMALL = 2**16
_META, _CPU = torch.device("meta"), torch.device("cpu")
_READING_INITIALISERS = ("_no_grad_trunc_normal_", "orthogonal_", "sparse_", "dirac_")
"""Initialisers of ``nn.init`` that read values; they do nothing on the meta device."""
_READERS = {
    getattr(Tensor, name)
    for name in (
        "tolist",
        "numpy",
        "item",
        "__array__",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
    )
} | {Tensor.__complex__, Tensor.__reduce_ex__, Tensor.__contains__, torch.equal, torch.allclose}
"""Functions that take values out of tensors without an operation that could be recorded."""


@dataclass(frozen=True)
class StorageWindow:
    """A tensor that is described as a window on a storage."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(eq=False)
class Borrowed:
    """A tensor that exists and is an argument of a recorded operation; it is copied before the
    program changes it."""

    tensor: Tensor


@dataclass(frozen=True)
class _Step:
    """A recorded operation that wrote something."""

    function: Any
    arguments: Any
    keywords: Any
    reads: frozenset[int]
    writes: tuple[int, ...]
    made: tuple[StorageWindow | None, ...]
    """Results that are new; None for the others."""
    random_state: Tensor | None


class Recording(TorchDispatchMode):
    """A mode that makes large tensors on the meta device while it is entered, and records what made
    them."""

    def __init__(self, *, draws: bool = True) -> None:
        """Create an empty recording; without ``draws``, random operations on large tensors do not
        advance their generators, which is enough for planning."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws = draws
        self.steps: list[_Step] = []
        self.kept: dict[int, Tensor] = {}
        """One tensor per recorded storage on the meta device, kept alive so that its address is not
        used again."""
        self.alive: list[Tensor] = []
        """Tensors on the meta device that recorded operations read, kept alive for the same
        reason."""
        self.borrowed: dict[int, list[Borrowed]] = {}
        """Borrowed tensors by storage."""
        self._reads = _Reads(self)

    def __enter__(self) -> Self:
        self._originals = {
            name: getattr(nn.init, name) for name in _READING_INITIALISERS if hasattr(nn.init, name)
        }
        for name, original in self._originals.items():
            setattr(nn.init, name, functools.partial(self._initialise, original))
        self._reads.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._reads.__exit__(*error)
        for name, original in self._originals.items():
            setattr(nn.init, name, original)

    def _initialise(self, original: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Record an initialiser as one random operation."""
        if not tensor.is_meta or storage_of(tensor) not in self.kept:
            result: Tensor = original(tensor, *args, **kwargs)
            return result
        with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
            state = self._advance(original, (tensor, *args), kwargs)
        place = place_of(tensor)
        where = frozenset({place.storage})
        self.steps.append(
            _Step(original, (place, *args), kwargs, where, (place.storage,), (), state)
        )
        return tensor

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") not in (None, _META):
            kwargs = _on_cpu(kwargs)  # values are made on the CPU, on any device of the program
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        recorded = [tensor for tensor in tensors if tensor.is_meta]
        changed = [
            tensor for tensor in written_by(function, args, kwargs) if isinstance(tensor, Tensor)
        ]
        if tensors and not recorded:
            return self._run(function, args, kwargs, changed)
        foreign = bool(recorded) and all(storage_of(tensor) not in self.kept for tensor in recorded)
        if foreign and kwargs.get("device", _META) == _META:
            return function(*args, **kwargs)  # the program itself uses the meta device
        if not tensors and not self._is_large(function, args, kwargs):
            return function(*args, **kwargs)
        if function is torch.ops.aten._local_scalar_dense.default or any(
            not tensor.is_meta for tensor in changed
        ):
            return self._run(function, *self._with_values(args, kwargs), changed)
        return self._record(function, args, kwargs, bool(tensors))

    def _is_large(self, function: Any, args: Any, kwargs: Any) -> bool:
        """Return whether a tensor made from numbers alone is large (3); True if the program
        requests the meta device."""
        if kwargs.get("device") == _META:
            return True
        try:
            result = function(*args, **{**_without_generator(kwargs), "device": _META})
        except (TypeError, RuntimeError, NotImplementedError):
            return False
        return isinstance(result, Tensor) and result.numel() > SMALL

    def _run(self, function: Any, args: Any, kwargs: Any, changed: Sequence[Tensor]) -> Any:
        """Run an operation on tensors that exist, after copying those that recorded operations
        still need."""
        for tensor in changed:
            for held in self.borrowed.pop(storage_of(tensor), ()):
                held.tensor = held.tensor.clone()
        return function(*args, **kwargs)

    def _with_values(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return arguments with recorded tensors replaced by their values (4)."""

        def value(leaf: Any) -> Any:
            return self.materialise([leaf])[0] if isinstance(leaf, Tensor) else leaf

        given: tuple[Any, Any] = tree_map(value, (args, kwargs))
        return given

    def _record(self, function: Any, args: Any, kwargs: Any, has_tensors: bool) -> Any:
        meta_args, meta_kwargs = tree_map(_to_meta, (args, _without_generator(kwargs)))
        requested = kwargs.get("device")
        if "device" in kwargs or not has_tensors:
            meta_kwargs["device"] = _META
        try:
            result = function(*meta_args, **meta_kwargs)
        except (NotImplementedError, RuntimeError):
            return self._run(function, *self._with_values(args, kwargs), ())
        if not has_tensors and requested == _META:
            return result
        is_random = torch.Tag.nondeterministic_seeded in function.tags
        state = self._advance(function, args, kwargs) if is_random else None
        self._write_down(function, args, kwargs, result, state)
        return result

    def _write_down(
        self, function: Any, args: Any, kwargs: Any, result: Any, state: Tensor | None
    ) -> None:
        reads = frozenset(
            storage_of(leaf) for leaf in tree_iter((args, kwargs)) if is_recorded(leaf)
        )
        results = [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor)]
        made = tuple(place_of(leaf) if storage_of(leaf) not in reads else None for leaf in results)
        changed = [
            storage_of(leaf) for leaf in written_by(function, args, kwargs) if is_recorded(leaf)
        ]
        writes = (*(place.storage for place in made if place is not None), *changed)
        for leaf in results:
            self.kept.setdefault(storage_of(leaf), leaf.detach())
        if writes:
            arguments, keywords = tree_map(self._remember, (args, kwargs))
            self.steps.append(_Step(function, arguments, keywords, reads, writes, made, state))

    def _remember(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.is_meta:
            self.alive.append(leaf.detach())
            return place_of(leaf)
        held = Borrowed(leaf.detach())
        self.borrowed.setdefault(storage_of(leaf), []).append(held)
        return held

    def _advance(self, function: Any, args: Any, kwargs: Any) -> Tensor:
        """Run a random operation on scratch tensors of the same shapes, and return the state of its
        generator before it."""
        generator = kwargs.get("generator")
        state = torch.get_rng_state() if generator is None else generator.get_state()
        if not self.draws:
            return state

        def scratch(leaf: Any) -> Any:
            return (
                torch.empty_like(leaf, device="cpu")
                if isinstance(leaf, Tensor) and leaf.is_meta
                else leaf
            )

        real_args, real_kwargs = tree_map(scratch, (args, _on_cpu(kwargs)))
        function(*real_args, **real_kwargs)
        return state

    def materialise(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return real tensors on the CPU with the values that the recorded program gave; existing
        tensors are returned unchanged."""
        wanted = list(tensors)
        real: dict[int, Tensor] = {}
        with (
            torch.utils._python_dispatch._disable_current_modes(),
            torch._C.DisableTorchFunction(),
            torch.no_grad(),
        ):
            for step in self.needed({storage_of(tensor) for tensor in wanted if tensor.is_meta}):
                _replay(step, real)
            return [self._real_tensor(tensor, real) for tensor in wanted]

    def _real_tensor(self, tensor: Tensor, real: dict[int, Tensor]) -> Tensor:
        if not tensor.is_meta:
            return tensor
        if storage_of(tensor) not in real:
            actual = (
                f"a tensor of shape {tuple(tensor.shape)} on the meta device that never got values"
            )
            expected = "values for every weight and every tensor of the batch"
            raise invalid("build()", actual, expected)
        return window(real[storage_of(tensor)], place_of(tensor))

    def needed(self, storages: set[int]) -> Sequence[_Step]:
        """Return the operations that led to the values in these storages (1)."""
        needed = []
        for step in reversed(self.steps):
            if not storages.isdisjoint(step.writes):
                needed.append(step)
                storages |= step.reads
        return needed[::-1]


class _Reads(TorchFunctionMode):
    """A mode that gives values to functions which read them from recorded tensors (4)."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _READERS and any(is_recorded(leaf) for leaf in tree_iter((args, kwargs))):
            args, kwargs = self.recording._with_values(args, kwargs)
        elif (
            function is Tensor.__setitem__
            and is_recorded(args[0])
            and isinstance(args[2], (bool, int, float))
        ):
            # The tensor that torch would make of the number would have no value.
            args = (args[0], args[1], torch.tensor(args[2], dtype=args[0].dtype))
        return function(*args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class FakeModel:
    """A model that ``build`` returned with loss and batch, its large tensors without contents, and
    the recording that makes the contents."""

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    batch: Any
    recording: Recording
    opaque: OpaqueModules | None = None
    """What earlier traces found of modules that are called as one operation."""

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter and buffer by name, with its initial contents, one at a time."""
        for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
            yield name, self.recording.materialise([tensor])[0].detach()


def build_fake(
    build: Callable[[], tuple[nn.Module, Any, Any]], *, seed: int | None = None
) -> FakeModel:
    """Run a user's ``build`` under a ``Recording``, from a seed if its initial values are
    wanted."""
    recording = Recording(draws=seed is not None)
    with torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        model, loss, batch = run_build(build, recording)
    return FakeModel(model=model, loss=loss, batch=batch, recording=recording)


def run_build(build: Callable[[], Any], recording: Recording) -> tuple[nn.Module, Any, Any]:
    """Return what ``build`` returns; raise an ``InputError`` if it raises or returns anything else
    than it should."""
    with blamed("build", expected=BUILDS), recording:
        built = build()
    match built:
        case (nn.Module(), nn.modules.loss._Loss() as loss, _):
            raise invalid("build", f"the loss {type(loss).__name__}", LOSSES)
        case (nn.Module() as model, loss, batch) if callable(loss):
            _check_memory(model)
            return model, loss, batch
        case (*parts,):
            actual = ", ".join(map(_kind, parts))
        case _:
            actual = _kind(built)
    raise invalid("build", actual, BUILDS)


def _check_memory(model: nn.Module) -> None:
    """Raise an ``InputError`` if two parameters share memory: an optimizer would change each of
    them twice."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.numel() and (first := names.setdefault(storage_of(parameter), name)) != name:
            actual = f"two parameters in the same memory, {first} and {name}"
            suggestion = "tie weights by assigning the parameter itself, not its data"
            raise invalid("build()", actual, "one", suggestion=suggestion)


def _kind(part: object) -> str:
    return "Tensor" if isinstance(part, Tensor) else type(part).__name__


def _replay(step: _Step, real: dict[int, Tensor]) -> None:
    """Run a recorded operation again, from its own state of the generator (2)."""

    def value(leaf: Any) -> Any:
        if isinstance(leaf, Borrowed):
            return leaf.tensor
        if isinstance(leaf, StorageWindow):
            without = torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device=_META)
            return window(real[leaf.storage], leaf) if leaf.storage in real else without
        return leaf

    args, kwargs = tree_map(value, (step.arguments, _on_cpu(step.keywords)))
    with _from_state(step.random_state, kwargs):
        result = step.function(*args, **kwargs)
    for place, leaf in zip(
        step.made, (x for x in tree_iter(result) if isinstance(x, Tensor)), strict=False
    ):
        if place is not None:
            real[place.storage] = _laid_out(leaf, place)


@contextlib.contextmanager
def _from_state(state: Tensor | None, kwargs: dict[str, Any]) -> Iterator[None]:
    """Set the generator to a random operation's own state inside the block; the state is a copy."""
    if state is None:
        yield
        return
    if kwargs.get("generator") is not None:
        kwargs["generator"] = torch.Generator().set_state(state)
    before = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        yield
    finally:
        torch.set_rng_state(before)


def _laid_out(leaf: Tensor, place: StorageWindow) -> Tensor:
    """Return a result in the recorded layout: some operations use another layout than on the meta
    device."""
    if tuple(leaf.stride()) == place.stride and leaf.storage_offset() == place.offset:
        return leaf
    return torch.empty_strided(place.shape, place.stride, dtype=leaf.dtype).copy_(leaf)


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: _CPU if key == "device" else value for key, value in kwargs.items()}


def _without_generator(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key != "generator"}


def _to_meta(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, Tensor) and not leaf.is_meta else leaf


def is_recorded(leaf: Any) -> bool:
    """Return whether a value is a tensor on the meta device."""
    return isinstance(leaf, Tensor) and leaf.is_meta


def written_by(function: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that an operation writes to."""
    changed = []
    for index, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            changed.append(args[index] if index < len(args) else kwargs.get(argument.name))
    return changed


def storage_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage."""
    address: int = tensor.untyped_storage()._cdata
    return address


def place_of(tensor: Tensor) -> StorageWindow:
    """Return the window that a tensor is on its storage."""
    shape, stride, offset = (
        tuple(tensor.shape),
        tuple(tensor.stride()),
        int(tensor.storage_offset()),
    )
    return StorageWindow(storage_of(tensor), tensor.dtype, shape, stride, offset)


def window(real: Tensor, place: StorageWindow) -> Tensor:
    """Return a window on a real storage."""
    if real.dtype != place.dtype:
        real = real.view(place.dtype)
    return real.as_strided(place.shape, place.stride, place.offset)
