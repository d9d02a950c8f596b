"""Read the batches of a run by step, from a function of the step or an iterable such as a
DataLoader.

An iterable is read again and again, an epoch at a time. Every rank must get the same batches, and a
resumed run those that it has not trained on. So the batch at a place is a function of the seed, the
epoch and the place:

    (1)  torch's, Python's and NumPy's generators are seeded with (seed, epoch, place) while a batch
         is read, and are restored afterwards
    (2)  a generator that a DataLoader has of its own begins every epoch with its first seed plus
         the epoch
    (3)  ``set_epoch`` of samplers and iterables is called with the epoch
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from argosy.errors import bad_input


def batches_of(
    source: Callable[[int], Any] | Iterable[Any] | None, fixed: Any, seed: int
) -> Callable[[int], Any]:
    """Return ``data(step)`` for the data of a program; the ``fixed`` batch if it defines none."""
    if source is None:
        return lambda step: fixed
    if callable(source):
        return source
    return BatchStream(source, seed=seed)


class BatchStream:
    """A reader that returns batches of an iterable by step; the next step's batch is read on, any
    other is sought from the beginning of an epoch."""

    def __init__(self, source: Iterable[Any], *, seed: int = 0) -> None:
        self.source, self.seed = source, seed
        self.upcoming = 0
        """The step whose batch the iterator returns next."""
        self.epoch = self.place = 0
        self.iterator: Iterator[Any] | None = None

    def __call__(self, step: int) -> Any:
        if step != self.upcoming:
            self._seek(step)
        batch = self._next()
        self.upcoming = step + 1
        return dict(batch) if isinstance(batch, Mapping) else batch

    def _seek(self, step: int) -> None:
        """Go to a step: to its epoch by counting if the length of epochs is known, otherwise by
        reading."""
        size = getattr(type(self.source), "__len__", None)
        length = len(self.source) if size is not None else 0  # type: ignore[arg-type]
        self.epoch, skipped = divmod(step, length) if length else (0, step)
        self.iterator, self.place = None, 0
        for _ in range(skipped):
            self._next()

    def _next(self) -> Any:
        for _ in range(2):  # an epoch that has just ended, and the next one
            with _seeded(self.seed, self.epoch, self.place):
                if self.iterator is None:
                    self.iterator = self._begin()
                batch = next(self.iterator, _ENDED)
            if batch is not _ENDED:
                self.place += 1
                return batch
            self.iterator, self.place, self.epoch = None, 0, self.epoch + 1
        raise bad_input("an iterable with batches", "none", "data")

    def _begin(self) -> Iterator[Any]:
        """Begin an epoch by (2) and (3)."""
        own = getattr(self.source, "generator", None)
        if isinstance(own, torch.Generator):
            own.manual_seed(self._first_seed(own) + self.epoch)
        samplers = [getattr(self.source, name, None) for name in ("sampler", "batch_sampler")]
        for part in (self.source, *samplers):
            set_epoch = getattr(part, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self.epoch)
        return iter(self.source)

    def _first_seed(self, generator: torch.Generator) -> int:
        if not hasattr(self, "_first"):
            self._first = generator.initial_seed()
        return self._first


_ENDED = object()
"""The value that stands for the end of an epoch."""


@contextlib.contextmanager
def _seeded(*numbers: int) -> Iterator[None]:
    """Seed the generators in the context, and restore them afterwards (1)."""
    value = random.Random(repr(numbers)).getrandbits(32)
    plain, numpy = random.getstate(), sys.modules.get("numpy")
    arrays = None if numpy is None else numpy.random.get_state()
    random.seed(value)
    if numpy is not None:
        numpy.random.seed(value)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(value)
        try:
            yield
        finally:
            random.setstate(plain)
            if numpy is not None:
                numpy.random.set_state(arrays)
