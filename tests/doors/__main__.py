"""Every export read by the system that it is for: one virtual environment per system, one table at
the end.

    python tests/doors [--newest] [SYSTEM ...]

A door is open if the system's own classes read the exports of llama-3-8b on mixed-16 that were
planned for it: one in its first number format, one in the first that all cards of mixed-16 have, so
that stages may be on unequal cards. Versions are those that the exporters name; ``--newest`` installs what is newest
instead and so says which version broke what. What pip does not have (argument parsers of
Megatron-LM and FlagScale) comes by git from GitHub, or from the folder or address in
ARGOSY_MEGATRON_LM and ARGOSY_FLAGSCALE.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from argosy.cli import main as argosy
from argosy.dtype import Dtype
from argosy.exporters.deepspeed import export_deepspeed
from argosy.exporters.form import Export
from argosy.exporters.torchtitan import export_torchtitan
from argosy.plan.file import plan_from_document, read_plan
from argosy.plan.model import planned_chain
from argosy.plan.plan import Plan, Replica, Stage
from argosy.plan.targets import TARGETS, TargetName
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.workload.load import load_architecture

HERE = Path(__file__).parent
ROOT = HERE.parent.parent / "build" / "doors"
TORCH = "torch==2.13.0"  # the newest with a build for CPUs that is small
NEWEST_TORCH = "torch==2.15.0"  # with CUDA, three gigabytes; it runs on CPUs as well
MODEL, CLUSTER, BATCH = "llama-3-8b", "mixed-16", "64"
PARSERS = {
    "ARGOSY_MEGATRON_LM": "https://github.com/NVIDIA/Megatron-LM",
    "ARGOSY_FLAGSCALE": "https://github.com/FlagOpen/FlagScale",
}
PARTS = {"ARGOSY_MEGATRON_LM": "megatron", "ARGOSY_FLAGSCALE": "flagscale"}
# Systems whose best plan for mixed-16 has stages on unequal cards, in a format that all cards have.
# DeepSpeed splits no tensors, so its plan leaves the V100s out.
UNEQUAL = (TargetName.TORCHTITAN, TargetName.MEGATRON, TargetName.FLAGSCALE)
# The Megatron-LM that FlagScale 0.9.0 patches.
PATCHED = "3a2a972d9ffd5cee534b761f0803ea1b07389d2f"


class ClosedError(Exception):
    """A door that does not open, with the reason."""


class AbsentError(ClosedError):
    """A repository that cannot be fetched, so that nothing is known about its door."""


@dataclass(frozen=True)
class Door:
    """What one system needs to read an export."""

    package: str | None
    """By pip; None: by git alone."""
    beside: tuple[str, ...]
    """What it imports and does not name."""
    arguments: Callable[[Path, Path], list[str]]
    """Of its reader, behind the folder of exports: by the door's folder and that one."""
    torch: str = TORCH


def run(*command: str | Path, **options: object) -> str:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, **options
    )
    if done.returncode:
        raise ClosedError("\n".join((done.stderr or done.stdout).strip().splitlines()[-12:]))
    return done.stdout


def checkout(name: str, revision: str, folder: Path) -> Path:
    """The part of a repository that is needed, at one revision."""
    part = PARTS[name]
    if (folder / part).exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run("git", "init", "-q", folder)
    given = os.environ.get(name, PARSERS[name])
    if (Path(given) / part).is_dir():  # a folder of files, not a repository
        shutil.copytree(Path(given) / part, folder / part)
    else:
        try:
            run("git", "-C", folder, "fetch", "-q", "--depth", "1", given, revision)
        except ClosedError as error:
            remedy = f"{name} may be a folder with its files, or another address"
            raise AbsentError(f"Cannot fetch {revision} of {given}; {remedy}: {error}") from None
        run("git", "-C", folder, "checkout", "-q", "FETCH_HEAD", "--", part)
    return folder


