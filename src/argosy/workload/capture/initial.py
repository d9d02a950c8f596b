"""A model built without its weights, and the weights made later, one at a time.

``build_fake`` runs a user's ``build`` on fake tensors and writes down every operation that it did. ``replay`` does them
again for real, in the same order and from the same random state, and hands out each tensor as soon as nothing later
changes it, so that

- what it yields equals what a plain ``build`` would have made, bit for bit, whatever is kept of it;
- never more than a few tensors exist at once, because a tensor that is written over as a whole starts a new life:
  what it held before is not kept, only its draw from the random state is repeated.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from argosy.errors import bad_input
from argosy.workload.capture.blame import blamed

BUILDS = "build() to return a model, a loss function and a batch"
OVERWRITES = {"normal_", "uniform_", "zero_", "fill_", "trunc_normal_", "random_", "bernoulli_", "exponential_"}
"""In-place operations after which nothing of the old contents is left."""


@dataclass(frozen=True)
class Slot:
    """A tensor of the recording, by the order in which it first appeared."""

    index: int


@dataclass(frozen=True)
class Entry:
    """One recorded operation."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any
    name: str


@dataclass
class Recording:
    """Everything that a build did to tensors."""

    entries: list[Entry] = field(default_factory=list)
    slots: dict[int, int] = field(default_factory=dict)
    """``id`` of a fake tensor to its slot."""
    alive: list[Tensor] = field(default_factory=list)
    """Keeps recorded tensors alive, so that no ``id`` is used twice."""

    def slot(self, tensor: Tensor) -> Slot:
        if id(tensor) not in self.slots:
            self.slots[id(tensor)] = len(self.alive)
            self.alive.append(tensor)
        return Slot(self.slots[id(tensor)])

    def add(self, run: Callable[..., Any], args: Any, kwargs: Any, outputs: Any, name: str) -> None:
        def note(part: Any) -> Any:
            return tree_map_only(FakeTensor, self.slot, part)

        self.entries.append(Entry(run, note(args), note(kwargs), note(outputs), name))


class _Recorder(TorchDispatchMode):
    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        self.recording.add(func, args, kwargs, out, name)
        return out


@dataclass(frozen=True, kw_only=True)
class FakeModel:
    """What ``build`` returned, without contents, and how to make the contents."""

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    batch: Any
    mode: FakeTensorMode
    recording: Recording


