"""Changes to an HDF5 file: attributes and arrays of other types, shapes and values, or none at
all."""

from __future__ import annotations

import io
from random import Random
from typing import Any

import h5py
import numpy as np

_ATTRIBUTES: tuple[Any, ...] = (
    0,
    -1,
    2**62,
    1.5,
    np.nan,
    np.inf,
    1e300,
    "text",
    b"\xff",
    [1, 2],
    [],
    np.zeros((2, 2)),
)


def changed_hdf5(random: Random, content: bytes) -> bytes:
    """The same file with one to three of its attributes, datasets or groups changed."""
    stream = io.BytesIO(content)
    with h5py.File(stream, "r+") as file:
        for _ in range(random.choice((1, 1, 3))):
            names: list[str] = []
            file.visit(names.append)
            if not names:
                break
            name = random.choice(names)
            holder = file[name]
            if len(holder.attrs) and random.random() < 0.7:
                attribute = random.choice(sorted(holder.attrs))
                del holder.attrs[attribute]
                if random.random() < 0.8:
                    holder.attrs[attribute] = random.choice(_ATTRIBUTES)
            else:
                small = isinstance(holder, h5py.Dataset) and holder.nbytes < 2**20
                values = np.atleast_1d(holder[()] if small else np.zeros(3))
                del file[name]
                _put(random, file, name, values)
    return stream.getvalue()


def _put(random: Random, file: Any, name: str, values: Any) -> None:
    """Something else in the place of an array, or nothing."""
    match random.randrange(9):
        case 0:
            file[name] = np.asarray(values)[: len(values) // 2]
        case 1:
            file[name] = np.asarray(values).reshape(-1)
        case 2:
            file[name] = np.full(np.shape(values), -1)
        case 3:
            file[name] = np.full(np.shape(values), 1e30, np.float32)
        case 4:
            file[name] = np.full(np.shape(values), np.nan)
        case 5:
            file[name] = "text"
        case 6:
            file.create_dataset(
                name, shape=(2**40, 3), dtype="f8", chunks=(1024, 3)
            )  # promises 24 TiB, holds nothing
        case 7:
            file.create_group(name)
