"""How the cost of planning and simulating grows, up to 16,384 devices.

    python -m benchmarks scale             the figures
    python -m benchmarks.scale FILE.png    the tables of the result note, and the growth as a picture

Every case runs in a process of its own, whose most memory counts. CPU seconds, imports excluded.
Growth is the slope between the two largest cases, both axes logarithmic: 1 is linear, 2 quadratic.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.registry import Benchmark, Row
from benchmarks.scale_cases import Figures, in_a_process

SIZES = (1024, 4096, 16384)
"""Devices of four kinds in equal numbers; as many samples in an iteration."""
PROOFS = (*((size, 2) for size in SIZES), (1024, 4))
"""Level 2: devices, and parts into which the devices of a kind are taken."""
RUNS = 100_000
"""Iterations of one simulation, and"""
FEWER = 400
"""of one that is also played whole."""


@dataclass(frozen=True, kw_only=True)
class Growth:
    """One case at several sizes."""

    what: str
    along: str
    sizes: tuple[int, ...]
    cpu: tuple[float, ...]

    @property
    def slope(self) -> float:
        return math.log(self.cpu[-1] / self.cpu[-2]) / math.log(self.sizes[-1] / self.sizes[-2])


@cache
def searched(devices: int, level: int, parts: int) -> Figures:
    return in_a_process("plan", devices, level, parts, devices)


@cache
def growths() -> tuple[Growth, ...]:
    """In devices, layers, micro-batches and scenarios."""
    sizes = (64, 256, *SIZES)
    found = [
        _growth(
            "level 1, llama-2-70b, a sample a device",
            "devices",
            sizes,
            [("plan", n, 1, 2, n) for n in sizes],
        )
    ]
    times = (1, 2, 4, 8, 16)
    layers = tuple(32 * each + 2 for each in times)
    cases: list[tuple[str | int, ...]] = [
        ("plan", 1024, 1, 2, 1024, "llama-2-7b", each) for each in times
    ]
    found.append(_growth("level 1, 1,024 devices, blocks of llama-2-7b", "layers", layers, cases))
    batches = (64, 256, 1024, 4096, 16384)
    cases = [("batches", batch) for batch in batches]
    found.append(_growth("level 1, 64 devices, gpt2-xl", "samples", batches, cases))
    counts = (32, 128, 512, 2048)
    cases = [("micro_batches", count) for count in counts]
    found.append(_growth("exact engine, 16 devices, one iteration", "micro-batches", counts, cases))
    scenarios = (1, 4, 16, 64)
    cases = [("scenarios", count) for count in scenarios]
    found.append(
        _growth("plan for scenarios, 8 devices, gpt2-medium", "scenarios", scenarios, cases)
    )
    return tuple(found)


def _growth(
    what: str, along: str, sizes: tuple[int, ...], cases: list[tuple[str | int, ...]]
) -> Growth:
    cpu = tuple(in_a_process(str(name), *arguments)["cpu"] for name, *arguments in cases)
    return Growth(what=what, along=along, sizes=sizes, cpu=cpu)


@cache
def repeated() -> tuple[Figures, Figures, Figures]:
    """Many iterations with jumps, fewer with jumps and without."""
    long, short, whole = (
        in_a_process("iterations", *each) for each in ((RUNS, 1), (FEWER, 1), (FEWER, 0))
    )
    return long, short, whole


def measure() -> list[Row]:
    rows = []
    for size in SIZES:
        first = searched(size, 1, 2)
        rows.append(Row(what=f"level 1 at {size:,} devices: CPU", value=first["cpu"], unit="s"))
    for size, parts in PROOFS:
        found, label = (
            searched(size, 2, parts),
            f"level 2 at {size:,} devices, units of {size // 4 // parts}",
        )
        rows += [
            Row(
                what=f"{label}: gap",
                value=100 * found["gap"],
                unit="%",
                target="<= 5" if size == 1024 else "",
            ),
            Row(what=f"{label}: CPU", value=found["cpu"], unit="s", target="<= 60"),
            Row(what=f"{label}: memory", value=found["rss"] / 1e9, unit="GB", target="<= 4"),
        ]
    rows += [
        Row(what=f"growth in {one.along}", value=one.slope, unit="slope", target="< 2")
        for one in growths()
    ]
    long, short, whole = repeated()
    rows += [
        Row(what=f"{RUNS:,} iterations: CPU", value=long["cpu"], unit="s"),
        Row(what=f"{RUNS:,} iterations: played", value=long["played"], unit="iterations"),
        Row(
            what=f"{FEWER} iterations, all played over jumped",
            value=whole["cpu"] / short["cpu"],
            unit="x",
        ),
        Row(
            what="their last end, difference",
            value=abs(short["last"] / whole["last"] - 1),
            unit="relative",
        ),
    ]
    return rows


def as_markdown() -> str:
    lines = [
        "| devices | level | units | gap | bound | plan | stages | CPU | memory |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for size, level, parts in (
        *((size, 1, 2) for size in SIZES),
        *((size, 2, parts) for size, parts in PROOFS),
    ):
        found = searched(size, level, parts)
        cells = [
            f"{size:,}",
            str(level),
            f"{found['granularity']:,.0f}",
            f"{100 * found['gap']:.2f} %",
        ]
        cells += [f"{found['bound']:.3f} s", f"{found['seconds']:.3f} s", f"{found['stages']:.0f}"]
        cells += [f"{found['cpu']:.1f} s", f"{found['rss'] / 1e9:.2f} GB"]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "| cost of | along | sizes | CPU s | slope at the end |",
        "| --- | --- | --- | --- | --- |",
    ]
    for one in growths():
        sizes, cpu = (
            ", ".join(texts)
            for texts in ([f"{n:,}" for n in one.sizes], [f"{s:.3g}" for s in one.cpu])
        )
        lines.append(f"| {one.what} | {one.along} | {sizes} | {cpu} | {one.slope:.2f} |")
    long, short, whole = repeated()
    lines += ["", "| iterations | played | CPU | last end |", "| --- | --- | --- | --- |"]
    for count, figures in ((RUNS, long), (FEWER, short), (FEWER, whole)):
        lines.append(
            f"| {count:,} | {figures['played']:,.0f} | {figures['cpu']:.2f} s | {figures['last']!r} s |"
        )
    return "\n".join(lines)


def draw(file: Path) -> None:
    """The growths side by side, with lines of slope 1 and 2 through the first point."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, NullFormatter

    figure, axes = pyplot.subplots(
        1, len(growths()), figsize=(4 * len(growths()), 3.8), layout="constrained"
    )
    for axis, one in zip(axes, growths(), strict=True):
        for slope, style in ((1, ":"), (2, "--")):
            line = [one.cpu[0] * (size / one.sizes[0]) ** slope for size in one.sizes]
            axis.loglog(
                one.sizes,
                line,
                style,
                color="grey",
                linewidth=1,
                label="linear" if slope == 1 else "quadratic",
            )
        axis.loglog(one.sizes, one.cpu, "o-", color="#3b82c4", label="measured")
        axis.set_ylim(min(one.cpu) / 2, max(one.cpu) * 8)
        axis.set_xticks(one.sizes, [f"{size:,}" for size in one.sizes])
        axis.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{seconds:g}"))
        for side in (axis.xaxis, axis.yaxis):
            side.set_minor_formatter(NullFormatter())
        axis.set_xlabel(one.along)
        axis.set_title(one.what, fontsize=9)
    axes[0].set_ylabel("CPU seconds")
    axes[0].legend(fontsize=8)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


BENCHMARK = Benchmark(
    name="scale",
    shows="planner up to 16,384 devices, growth, repeated iterations",
    measure=measure,
)

if __name__ == "__main__":
    print(as_markdown())
    draw(Path(sys.argv[1]))
