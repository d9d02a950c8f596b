"""Read checkpoints as data only, so that a folder from an untrusted source cannot make this process
run code.

torch.distributed.checkpoint pickles its table of contents, and un-pickles an entry that claims to
be no tensor. Here the table may consist of torch's own records and nothing else, every entry that
is read must be a tensor (which torch reads with ``weights_only``), its bytes must lie in the
folder, and a tensor must not be larger than the folder itself.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from pickletools import genops
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.futures import Future

from argosy.document import check_readable
from argosy.errors import InputError, invalid

_Record = TypeVar("_Record", Metadata, TensorStorageMetadata)

_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {
        "Size",
        *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
    },
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}
"""Names that a table of contents may contain, by module: records without behaviour."""


class _Records(pickle.Unpickler):
    """An unpickler that builds records of torch's checkpoints and plain values; it refuses all
    other names before they are looked up."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _RECORDS.get(module, ()):
            raise pickle.UnpicklingError(f"the name {module}.{name}")
        return super().find_class(module, name)


def _unpickled(data: bytes) -> object:
    """Return the records in a table of contents.

    A table with bytearrays is refused: for one of an impossible length, Python 3.11 frees memory
    that it has not initialised, and prints an error that cannot be caught.
    """
    may_have = pickle.BYTEARRAY8 in data
    if may_have and any(
        operation.code.encode("latin-1") == pickle.BYTEARRAY8 for operation, *_ in genops(data)
    ):
        raise pickle.UnpicklingError("a bytearray")
    return _Records(io.BytesIO(data)).load()


class DataReader(FileSystemReader):
    """A reader of a checkpoint's folder that returns data only."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        try:
            metadata = _unpickled((self.folder / ".metadata").read_bytes())
        except FileNotFoundError:
            raise _refused(self.folder, "no .metadata", "a checkpoint's folder") from None
        except Exception as error:  # broken bytes can make pickle raise anything
            raise _refused(self.folder, f"{type(error).__name__}: {error}", _TABLE) from None
        problem = next(_problems(metadata, self.folder), None)
        if problem is not None:
            raise _refused(self.folder, problem, _TABLE)
        assert isinstance(metadata, Metadata)
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            if item.type is not LoadItemType.TENSOR:
                raise _refused(
                    self.folder,
                    f"no tensor for {item.dest_index.fqn}",
                    "tensors: other entries are code",
                )
        return super().read_data(plan, planner)


_TABLE = "a table of tensors, as torch.distributed.checkpoint writes it"
"""The expectation in messages about a bad table of contents."""


def _refused(folder: Path, found: str, expected: str) -> InputError:
    return invalid(file=str(folder), found=found[:200], expected=expected)


def _problems(metadata: object, folder: Path) -> Iterator[str]:
    """Yield statements of the table of contents that cannot be true."""
    if not _is_whole(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        yield "another table"
        return
    names = {path.name for path in folder.iterdir()}
    whole = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(name, str):
            yield "an entry without a name"
        if isinstance(entry, TensorStorageMetadata) and not (
            _is_whole(entry, type(entry)) and _fits(entry, whole)
        ):
            yield f"an impossible size of {name}"
    for info in (
        metadata.storage_data.values() if isinstance(metadata.storage_data, dict) else [None]
    ):
        if getattr(info, "relative_path", None) not in names or getattr(
            info, "transform_descriptors", None
        ):
            yield "entries outside the folder or packed"


def _is_whole(record: object, kind: type[_Record]) -> TypeGuard[_Record]:
    """Return whether a record is of torch's class and has all of its fields, since pickle creates
    records without checking fields."""
    return isinstance(record, kind) and all(hasattr(record, field.name) for field in fields(kind))


def _fits(entry: TensorStorageMetadata, whole: int) -> bool:
    size, dtype = entry.size, getattr(entry.properties, "dtype", None)
    return (
        isinstance(size, torch.Size)
        and isinstance(dtype, torch.dtype)
        and size.numel() * dtype.itemsize <= whole
    )


def entries(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Return the tensors of a checkpoint by name."""
    table = DataReader(folder).read_metadata().state_dict_metadata
    return {
        name: entry for name, entry in table.items() if isinstance(entry, TensorStorageMetadata)
    }


def load_tensors(wanted: Mapping[str, Tensor], folder: Path, *, alone: bool = False) -> None:
    """Fill tensors from a checkpoint: all ranks of the job together, or this process ``alone``."""
    with warnings.catch_warnings():
        if alone:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            load_distributed(dict(wanted), storage_reader=DataReader(folder), no_dist=alone)
        except CheckpointException as error:
            cause = next((cause for cause, _ in error.failures.values()), error)
            if isinstance(cause, InputError):
                raise cause from None
            raise _refused(
                folder, f"{type(cause).__name__}: {cause}", "a whole checkpoint of this model"
            ) from None


def read_weights(source: Path) -> Mapping[str, Tensor]:
    """Return a state dict (``torch.save`` or safetensors) that is memory-mapped, so that a rank
    reads only what it holds."""
    if source.exists():
        check_readable(source)
    try:
        if source.suffix == ".safetensors":
            from safetensors.torch import load_file

            values: Any = load_file(source)
        else:
            values = torch.load(source, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # pickle, zip and safetensors each have their own errors
        reason = str(error).splitlines()[0] if str(error) else "no message"
        actual = f"{type(error).__name__}: {reason}"
        raise _refused(source, actual, "weights as torch.save or safetensors writes them") from None
    if not isinstance(values, Mapping) or not all(
        isinstance(value, Tensor) for value in values.values()
    ):
        raise _refused(source, f"a {type(values).__name__}", "a table of tensors")
    return values
