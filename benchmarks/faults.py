"""Faults that elastic runs survive: ``python -m benchmarks.faults [--first N] [--last N] [--soak
MINUTES]``.

Each seed is one run of real processes with four or five faults (``tests/runtime/chaos.py``); it is
*right* if every step's loss is that of one process, something happened at all times, and no process
or file is left behind. The last table has how often each kind of fault was survived, with layers,
with captured programs and with tensor-parallel groups, and by which seeds.

``--soak`` plays one run for that long, with a fault every 11 s, in the lab if there is one. One
host never goes. Memory and open files of the agents are read every second, and lines are fitted
through them: a leak shows as a slope. Training is at a learning rate at which rounding errors stay
as small as they are, so that losses of thousands of steps can be held to those of one process.
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

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from runtime.chaos import LAST, Schedule, draw, is_cut, play, soak

from argosy.lab.system import why_not

_PAGE = 4096
_STARTING = 20.0
"""Seconds in which an agent imports and connects; they are left out of slopes."""
_LONG_ENOUGH = 60.0
"""Seconds over which a slope is fitted, at least."""
_COLUMNS = "seed | hosts x devices | network | faults | struck | generations | changes | steps repeated | seconds | losses"


@dataclass
class Usage:
    """Seconds, resident bytes and open files of agents, by process, as they were read."""

    samples: dict[int, list[tuple[float, int, int]]] = field(default_factory=dict)

    def read(self, run_folder: str) -> None:
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):
                command = (
                    (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
                )
                if b"argosy.runtime.elastic.agent" in command and any(
                    run_folder.encode() in part for part in command
                ):
                    resident = int((entry / "statm").read_text().split()[1]) * _PAGE
                    files = sum(1 for _ in (entry / "fd").iterdir())
                    self.samples.setdefault(int(entry.name), []).append(
                        (time.monotonic(), resident, files)
                    )

    def growth(self) -> tuple[int, int]:
        """The most that an agent's resident bytes and open files grew from its second third to its
        last."""
        grown = [(0, 0)]
        for samples in self.samples.values():
            third = len(samples) // 3
            if third:
                middle, last = samples[third : 2 * third], samples[-third:]
                grown.append(
                    tuple(max(s[at] for s in last) - max(s[at] for s in middle) for at in (1, 2))
                )  # type: ignore[arg-type]
        return max(g[0] for g in grown), max(g[1] for g in grown)

    def slopes(self) -> list[Slope]:
        """Of every agent that was watched for long enough after its start."""
        found = []
        for samples in self.samples.values():
            steady = [sample for sample in samples if sample[0] - samples[0][0] > _STARTING]
            if steady and steady[-1][0] - steady[0][0] >= _LONG_ENOUGH:
                times, resident, files = np.array(steady, dtype=float).T
                minutes = (times - times[0]) / 60
                per_minute = [
                    float(np.polyfit(minutes, values, 1)[0]) for values in (resident, files)
                ]
                most = int(files.max()), int(files[-1])
                found.append(
                    Slope(float(minutes[-1]), resident[0], resident[-1], *per_minute, *most)
                )
        return sorted(found, key=lambda slope: -slope.minutes)


@dataclass(frozen=True)
class Slope:
    """How one agent's memory and open files changed."""

    minutes: float
    first_bytes: float
    last_bytes: float
    bytes_per_minute: float
    files_per_minute: float
    most_files: int
    last_files: int

    def __str__(self) -> str:
        memory = f"{self.first_bytes / 1e6:.1f} | {self.last_bytes / 1e6:.1f} | {self.bytes_per_minute / 1e6:+.3f}"
        return f"| {self.minutes:.1f} | {memory} | {self.most_files} | {self.last_files} | {self.files_per_minute:+.2f} |"


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


def play_and_print(schedule: Schedule, tally: Tally, usage: Usage, *, cuts: bool) -> bool:
    """Play one schedule and print its row."""
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    faults = ", ".join(map(str, schedule.misfortunes))
    kinds = [
        (cuts, " (lab)"),
        (schedule.is_captured, ", captured"),
        (schedule.is_grouped, ", group"),
    ]
    network = schedule.bandwidth + "".join(text for is_so, text in kinds if is_so)
    sys.stdout.write(
        f"| {schedule.seed} | {schedule.hosts} x {schedule.devices} | {network} | {faults} | "
    )
    sys.stdout.flush()
    try:
        with watched(usage, folder):
            figures = play(schedule, folder, cuts=cuts)
    except AssertionError as error:
        sys.stdout.write(f"FAILED, see {folder}: {str(error)[:6000]}\n")
        sys.stdout.flush()
        return False
    tally.add(schedule, int(str(figures["struck"])))
    sys.stdout.write(" | ".join(str(value) for value in figures.values()) + " | right |\n")
    sys.stdout.flush()
    shutil.rmtree(folder)
    return True


