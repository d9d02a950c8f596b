"""Hold measured layer times of one model on one kind of device, and look them up.

Between two measured micro-batches a time is interpolated linearly:

    (1) t(n) = t(p) + (n - p) / (q - p) x (t(q) - t(p))     p <= n <= q, the nearest measured ones
    (2) t(n) = t(p) n / p                                   if only p was measured

Outside the measured range, and for a layer, tensor width or dtype that was not measured, a look-up
raises an ``InputError`` that names what is missing: extrapolated launch overheads make a cost model
silently wrong. Reading and writing is in ``profile_file.py``.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from argosy.dtype import Dtype
from argosy.errors import InputError, bad_input, closest
from argosy.workload.chain import Chain, Layer


@dataclass(frozen=True, kw_only=True)
class ProfileRow:
    """A measurement that gives the times of one layer."""

    layer: str
    """Name of a layer, or the kind of several that cost the same."""
    micro_batch: int
    """Samples."""
    tensor_width: int
    """Devices that share the layer."""
    dtype: Dtype
    forward_seconds: float
    backward_seconds: float
    peak_bytes: float | None = None
    """Highest memory in use on a device; None: not measured."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A set of measurements that were made of one model on one kind of device."""

    device: str
    """Device kind, as the catalogue names it."""
    model: str
    rows: tuple[ProfileRow, ...]
    layers: tuple[Layer, ...] = ()
    """The model itself, if no config describes it."""
    sequence_length: int = 1
    """Tokens per sample of the measured model; 1 if a sample is not a sequence."""
    measured: str = ""
    """Time, machine and software of the measurement, in words."""
    compiled: bool = False
    """Whether torch.compile made one graph of each layer; then a run of the plan must be compiled
    too."""

    def forward_seconds(
        self, layer: str, micro_batch: float, tensor_width: int = 1, dtype: Dtype | None = None
    ) -> float:
        """Return the seconds of a forward of ``micro_batch`` samples; ``dtype`` may be omitted if
        only one was measured.

        >>> row = ProfileRow(layer="block", micro_batch=2, tensor_width=1, dtype=Dtype.BF16,
        ...                  forward_seconds=0.5, backward_seconds=1.0)
        >>> Profile(device="A100-80GB", model="gpt2", rows=(row,)).forward_seconds("block", 4)
        1.0
        """
        return _interpolated(
            self._measured(layer, micro_batch, tensor_width, dtype), micro_batch, _forward
        )

    def backward_seconds(
        self, layer: str, micro_batch: float, tensor_width: int = 1, dtype: Dtype | None = None
    ) -> float:
        """Return the seconds of a backward of ``micro_batch`` samples, both gradients."""
        return _interpolated(
            self._measured(layer, micro_batch, tensor_width, dtype), micro_batch, _backward
        )

    def fewest_samples(self, layer: str, tensor_width: int, dtype: Dtype | None = None) -> int:
        """Return the smallest micro-batch of a layer that was measured."""
        return self._rows_of(layer, tensor_width, dtype)[0].micro_batch

    def sample_range(self, layer: str, tensor_width: int, dtype: Dtype) -> tuple[int, float] | None:
        """Return the fewest and the most samples that can be looked up; None if this width was not
        measured."""
        rows = self._index.get((layer, tensor_width, dtype))
        if rows is None:
            return None
        return (1, math.inf) if len(rows) == 1 else (rows[0].micro_batch, rows[-1].micro_batch)

    def row_name(self, layer: Layer) -> str | None:
        """Return the name under which ``layer`` was measured, its own before its kind; None: not
        measured."""
        return next((name for name in (layer.name, layer.kind) if name in self._names), None)

    def chain(self, *, dtype: Dtype | None = None, optimizer: str = "adamw") -> Chain:
        """Return the measured model; its layers' FLOP are 0 if the profile does not have them."""
        if not self.layers:
            raise bad_input(
                "a list of layers: times alone do not make a model", where=f"{self.model}: layers"
            )
        return Chain(
            name=self.model,
            layers=self.layers,
            sequence_length=self.sequence_length,
            dtype=self._dtype(dtype),
            optimizer=optimizer,
            source=f"measured on {self.device}",
        )

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(row.layer for row in self.rows)

    @cached_property
    def _dtypes(self) -> tuple[Dtype, ...]:
        return tuple(sorted({row.dtype for row in self.rows}))

    @cached_property
    def _index(self) -> dict[tuple[str, int, Dtype], tuple[ProfileRow, ...]]:
        groups: dict[tuple[str, int, Dtype], list[ProfileRow]] = defaultdict(list)
        for row in self.rows:
            groups[row.layer, row.tensor_width, row.dtype].append(row)
        return {key: tuple(sorted(group, key=_micro_batch)) for key, group in groups.items()}

    def _measured(
        self, layer: str, micro_batch: float, tensor_width: int, dtype: Dtype | None
    ) -> tuple[ProfileRow, ...]:
        """Return the rows from which ``micro_batch`` can be read, in order; raise an ``InputError``
        that names what is missing."""
        rows = self._rows_of(layer, tensor_width, dtype)
        first, last = rows[0].micro_batch, rows[-1].micro_batch
        if len(rows) > 1 and not first <= micro_batch <= last:
            measured = f"{layer} of {self.model} on {self.device}"
            expected = f"{first} to {last} samples, as measured for {measured}"
            raise bad_input(expected, micro_batch, "micro_batch")
        return rows

    def _rows_of(
        self, layer: str, tensor_width: int, dtype: Dtype | None
    ) -> tuple[ProfileRow, ...]:
        dtype = self._dtype(dtype)
        rows = self._index.get((layer, tensor_width, dtype))
        if rows is None:
            raise self._missing(layer, tensor_width, dtype)
        return rows

    def _missing(self, layer: str, tensor_width: int, dtype: Dtype) -> InputError:
        layers = sorted({row.layer for row in self.rows})
        of = f"of {self.model} on {self.device}"
        if layer not in layers:
            expected = f"a measured layer {of} ({_listed(layers)})"
            return bad_input(expected, layer, "layer", suggestion=closest(layer, layers))
        widths = sorted(
            {row.tensor_width for row in self.rows if row.layer == layer and row.dtype is dtype}
        )
        expected = (
            f"a measured tensor width of {layer} {of} in {dtype} ({_listed(widths) or 'none'})"
        )
        return bad_input(expected, tensor_width, "tensor_width")

    def _dtype(self, dtype: Dtype | None) -> Dtype:
        measured = self._dtypes
        if dtype is None and len(measured) == 1:
            return measured[0]
        if dtype is None or dtype not in measured:
            actual = None if dtype is None else str(dtype)
            raise bad_input(
                f"a measured dtype of {self.model} ({_listed(measured)})", actual, "dtype"
            )
        return dtype

    def __repr__(self) -> str:
        layers = len({row.layer for row in self.rows})
        return f"{self.model} on {self.device}: {len(self.rows)} rows, {layers} layers"


def _interpolated(
    rows: tuple[ProfileRow, ...], micro_batch: float, read: Callable[[ProfileRow], float]
) -> float:
    """Return the time of a micro-batch by (1) and (2)."""
    if len(rows) == 1:
        return read(rows[0]) * micro_batch / rows[0].micro_batch
    above = bisect_left(rows, micro_batch, key=_micro_batch)
    high = rows[above]
    if high.micro_batch == micro_batch:
        return read(high)
    low = rows[above - 1]
    share = (micro_batch - low.micro_batch) / (high.micro_batch - low.micro_batch)
    return read(low) + share * (read(high) - read(low))


def _micro_batch(row: ProfileRow) -> int:
    return row.micro_batch


def _forward(row: ProfileRow) -> float:
    return row.forward_seconds


def _backward(row: ProfileRow) -> float:
    return row.backward_seconds


def _listed(values: Iterable[object]) -> str:
    """Return at most eight values as text."""
    texts = [str(value) for value in values]
    return ", ".join(texts if len(texts) <= 8 else [*texts[:8], "..."])