def plan_of(folder: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads((folder / "plan.json").read_text())
    return content


def devices(content: dict[str, object]) -> list[str]:
    return [
        name
        for stage in content["stages"]
        for replica in stage["replicas"]
        for name in replica["devices"]
    ]


def megatron_arguments(folder: Path, exports: Path) -> list[str]:
    source = checkout(
        "ARGOSY_MEGATRON_LM", f"core_v{TARGETS[TargetName.MEGATRON].version}", folder / "source"
    )
    names = devices(plan_of(exports))
    return [str(source), str(len(names)), names[-1].rpartition(".")[0], "32"]


def flagscale_arguments(folder: Path, exports: Path) -> list[str]:
    ours = checkout(
        "ARGOSY_FLAGSCALE", f"v{TARGETS[TargetName.FLAGSCALE].version}", folder / "source"
    )
    fresh = not (folder / "megatron" / "megatron").exists()
    megatron = checkout("ARGOSY_MEGATRON_LM", PATCHED, folder / "megatron")
    if fresh:
        patch = (
            ours
            / "flagscale"
            / "backends"
            / "Megatron-LM"
            / "megatron"
            / "training"
            / "arguments.py.patch"
        )
        run("git", "-C", megatron, "apply", patch.resolve())
    return [str(ours.resolve()), str(megatron.resolve())]


DOORS = {
    TargetName.TORCHTITAN: Door("torchtitan", (), lambda folder, exports: [], torch=NEWEST_TORCH),
    TargetName.MEGATRON: Door(
        "megatron-core", ("pydantic", "pyyaml", "regex", "six", "triton"), megatron_arguments
    ),
    TargetName.DEEPSPEED: Door(
        "deepspeed", ("setuptools", "wheel", "numpy"), lambda folder, exports: []
    ),
    TargetName.FLAGSCALE: Door(
        None,
        (
            "omegaconf",
            "aiohttp",
            "tqdm",
            "numpy",
            "packaging",
            "pydantic",
            "pyyaml",
            "regex",
            "six",
            "triton",
        ),
        flagscale_arguments,
    ),
}


def dtypes_of(name: TargetName) -> list[Dtype]:
    """The formats to plan in: V100s have no bf16, so plans in it use A100s alone."""
    first, *others = TARGETS[name].dtypes
    return [first, *[dtype for dtype in others if dtype is not Dtype.BF16][:1]]


def export(name: TargetName, dtype: Dtype, folder: Path) -> None:
    """``planned``: the plan that was made for the system; ``small``: uneven stages on two processes
    of a CPU, beside the first format."""
    written = folder / "planned"
    shutil.rmtree(folder, ignore_errors=True)
    written.mkdir(parents=True)
    file = str(folder / "plan.json")
    inputs = ["-m", MODEL, "-c", CLUSTER, "-b", BATCH, "--dtype", str(dtype)]
    target = written / "megatron.sh" if name is TargetName.MEGATRON else written
    for arguments in (
        ["plan", *inputs, "--for", str(name), "-q", "-o", file],
        ["export", file, "--to", str(name), "-o", str(target)],
    ):
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                argosy(arguments)
            except SystemExit as stop:
                if stop.code:
                    raise ClosedError(said.getvalue()) from stop
    if dtype is not TARGETS[name].dtypes[0]:
        if name in UNEQUAL:
            check_is_unequal(folder)
        return
    plan = plan_from_document(read_plan(str(folder / "plan.json")))
    for words, small, made in small_exports(name, plan):
        (folder / words).mkdir(exist_ok=True)
        for file, text in made(small).files:
            (folder / words / file).write_text(text)


def check_is_unequal(folder: Path) -> None:
    """Raise an error if a plan has no stages on unequal cards."""
    hosts = {device.partition(".")[0][0] for device in devices(plan_of(folder))}
    if len(hosts) < 2:
        raise ClosedError(
            f"the plan uses hosts {', '.join(sorted(hosts))} alone, not A100 and V100"
        )


def small_exports(
    name: TargetName, plan: Plan
) -> Iterator[tuple[str, Plan, Callable[[Plan], Export]]]:
    """Plans of uneven stages on two devices, by the folders that they are written to."""
    chain = planned_chain(plan.model)
    if name is TargetName.DEEPSPEED:
        yield (
            "small",
            two_devices(plan, ((0, 3, 0), (3, 4, 1)), samples=2),
            lambda small: export_deepspeed(small, chain),
        )
    if name is TargetName.TORCHTITAN:
        architecture = load_architecture(plan.model.name)
        cuts = {
            ScheduleKind.ONE_F_ONE_B: ((0, 20, 0), (20, 34, 1)),
            ScheduleKind.ZERO_BUBBLE: ((0, 20, 0), (20, 34, 1)),
            ScheduleKind.INTERLEAVED: ((0, 3, 0), (3, 20, 1), (20, 30, 0), (30, 34, 1)),
            ScheduleKind.ZERO_BUBBLE_V: ((0, 3, 0), (3, 20, 1), (20, 30, 1), (30, 34, 0)),
            ScheduleKind.DUALPIPE_V: ((0, 3, 0), (3, 20, 1), (20, 30, 1), (30, 34, 0)),
        }
        for kind, places in cuts.items():
            small = replace(
                two_devices(plan, places, samples=1),
                schedule=ScheduleSpec(
                    kind=kind, chunks=2 if kind is ScheduleKind.INTERLEAVED else 1
                ),
            )
            yield (
                f"small-{kind}",
                small,
                lambda small: export_torchtitan(small, chain, architecture),
            )


def two_devices(plan: Plan, places: Sequence[tuple[int, int, int]], *, samples: int) -> Plan:
    """A plan in fp32 whose stages are first layer, end and number of the device."""
    stages = tuple(
        Stage(first=first, end=end, replicas=(Replica(devices=(f"a0.{device}",), samples=samples),))
        for first, end, device in places
    )
    small = replace(
        plan, stages=stages, micro_batch_size=samples, num_micro_batches=4, global_batch=4 * samples
    )
    return replace(small, model=replace(small.model, dtype=Dtype.FP32), collectives=())


def install(name: TargetName, door: Door, folder: Path, *, newest: bool) -> str:
    """The version that is installed."""
    python = folder / "venv" / "bin" / "python"
    version = TARGETS[name].version
    wanted = (
        [] if door.package is None else [door.package if newest else f"{door.package}=={version}"]
    )
    if not python.exists():
        run(sys.executable, "-m", "venv", folder / "venv")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run(*pip, door.torch, *door.beside)
    if wanted:
        run(*pip, *(["--upgrade"] if newest else []), "--no-build-isolation", door.torch, *wanted)
        return run(
            python,
            "-c",
            f"from importlib.metadata import version; print(version({door.package!r}))",
        ).strip()
    return version


def open_door(name: TargetName, *, newest: bool) -> str:
    folder = ROOT / str(name)
    folder.mkdir(parents=True, exist_ok=True)
    door = DOORS[name]
    version = install(name, door, folder, newest=newest)
    try:
        for dtype in dtypes_of(name):
            exports = folder / str(dtype)
            export(name, dtype, exports)
            arguments = door.arguments(folder, exports)
            reader = (HERE / f"read_{name}.py").resolve()
            python = (folder / "venv" / "bin" / "python").absolute()
            run(python, "-W", "ignore", reader, exports.resolve(), *arguments, timeout=600)
    except AbsentError:
        raise
    except ClosedError as closed:
        raise ClosedError(f"{name} {version} does not read its export:\n{closed}") from None
    return version


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--newest", action="store_true", help="the newest versions instead of those that are named"
    )
    parser.add_argument("systems", nargs="*", choices=[*map(str, DOORS), []], default=[])
    given = parser.parse_args()
    failed = 0
    for name in map(TargetName, given.systems or DOORS):
        try:
            print(f"open    {name} {open_door(name, newest=given.newest)}", flush=True)
        except ClosedError as closed:
            failed += 1
            word = "untried" if isinstance(closed, AbsentError) else "closed "
            print(f"{word} {name}\n{closed}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
