"""Faults that elastic runs survive: ``python -m benchmarks.faults [--first N] [--last N] [--minutes M]``.

Each seed is one run of real processes with four or five faults (``tests/runtime/chaos.py``); it is *right* if every
step's loss is that of one process, something happened at all times, and no process or file is left behind. With
``--minutes`` seeds are played one after the other for so long, beginning with ``--first``: a soak. While a run lasts,
the memory and open files of its agents are read every second: a leak shows as growth from its first third to its last.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parents[1] / "tests" / "runtime")]

from chaos import Schedule, draw, is_cut, play  # noqa: E402

_PAGE = 4096
_COLUMNS = (
    "seed | hosts x devices | network | faults | struck | generations | changes | steps repeated | seconds | losses"
)


@dataclass
class Usage:
    """Resident bytes and open files of agents, by process, as they were read."""

    samples: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def read(self, run_folder: str) -> None:
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):
                command = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
                if b"argosy.runtime.elastic.agent" in command and any(run_folder.encode() in part for part in command):
                    resident = int((entry / "statm").read_text().split()[1]) * _PAGE
                    files = sum(1 for _ in (entry / "fd").iterdir())
                    self.samples.setdefault(int(entry.name), []).append((resident, files))

    def growth(self) -> tuple[int, int]:
        """The most that an agent's resident bytes and open files grew from its second third to its last."""
        grown = [(0, 0)]
        for samples in self.samples.values():
            third = len(samples) // 3
            if third:
                middle, last = samples[third : 2 * third], samples[-third:]
                grown.append(tuple(max(s[at] for s in last) - max(s[at] for s in middle) for at in (0, 1)))  # type: ignore[arg-type]
        return max(g[0] for g in grown), max(g[1] for g in grown)


@contextlib.contextmanager
def watched(usage: Usage, folder: Path) -> Iterator[None]:
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(1.0):
            usage.read(str(folder))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def play_and_tell(seed: int, tally: Counter[str], growths: list[tuple[int, int]]) -> bool:
    """Play one seed and print its row."""
    cuts = is_cut(seed)
    schedule: Schedule = draw(seed, cuts=cuts)
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    faults = ", ".join(map(str, schedule.misfortunes))
    network = f"{schedule.bandwidth}{' (lab)' if cuts else ''}{', captured' if schedule.is_captured else ''}"
    sys.stdout.write(f"| {seed} | {schedule.hosts} x {schedule.devices} | {network} | {faults} | ")
    sys.stdout.flush()
    usage = Usage()
    try:
        with watched(usage, folder):
            figures = play(schedule, folder, cuts=cuts)
    except AssertionError as error:
        sys.stdout.write(f"FAILED, see {folder}: {str(error)[:6000]}\n")
        sys.stdout.flush()
        return False
    tally.update(one.what for one in schedule.misfortunes[: int(str(figures["struck"]))])
    growths.append(usage.growth())
    sys.stdout.write(" | ".join(str(value) for value in figures.values()) + " | right |\n")
    sys.stdout.flush()
    shutil.rmtree(folder)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--last", type=int, default=61, help="the last seed")
    parser.add_argument("--minutes", type=float, help="play seeds for so long instead")
    options = parser.parse_args()
    begin, seed, failed = time.monotonic(), options.first, []
    tally: Counter[str] = Counter()
    growths: list[tuple[int, int]] = []
    sys.stdout.write(f"| {_COLUMNS} |\n|{' --- |' * (_COLUMNS.count('|') + 1)}\n")

    def is_over() -> bool:
        if options.minutes is None:
            return seed > options.last
        return time.monotonic() - begin > 60 * options.minutes

    while not is_over():
        if not play_and_tell(seed, tally, growths):
            failed.append(seed)
        seed += 1
    played = seed - options.first
    minutes = (time.monotonic() - begin) / 60
    sys.stdout.write(
        f"\n{played - len(failed)} of {played} right in {minutes:.0f} minutes; failed: {failed or 'none'}\n"
    )
    sys.stdout.write("\n| fault | survived |\n| --- | --- |\n")
    for fault, count in sorted(tally.items()):
        sys.stdout.write(f"| {fault} | {count} |\n")
    most = [max((growth[at] for growth in growths), default=0) for at in (0, 1)]
    sys.stdout.write(f"\nagents grew by at most {most[0] / 1e6:.1f} MB and {most[1]} open files\n")
    return min(len(failed), 99)


if __name__ == "__main__":
    sys.exit(main())
