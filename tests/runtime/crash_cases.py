"""What a process does to files, recorded, and every state of the disk that a power cut could leave
of it.

A file system may lose whatever was not synced: the contents of a file before ``fsync`` of that
file, a name before ``fsync`` of its folder. It may also have kept all of it, or a part.
"""

from __future__ import annotations

import itertools
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from argosy.runtime.state.checkpoint import write

Event = tuple[str, ...]
"""What was done, and the paths; contents are beside it."""
Tree = dict[str, bytes | None]
"""Contents by path, None for a folder."""


class Recorder:
    """Notes what this process does below a folder, in order."""

    def __init__(self, root: Path) -> None:
        self.root, self.is_on = f"{root}/", False
        self.events: list[Event] = []
        self.contents: dict[int, bytes] = {}
        """Of files that were synced, by the event's index."""
        sys.addaudithook(self._note)
        self._sync, os.fsync = os.fsync, self._synced  # type: ignore[assignment]

    def _path(self, path: Any, folder: int = -1) -> str:
        before = f"{Path(f'/proc/self/fd/{folder}').readlink()}/" if folder >= 0 else ""
        return before + os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        match event, arguments:
            case "open", (path, _, flags) if flags & (os.O_WRONLY | os.O_RDWR) and not isinstance(
                path, int
            ):
                self._add("create", self._path(path))
            case "os.rename", (source, target, *_):
                self._add("rename", self._path(source), self._path(target))
            case "os.mkdir", (path, _, folder):
                self._add("mkdir", self._path(path, folder))
            case (("os.remove" | "os.rmdir"), (path, folder)):
                self._add("remove", self._path(path, folder))

    def _add(self, *event: str) -> None:
        if event[1].startswith(self.root):
            self.events.append(tuple(part.removeprefix(self.root) for part in event))

    def _synced(self, descriptor: int) -> None:
        self._sync(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if self.is_on and stat.S_ISDIR(os.fstat(descriptor).st_mode):
            self.events.append(("sync folder", os.path.relpath(path, self.root)))
        elif self.is_on:
            self.is_on = False
            self.contents[len(self.events)] = path.read_bytes()
            self.is_on = True
            self._add("sync", str(path))


def tree_of(root: Path) -> Tree:
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
    }


def record_saves(
    root: str, steps: tuple[int, ...]
) -> list[tuple[Tree, list[Event], dict[int, bytes], Tree]]:
    """For every save: the tree before it, what was done with which contents, and the tree after
    it."""
    folder, recorder, found = Path(root), Recorder(Path(root)), []
    for value, step in enumerate(steps):
        state = {
            "model.a": torch.full((3, 2), float(value)),
            "optimizer.a.m": torch.full((2,), float(-value)),
        }
        before = tree_of(folder)
        recorder.events, recorder.contents = [], {}
        recorder.is_on = True
        write(
            state, {"steps": step, "scale": 1.0, "calm": 0, "aliases": {}}, folder / "checkpoints"
        )
        recorder.is_on = False
        found.append((before, recorder.events, recorder.contents, tree_of(folder)))
    return found


def states_after(
    before: Tree, events: list[Event], contents: dict[int, bytes], done: int
) -> Iterator[Tree]:
    """What may be on the disk if the power is cut when so many events have happened."""
    for keeps_names, part in itertools.product((True, False), (0.0, 0.5, 1.0)):
        yield _state(before, events[:done], contents, keeps_names, part)


def _state(
    before: Tree, events: list[Event], contents: dict[int, bytes], keeps_names: bool, part: float
) -> Tree:
    """``part``: how much of a file's contents is kept that was not synced."""
    tree: dict[str, Any] = dict(before)
    files: list[list[bytes]] = []
    """The contents of files that were made, which names refer to."""
    made: dict[str, list[bytes]] = {}
    for index, (kind, *paths) in enumerate(events):
        if kind == "sync" and paths[0] in made:
            made[paths[0]][:] = [contents[index], b"synced"]
        if kind == "rename":
            made |= {
                paths[1] + path.removeprefix(paths[0]): made.pop(path)
                for path in list(made)
                if path == paths[0] or path.startswith(f"{paths[0]}/")
            }
        if kind == "create":
            made[paths[0]] = [b"", b""]
            files.append(made[paths[0]])
    position = iter(files)
    for index, (kind, *paths) in enumerate(events):
        file = next(position) if kind == "create" else None
        is_durable = any(
            later[0] == "sync folder" and any(str(Path(path).parent) == later[1] for path in paths)
            for later in events[index:]
        )
        if not keeps_names and not is_durable:
            continue
        match kind:
            case "create":
                tree[paths[0]] = file
            case "mkdir":
                tree[paths[0]] = None
            case "remove":
                tree.pop(paths[0], None)
            case "rename":
                inside = [
                    path for path in tree if path == paths[0] or path.startswith(f"{paths[0]}/")
                ]
                for path in inside:
                    tree[paths[1] + path.removeprefix(paths[0])] = tree.pop(path)
    result: Tree = {}
    for path, value in tree.items():
        if not isinstance(value, list):
            result[path] = value
        elif value[1]:
            result[path] = value[0]
        else:
            result[path] = b"\0" * round(100 * part)
    return {path: value for path, value in result.items() if _has_folders(path, result)}


def _has_folders(path: str, tree: Tree) -> bool:
    """A name in a folder that was lost is lost with it."""
    return all(str(parent) in tree for parent in Path(path).parents if str(parent) != ".")


def make(tree: Tree, root: Path) -> None:
    for path, value in sorted(tree.items()):
        if value is None:
            (root / path).mkdir(parents=True)
        else:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(value)