@dataclass
class Tally:
    """By kind of fault: how often it was survived with layers, with captured programs and with
    tensor-parallel groups of either, and by which seeds."""

    layers: Counter[str] = field(default_factory=Counter)
    captured: Counter[str] = field(default_factory=Counter)
    grouped: Counter[str] = field(default_factory=Counter)
    seeds: dict[str, set[int]] = field(default_factory=dict)

    def add(self, schedule: Schedule, struck: int) -> None:
        for misfortune in schedule.misfortunes[:struck]:
            (self.captured if schedule.is_captured else self.layers)[misfortune.what] += 1
            self.grouped[misfortune.what] += schedule.is_grouped
            self.seeds.setdefault(misfortune.what, set()).add(schedule.seed)

    def __str__(self) -> str:
        rows = [
            "| fault | survived with layers | with captured programs | in groups | seeds |",
            "| --- | --- | --- | --- | --- |",
        ]
        for fault, seeds in sorted(self.seeds.items()):
            shown = ", ".join(map(str, sorted(seeds)))
            counts = f"{self.layers[fault]} | {self.captured[fault]} | {self.grouped[fault]}"
            rows.append(f"| {fault} | {counts} | {shown} |")
        return "\n".join(rows)


def play_seeds(first: int, last: int) -> int:
    """Play seeds one after the other and print all tables; the number that failed."""
    begin, failed, tally, growths = time.monotonic(), [], Tally(), [(0, 0)]
    captured = grouped = 0
    for seed in range(first, last + 1):
        cuts, usage = is_cut(seed), Usage()
        schedule = draw(seed, cuts=cuts)
        if play_and_print(schedule, tally, usage, cuts=cuts):
            growths.append(usage.growth())
            captured += schedule.is_captured
            grouped += schedule.is_grouped
        else:
            failed.append(seed)
    played, minutes = last + 1 - first, (time.monotonic() - begin) / 60
    right = f"{played - len(failed)} of {played} right, {captured} of them with captured programs"
    right += f", {grouped} with tensor-parallel groups"
    sys.stdout.write(
        f"\n{right}, in {minutes:.0f} minutes; failed: {failed or 'none'}\n\n{tally}\n"
    )
    most = [max(growth[at] for growth in growths) for at in (0, 1)]
    sys.stdout.write(f"\nagents grew by at most {most[0] / 1e6:.1f} MB and {most[1]} open files\n")
    return len(failed)


def play_soak(seed: int, minutes: float) -> int:
    """Play one long run and print what became of its agents' memory and open files; 1 if it
    failed."""
    tally, usage, begin = Tally(), Usage(), time.monotonic()
    cuts = why_not() is None
    is_right = play_and_print(soak(seed, minutes, cuts=cuts), tally, usage, cuts=cuts)
    sys.stdout.write(
        f"\n{(time.monotonic() - begin) / 60:.1f} minutes, {'right' if is_right else 'FAILED'}\n\n{tally}\n\n"
    )
    sys.stdout.write(
        "| minutes watched | MB at first | at last | MB/min | most files | at last | files/min |\n"
    )
    sys.stdout.write(f"|{' --- |' * 7}\n" + "".join(f"{slope}\n" for slope in usage.slopes()))
    return 0 if is_right else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults")
    parser.add_argument("--first", type=int, default=0, help="the first seed, or that of a soak")
    parser.add_argument("--last", type=int, default=LAST, help="the last seed")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="one run for so long instead")
    options = parser.parse_args()
    sys.stdout.write(f"| {_COLUMNS} |\n|{' --- |' * (_COLUMNS.count('|') + 1)}\n")
    if options.soak is not None:
        return play_soak(options.first, options.soak)
    return min(play_seeds(options.first, options.last), 99)


if __name__ == "__main__":
    sys.exit(main())
