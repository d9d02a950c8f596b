"""Inputs of the readers: a valid set of files, in which one is changed as a document, as text or as
bytes."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import PurePath
from random import Random

from fuzz.fuzz_trees import changed, json_text, odd_text, toml_text

Files = dict[str, bytes]
"""Relative path of every file and what is in it."""


def mutated(random: Random, files: Files) -> Files:
    """The same files, one of them changed; about one in fifty is left as it is."""
    name = random.choice(sorted(files))
    content = files[name]
    luck = random.random()
    if luck < 0.02:
        return dict(files)
    if luck < 0.7:
        with _deeply():
            content = _as_document(random, PurePath(name).suffix, content)
    elif luck < 0.9:
        content = changed_text(random, content.decode("utf-8", "replace")).encode(
            "utf-8", "replace"
        )
    else:
        content = changed_bytes(random, content)
    return {**files, name: content}


@contextlib.contextmanager
def _deeply() -> Iterator[None]:
    """Lets what is made here be nested more deeply than what reads it allows."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def _as_document(random: Random, suffix: str, content: bytes) -> bytes:
    """Changed by what the file's format is; formats without a tree are changed as text."""
    text = content.decode("utf-8", "replace")
    match suffix:
        case ".json":
            return json_text(changed(random, json.loads(text))).encode("utf-8", "replace")
        case ".jsonl":
            lines = text.splitlines()
            at = random.randrange(len(lines))
            lines[at] = json_text(changed(random, json.loads(lines[at])))
            return "\n".join(lines).encode("utf-8", "replace")
        case ".toml":
            return toml_text(changed(random, tomllib.loads(text))).encode("utf-8", "replace")
        case ".hdf5":
            from fuzz.fuzz_hdf5 import changed_hdf5

            return changed_hdf5(random, content)
        case ".metadata":
            return changed_bytes(random, content)
    return changed_text(random, text).encode("utf-8", "replace")


def changed_text(random: Random, text: str) -> str:
    """Lines or words of a text removed, repeated, swapped or replaced."""
    for _ in range(random.choice((1, 1, 2, 4))):
        by_line = random.random() < 0.4
        parts: list[str] = (
            text.splitlines(keepends=True) if by_line else re.findall(r"\w+|\W", text)
        )
        if not parts:
            return odd_text(random)
        at, other = random.randrange(len(parts)), random.randrange(len(parts))
        match random.randrange(5):
            case 0:
                del parts[at]
            case 1:
                parts[at:at] = [parts[at]] * random.choice((1, 2, 30))
            case 2:
                parts[at], parts[other] = parts[other], parts[at]
            case 3:
                plain = ("9" * 5000, "0-99999999999", "1e-5", "NaN", "-", ",", "=", "<", '"', "")
                parts[at] = random.choice(plain) if random.random() < 0.2 else odd_text(random)
            case _:
                parts = parts[: at + 1]
        text = "".join(parts)
    return text


def changed_bytes(random: Random, content: bytes) -> bytes:
    """Bytes flipped, cut, repeated or inserted."""
    data = bytearray(content)
    for _ in range(random.choice((1, 1, 3, 20))):
        at = random.randrange(len(data) + 1)
        match random.randrange(5):
            case 0 if at < len(data):
                data[at] ^= 1 << random.randrange(8)
            case 1:
                del data[at:]
            case 2:
                data[at:at] = random.randbytes(random.choice((1, 4, 64)))
            case 3:
                data[at:at] = data[at : at + random.choice((1, 8, 200))]
            case _:
                data[at : at + random.choice((1, 2, 8))] = random.choice(
                    (
                        b"",
                        b"\x00",
                        b"\xff" * 8,
                        b"\xed\xa0\x80",
                        b"\xef\xbb\xbf",
                        b"\r",
                        b"\x7f\xff\xff\xff",
                    )
                )
    return bytes(data)
