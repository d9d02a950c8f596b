"""``python -m benchmarks [NAME ...]``: run the suite or some of it, print the rows, write dated
notes."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.registry import Row
from benchmarks.suite import ENTRIES, NOTES, Entry


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="benchmarks; none: all that need nothing more"
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="what there is, what it needs and where it is written up",
    )
    parser.add_argument(
        "--write", type=Path, metavar="FOLDER", help="also write a dated note per benchmark here"
    )
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in ENTRIES]
    if unknown:
        print(f"error: found {unknown[0]!r}, expected one of {', '.join(ENTRIES)}", file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(_listed(entry) for entry in ENTRIES.values()))
        return 0
    names = options.names or [
        name for name, entry in ENTRIES.items() if entry.benchmark is not None
    ]
    print(machine())
    codes = [_run(ENTRIES[name], options.write) for name in names]
    return max(codes, default=0)


def machine() -> str:
    versions = ", ".join(f"{name} {_version(name)}" for name in ("numpy", "torch"))
    return f"Python {platform.python_version()} on {platform.machine()}, {versions}"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _listed(entry: Entry) -> str:
    needs = f"  (needs {entry.needs})" if entry.needs else ""
    return f"{entry.name:<12} {entry.shows}{needs}\n{'':<12} {entry.command}; {NOTES}/{entry.note}"


def _run(entry: Entry, folder: Path | None) -> int:
    """What was measured is printed; a command of its own prints by itself."""
    print(f"\n{entry.name}: {entry.shows}", flush=True)
    if entry.benchmark is None:
        return subprocess.run(words_of(entry.command), check=False).returncode
    rows = entry.benchmark.measure()
    for row in rows:
        target = f"  (target {row.target})" if row.target else ""
        print(f"  {row.what:<52} {row.value:>10.4g} {row.unit}{target}", flush=True)
    if folder is not None:
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        folder.mkdir(parents=True, exist_ok=True)
        note = folder / f"{today}-{entry.name}.md"
        if note.exists():
            print(
                f"error: {note}: found a note, expected a name that is free: it may say more",
                file=sys.stderr,
            )
            return 2
        note.write_text(note_text(entry, rows, today), encoding="utf-8")
        print(f"wrote {note}")
    return 0


def words_of(command: str) -> list[str]:
    """A command of the table, with the Python that runs this one."""
    words = shlex.split(command)
    own = {"python": [sys.executable], "pytest": [sys.executable, "-m", "pytest"]}
    return [*own.get(words[0], words[:1]), *words[1:]]


def note_text(entry: Entry, rows: Sequence[Row], date: str) -> str:
    """A note to begin with: what was measured, when and with what; what it means is for a person to
    add."""
    lines = [
        f"# {entry.shows[0].upper()}{entry.shows[1:]}, {date}",
        "",
        f"{machine()}. Repeat: `{entry.command}`.",
        "",
    ]
    lines += ["| what | value | target |", "| --- | --- | --- |"]
    lines += [
        f"| {row.what} | {row.value:.4g} {row.unit}".rstrip() + f" | {row.target} |" for row in rows
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
