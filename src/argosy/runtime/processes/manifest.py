"""Write and check the manifest of a checkpoint: its files with their sizes and hashes. Needs no
torch.

``argosy.json`` is written last, when every other file of the checkpoint is on the disk. It holds
what training needs beside the tensors, size and SHA-256 of every other file, and its own SHA-256. A
folder that lacks it, or whose files differ from it in one bit, is *torn*: it is never loaded, and
the newest checkpoint that is whole is used instead. The hashes detect accidents, not forgeries: any
process that can change a file can change its hash.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from argosy.document import JsonObject, Schema, parse_json, read_text, validate
from argosy.errors import ArgosyError, invalid
from argosy.workload.fields import Natural

MANIFEST = "argosy.json"
"""The name of the manifest in the folder of a checkpoint."""
# Files that one process hashes at once.
_THREADS = 4
_Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class FileFacts(Schema):
    """The size and hash that a file of a checkpoint had when it was written."""

    bytes: Natural
    sha256: _Hash


class OuterFacts(Schema):
    """The state of exchanges between islands that a checkpoint of an island holds."""

    exchanges: Natural
    step: Natural
    next_step: Natural
    sync_every: Natural
    shared_since: list[Natural]


class Manifest(Schema):
    """The fields that ``argosy.json`` contains."""

    version: Literal[2]
    steps: Natural
    """The number of steps done."""
    scale: float
    """The loss scale."""
    calm: Natural = 0
    """The number of steps for which the loss scale has not changed."""
    aliases: dict[str, list[str]]
    """The other names of tied weights, by the name under which the weight is saved."""
    outer: OuterFacts | None = None
    files: dict[Annotated[str, Field(pattern=r"^[^/\x00]+$")], FileFacts]
    sha256: _Hash
    """The hash of everything else in the manifest."""


def facts_of(path: Path) -> JsonObject:
    """Return size and hash of a file."""
    with path.open("rb") as file:
        return {
            "bytes": os.fstat(file.fileno()).st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def write_manifest(
    folder: Path, about: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]
) -> None:
    """Write the manifest of a folder whose other files are complete, and sync it and the folder."""
    content = {"version": 2, **about, "files": files}
    content["sha256"] = _own_hash(content)
    path = folder / MANIFEST
    path.write_text(json.dumps(content, sort_keys=True))
    sync(path)
    sync(folder)


def sync(path: Path) -> None:
    """Flush the contents of a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _own_hash(content: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in content.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint; raise an ``InputError`` if it is missing or has changed
    since it was written."""
    path = folder / MANIFEST
    text = read_text(path)
    manifest = validate(parse_json(text, file=str(path)), Manifest)
    if _own_hash(json.loads(text)) != manifest.sha256:
        raise invalid(file=str(path), found="other contents than were written", expected=_WHOLE)
    return manifest


_WHOLE = "a whole checkpoint"
"""The expectation in messages about torn checkpoints."""


def check_whole(folder: Path) -> None:
    """Raise an ``InputError`` that names the file if a checkpoint is torn."""
    tear = tear_in(folder)
    if tear:
        raise invalid(file=str(folder), found=tear, expected=_WHOLE)


def tear_in(folder: Path, *, contents: bool = True, part: int = 0, parts: int = 1) -> str:
    """Return the reason why a checkpoint is torn, or "" if it is whole.

    Without ``contents`` only sizes are compared, which reads no file but the manifest. Several
    processes may divide the files: this one checks those of ``part``.
    """
    try:
        manifest = read_manifest(folder)
    except ArgosyError as error:
        return str(error).removeprefix(f"{folder}/")
    own = sorted(manifest.files.items())[part::parts]
    lengths = (_other_length(folder / name, facts) for name, facts in own)
    tear = next(filter(None, lengths), "")
    if tear or not contents:
        return tear
    with ThreadPoolExecutor(_THREADS) as pool:
        return next(
            filter(None, pool.map(lambda item: _other_contents(folder / item[0], item[1]), own)), ""
        )


def _other_length(path: Path, facts: FileFacts) -> str:
    try:
        status = path.stat()
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    if not stat.S_ISREG(status.st_mode):
        return f"{path.name} is not a file"
    return (
        ""
        if status.st_size == facts.bytes
        else f"{path.name} has {status.st_size} bytes of {facts.bytes}"
    )


def _other_contents(path: Path, facts: FileFacts) -> str:
    try:
        is_same = facts_of(path) == facts.model_dump()
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    return "" if is_same else f"{path.name} has other contents than were written"