@contextmanager
def _recorded_truncation(recording: Recording) -> Iterator[None]:
    """torch draws truncated normals until all fit, which needs contents; here it is written down as one operation."""
    real = torch.nn.init._no_grad_trunc_normal_

    def truncated(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(tensor, FakeTensor):
            return real(tensor, *args, **kwargs)
        recording.add(real, (tensor, *args), kwargs, tensor, "trunc_normal_")
        return tensor

    with patch.object(torch.nn.init, "_no_grad_trunc_normal_", truncated):
        yield


@contextmanager
def _replaced_on_conversion() -> Iterator[None]:
    """``model.double()`` and its like put new parameters in place of the old; torch's way swaps contents, and cannot
    on fake tensors. A parameter that two modules share stays shared."""
    converted: dict[int, tuple[Any, dict[int, tuple[Tensor, nn.Parameter]]]] = {}

    def apply(module: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for child in module.children() if recurse else ():
            child._apply(convert)
        _, done = converted.setdefault(id(convert), (convert, {}))
        for key, old in module._parameters.items():
            if old is not None:
                if id(old) not in done:
                    with torch.no_grad():
                        done[id(old)] = (old, nn.Parameter(convert(old), requires_grad=old.requires_grad))
                module._parameters[key] = done[id(old)][1]
        for key, buffer in module._buffers.items():
            module._buffers[key] = None if buffer is None else convert(buffer)
        return module

    with patch.object(nn.Module, "_apply", apply):
        yield


def _kind(part: object) -> str:
    return "Tensor" if isinstance(part, Tensor) else type(part).__name__


def build_fake(build: Callable[[], tuple[nn.Module, Any, Any]]) -> FakeModel:
    """Run a user's ``build`` on fake tensors: no memory, whatever the size of the model."""
    recording = Recording()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    recorded = (mode, _recorded_truncation(recording), _replaced_on_conversion(), _Recorder(recording))
    with ExitStack() as stack, blamed("build", expected=BUILDS):
        for part in recorded:
            stack.enter_context(part)
        built = build()
    match built:
        case (nn.Module() as model, loss, batch) if callable(loss):
            pass
        case (*parts,):
            raise bad_input(BUILDS, ", ".join(map(_kind, parts)), where="build")
        case _:
            raise bad_input(BUILDS, _kind(built), where="build")
    return FakeModel(model=model, loss=loss, batch=batch, mode=mode, recording=recording)


def replay(
    fake: FakeModel, wanted: Sequence[tuple[str, Tensor]], *, seed: int, device: str = "cpu"
) -> Iterator[tuple[str, Tensor]]:
    """Each wanted tensor of a fake model, by name, as soon as it has its initial contents."""
    names: dict[int, list[str]] = {}
    for name, tensor in wanted:
        names.setdefault(fake.recording.slot(tensor).index, []).append(name)
    player = _Player(fake.recording)
    done: dict[int, list[int]] = {}
    for slot in names:
        done.setdefault(player.last.get(player.home[slot], -1), []).append(slot)
    generator_state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        for position, entry in enumerate(fake.recording.entries):
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                player.play(entry)
            for slot in done.get(position, ()):
                yield from ((name, player.real(slot).detach().to(device)) for name in names[slot])
            player.forget(position, entry)
    finally:
        torch.random.set_rng_state(generator_state)


class _Player:
    """The tensors that are alive while a recording is played."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.home = _first_with_storage(recording)
        self.last: dict[int, int] = {}
        """Per storage, the last entry that touches it."""
        self.unread: set[tuple[int, int]] = set()
        """(entry, storage): what the storage holds after the entry is written over before anything reads it."""
        for position, entry in enumerate(recording.entries):
            target = entry.args[0] if entry.args else None
            if entry.name in OVERWRITES and isinstance(target, Slot) and self._is_whole(target.index):
                home = self.home[target.index]
                self.unread.add((self.last.get(home, -1), home))
            self.last.update({self.home[slot]: position for slot in _slots(entry)})
        self.live: dict[int, Tensor] = {}

    def _is_whole(self, slot: int) -> bool:
        like = self.recording.alive[slot]
        return like.numel() * like.element_size() == like.untyped_storage().nbytes()

    def real(self, slot: int) -> Tensor:
        """The tensor of a slot; one whose contents are written over later comes back with any contents."""
        if slot not in self.live:
            like, home = self.recording.alive[slot], self.home[slot]
            if home not in self.live:
                origin = self.recording.alive[home]
                self.live[home] = torch.empty_strided(origin.shape, origin.stride(), dtype=origin.dtype)
            if slot != home:
                self.live[slot] = self.live[home].as_strided(like.shape, like.stride(), int(like.storage_offset()))
        return self.live[slot]

    def play(self, entry: Entry) -> None:
        args, kwargs = tree_map_only(Slot, lambda slot: self.real(slot.index), (entry.args, entry.kwargs))
        made = list(tree_iter(entry.run(*args, **kwargs)))
        for slot, tensor in zip(tree_iter(entry.outputs), made, strict=True):
            if isinstance(slot, Slot):
                self.live[slot.index] = tensor

    def forget(self, position: int, entry: Entry) -> None:
        """Drop what is never read again, and what is written over before it is read."""
        touched = {self.home[slot] for slot in _slots(entry)}
        gone = {home for home in touched if self.last[home] == position or (position, home) in self.unread}
        if gone:
            self.live = {slot: tensor for slot, tensor in self.live.items() if self.home[slot] not in gone}


def _slots(entry: Entry) -> Iterator[int]:
    for part in tree_iter((entry.args, entry.kwargs, entry.outputs)):
        if isinstance(part, Slot):
            yield part.index


def _first_with_storage(recording: Recording) -> dict[int, int]:
    """Per slot, the first slot with the same storage."""
    first: dict[int, int] = {}
    return {
        index: first.setdefault(tensor.untyped_storage()._cdata, index) for index, tensor in enumerate(recording.alive)
    }
