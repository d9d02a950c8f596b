"""Checkpoints and weights that somebody else made: what would run code is refused, and nothing
runs."""

from __future__ import annotations

import io
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from argosy.errors import InputError
from argosy.runtime.processes.manifest import facts_of, write_manifest
from argosy.runtime.state.checkpoint import read_state_dict
from argosy.runtime.state.reading import load_tensors, read_weights


class Touch:
    """Makes a file when it is un-pickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def written(folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save({"model.weight": torch.ones(3, 2)}, checkpoint_id=folder, no_dist=True)
    return sealed(folder)


def sealed(folder: Path, aliases: dict[str, list[str]] | None = None) -> Path:
    """Write the manifest, as whoever changes a checkpoint can."""
    (folder / "argosy.json").unlink(missing_ok=True)
    files = {path.name: facts_of(path) for path in folder.iterdir()}
    write_manifest(folder, {"steps": 3, "scale": 1.0, "aliases": aliases or {}}, files)
    return folder


def changed(folder: Path, change: Callable[[Metadata], None]) -> Path:
    """A checkpoint with another table of contents."""
    metadata = FileSystemReader(written(folder)).read_metadata()
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return sealed(folder)


def test_a_checkpoint_is_read(tmp_path: Path) -> None:
    assert torch.equal(read_state_dict(written(tmp_path / "good"))["weight"], torch.ones(3, 2))


def test_a_table_of_contents_cannot_run_code(tmp_path: Path) -> None:
    """The same folder makes torch's own reader run it."""
    victim = tmp_path / "made"
    folder = changed(
        tmp_path / "bad", lambda metadata: setattr(metadata, "planner_data", Touch(victim))
    )
    with pytest.raises(InputError, match=r"the name posix\.mkdir, expected a table of tensors"):
        read_state_dict(folder)
    assert not victim.exists()
    FileSystemReader(folder).read_metadata()
    assert victim.exists()


@pytest.mark.parametrize("length", [3, 1 << 40, 1 << 62])
def test_a_table_of_contents_has_no_bytearrays(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], length: int
) -> None:
    """Of one that cannot be had, Python itself prints an error: "deallocated bytearray object has
    exported buffers"."""
    folder = written(tmp_path / "bad")
    (folder / ".metadata").write_bytes(
        b"\x80\x05" + pickle.BYTEARRAY8 + length.to_bytes(8, "little") + b"abc."
    )
    sealed(folder)
    with pytest.raises(InputError, match=r"bytearray.*, expected a table of tensors"):
        read_state_dict(folder)
    assert capfd.readouterr().err == ""


def test_an_entry_that_is_no_tensor_cannot_run_code(tmp_path: Path) -> None:
    victim = tmp_path / "made"

    def hide(metadata: Metadata) -> None:
        """What is wanted as a tensor, said to be bytes, which torch un-pickles."""
        stream = io.BytesIO()
        torch.save(Touch(victim), stream)
        (index, info), *_ = metadata.storage_data.items()
        (tmp_path / "bad" / info.relative_path).write_bytes(stream.getvalue())
        info.offset, info.length = 0, len(stream.getvalue())
        metadata.state_dict_metadata["model.weight"] = BytesStorageMetadata()
        metadata.storage_data = {type(index)("model.weight"): info}

    folder = changed(tmp_path / "bad", hide)
    with pytest.raises(InputError, match=r"no tensor for model\.weight"):
        load_tensors({"model.weight": torch.empty(3, 2)}, folder, alone=True)
    assert not victim.exists()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load({"model.weight": torch.empty(3, 2)}, checkpoint_id=folder, no_dist=True)
    assert victim.exists()


def test_entries_stay_in_the_folder_and_no_larger_than_it(tmp_path: Path) -> None:
    def outside(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = "../other"

    def endless(metadata: Metadata) -> None:
        metadata.state_dict_metadata["model.weight"].size = torch.Size([2**40, 2**10])

    with pytest.raises(InputError, match="outside the folder"):
        read_state_dict(changed(tmp_path / "outside", outside))
    with pytest.raises(InputError, match=r"an impossible size of model\.weight"):
        read_state_dict(changed(tmp_path / "endless", endless))


def test_what_is_no_checkpoint_or_names_no_weight_is_told(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        InputError, match=r"empty: found argosy\.json: .*, expected a whole checkpoint"
    ):
        read_state_dict(tmp_path / "empty")
    nameless = changed(
        tmp_path / "nameless", lambda metadata: metadata.state_dict_metadata.update({3: None})
    )  # type: ignore[dict-item]
    with pytest.raises(
        InputError, match=r"nameless: found an entry without a name, expected a table of tensors"
    ):
        read_state_dict(nameless)
    other = written(tmp_path / "other")
    (other / ".metadata").write_bytes(pickle.dumps({"model.weight": 3}))
    sealed(other)
    with pytest.raises(
        InputError, match=r"other: found another table, expected a table of tensors"
    ):
        read_state_dict(other)
    tied = sealed(written(tmp_path / "tied"), {"head": ["table"]})
    with pytest.raises(
        InputError, match=r'tied/argosy\.json: aliases: found "head", expected a weight'
    ):
        read_state_dict(tied)


def test_weights_cannot_run_code(tmp_path: Path) -> None:
    victim = tmp_path / "made"
    torch.save({"weight": Touch(victim)}, tmp_path / "weights.pt")
    with pytest.raises(InputError, match="expected weights as torch"):
        read_weights(tmp_path / "weights.pt")
    assert not victim.exists()
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(InputError, match="found a list, expected a table of tensors"):
        read_weights(tmp_path / "list.pt")
