"""The manifest of a checkpoint: its files with their sizes and hashes. Needs no torch.

``argosy.json`` is written last, when every other file of the checkpoint is on the disk. It holds
what training needs beside the tensors, size and SHA-256 of every other file, and its own SHA-256. A
folder that lacks it, or whose files differ from it in one bit, is *torn*: it is never loaded, and
the newest checkpoint that is whole is taken instead. The hashes find accidents, not forgeries:
whoever can change a file can change its hash.
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

from argosy.document import Schema, parse_json, read_text, validate
from argosy.errors import ArgosyError, InputError, Problem
from argosy.workload.fields import Natural

MANIFEST = "argosy.json"
_THREADS = 4
"""Files that are hashed at once by one process."""
_Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class FileFacts(Schema):
    """What a file of a checkpoint held when it was written."""

    bytes: Natural
    sha256: _Hash


class OuterFacts(Schema):
    """What a checkpoint of an island says about its exchanges."""

    exchanges: Natural
    step: Natural
    next_step: Natural
    sync_every: Natural
    shared_since: list[Natural]


class Manifest(Schema):
    """The content of ``argosy.json``."""

    version: Literal[2]
    steps: Natural
    """Steps done."""
    scale: float
    """The loss scale."""
    calm: Natural = 0
    """Steps for which it has not changed."""
    aliases: dict[str, list[str]]
    """Other names of tied weights."""
    outer: OuterFacts | None = None
    files: dict[Annotated[str, Field(pattern=r"^[^/\x00]+$")], FileFacts]
    sha256: _Hash
    """Of everything else in the manifest."""


def facts_of(path: Path) -> dict[str, Any]:
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
    """Put the contents of a file, or the names in a folder, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _own_hash(content: Mapping[str, Any]) -> str:
    rest = {name: value for name, value in content.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Return what the manifest says; an ``InputError`` if it is missing or not as it was
    written."""
    path = folder / MANIFEST
    text = read_text(path)
    manifest = validate(parse_json(text, file=str(path)), Manifest)
    if _own_hash(json.loads(text)) != manifest.sha256:
        raise InputError(
            [Problem(file=str(path), found="other contents than were written", expected=_WHOLE)]
        )
    return manifest


_WHOLE = "a whole checkpoint"


def check_whole(folder: Path) -> None:
    """Raise an ``InputError`` that names the file if a checkpoint is torn."""
    found = tear_in(folder)
    if found:
        raise InputError([Problem(file=str(folder), found=found, expected=_WHOLE)])


def tear_in(folder: Path, *, contents: bool = True, part: int = 0, parts: int = 1) -> str:
    """Return what makes a checkpoint torn, or "" if nothing does.

    Without ``contents`` only sizes are compared, which reads no file but the manifest. Several
    processes may divide the files: this one takes those of ``part``.
    """
    try:
        manifest = read_manifest(folder)
    except ArgosyError as error:
        return str(error).removeprefix(f"{folder}/")
    own = sorted(manifest.files.items())[part::parts]
    lengths = (_other_length(folder / name, facts) for name, facts in own)
    found = next(filter(None, lengths), "")
    if found or not contents:
        return found
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
        return f"{path.name} is no file"
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
