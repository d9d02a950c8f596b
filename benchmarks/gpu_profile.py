"""Layers of real transformers on a GPU: seconds, kept bytes and peak memory by micro-batch, tensor
width and dtype.

Needs torch with a CUDA device, and argosy with pydantic. From the repository:

    python benchmarks/gpu_profile.py --dtype bf16 --output profile-bf16.json python
    benchmarks/gpu_profile.py --dtype fp32 --output profile-fp32.json python
    benchmarks/gpu_profile.py --dtype bf16 --resume profile-bf16.json --rounds 5 --output
    profile-bf16.json

The first takes about nine minutes on an H200, the second about three. ``--models`` does it in
parts.

A host's pace drifts within seconds by a quarter, so blocks that wait for their host are measured
again in ``--rounds`` rounds, each of which goes over all of them; a row holds every round and their
mean. The process keeps to ``--cores`` cores: threads that wander over many make the scatter twice
as large.

The file is written after every row, so a run that is cut leaves what it has; ``--resume FILE`` goes
on from one. Rows are written in order of the models' size; ``--limit`` ends a run before a time
limit would. ``--device cpu --tiny`` is a try without a GPU. Each layer is measured alone as one
device of a tensor-parallel group sees it (``runtime/slices``, ``runtime/stack``).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from argosy.errors import InputError
from argosy.measure.slices import check_sliceable
from argosy.measure.stack import Stack, measure_stack, stack_seconds
from argosy.workload.preset import Preset, read_preset

MODELS = {
    "bf16": (
        "gpt2", "gpt2-medium", "bert-large", "opt-350m", "gpt2-xl", "qwen2.5-7b", "llama-2-7b", "llama-3-8b",
        "qwen3-8b", "gpt-neox-20b", "opt-30b", "llama-3-70b", "gpt3-175b",
    ),
    "fp32": ("gpt2", "gpt2-medium", "bert-large", "opt-350m", "gpt2-xl", "llama-2-7b"),
}  # fmt: skip
KINDS = ("block", "head", "embedding")
MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 16)
WIDTHS = (1, 2, 4, 5, 8)
MOST_TOKENS = {"bf16": 32768, "fp32": 8192}
MOST_FLOP = {"bf16": 2.5e14, "fp32": 3e13}
"""Of a forward of one layer's stack: larger ones take long and show the same."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement to make."""

    model: str
    layer: str
    micro_batch: int
    tensor_width: int
    dtype: str
    sequence_length: int


def cases(dtype: str, models: tuple[str, ...], *, tiny: bool) -> Iterator[Case]:
    for name in models:
        preset = read_preset(name)
        tokens = 64 if tiny else preset.sequence_length or 1024
        counts = (1, 2) if tiny else MICRO_BATCHES
        for kind in KINDS:
            for width in (1, 2) if tiny else WIDTHS:
                for samples in counts:
                    case = Case(
                        model=name, layer=kind, micro_batch=samples, tensor_width=width, dtype=dtype,
                        sequence_length=tokens,
                    )  # fmt: skip
                    if _fits(preset, case):
                        yield case


def _fits(preset: Preset, case: Case) -> bool:
    architecture, tokens = preset.config.architecture, case.micro_batch * case.sequence_length
    try:
        check_sliceable(
            architecture, tokens=case.sequence_length, width=case.tensor_width, name=case.model
        )
    except InputError:
        return False
    flop = 8 * tokens * architecture.blocks[0].parameters(architecture.hidden)
    logits = 4 * tokens * architecture.head.outputs
    small = tokens <= MOST_TOKENS[case.dtype] and flop <= MOST_FLOP[case.dtype]
    return small and (
        case.layer == "block" or (logits <= 16e9 and case.micro_batch in (1, 2, 4, 8))
    )


def measure(case: Case, device: torch.device, *, seconds: float) -> dict[str, Any]:
    row = asdict(measure_stack(_stack(case, device), seconds=seconds))
    return asdict(case) | row | {"rounds": [[row["forward_seconds"], row["backward_seconds"]]]}


def measure_again(row: dict[str, Any], device: torch.device, *, seconds: float) -> None:
    """One more round of a row."""
    case = Case(**{name: row[name] for name in Case.__dataclass_fields__})
    row["rounds"].append(stack_seconds(_stack(case, device), seconds=seconds))
    row["forward_seconds"], row["backward_seconds"] = map(
        statistics.fmean, zip(*row["rounds"], strict=True)
    )


def waits_for_host(row: dict[str, Any]) -> bool:
    alone = row["forward_device_seconds"] + row["backward_device_seconds"]
    return row["layer"] == "block" and alone < 0.9 * (
        row["forward_seconds"] + row["backward_seconds"]
    )


def _stack(case: Case, device: torch.device) -> Stack:
    return Stack(
        architecture=read_preset(case.model).config.architecture,
        kind=case.layer,
        samples=case.micro_batch,
        tokens=case.sequence_length,
        width=case.tensor_width,
        dtype=DTYPES[case.dtype],
        device=device,
    )


def about(device: torch.device) -> dict[str, Any]:
    """With what and when it was measured."""
    on_card = device.type == "cuda"
    versions = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
    }
    if on_card:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        versions["driver"] = subprocess.run(
            query, capture_output=True, text=True, check=False
        ).stdout.split("\n")[0]
        versions["cudnn"] = str(torch.backends.cudnn.version())
    return {
        "device": torch.cuda.get_device_name() if on_card else "CPU",
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="bf16", choices=list(DTYPES))
    parser.add_argument("--models", help="some of the models, separated by commas")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="a file of an earlier run, whose rows are kept")
    parser.add_argument(
        "--limit", type=float, default=540.0, help="seconds after which no new row is begun"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.15, help="that each measurement takes at least"
    )
    parser.add_argument(
        "--rounds", type=int, default=1, help="measurements of blocks that wait for their host"
    )
    parser.add_argument("--cores", type=int, default=4, help="that the process keeps to; 0: all")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="short sequences and few cases: a try")
    options = parser.parse_args()
    device = torch.device(options.device)
    models = tuple(options.models.split(",")) if options.models else MODELS[options.dtype]
    rows = json.loads(options.resume.read_text())["rows"] if options.resume else []
    done = {tuple(row[name] for name in Case.__dataclass_fields__) for row in rows}
    todo = [
        case
        for case in cases(options.dtype, models, tiny=options.tiny)
        if tuple(asdict(case).values()) not in done
    ]
    if options.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    head, began = about(device), time.monotonic()

    def out_of_time() -> bool:
        return time.monotonic() - began > options.limit

    def keep() -> None:
        text = ",\n".join(json.dumps(row) for row in rows)
        options.output.write_text(json.dumps(head)[:-1] + f', "rows": [\n{text}\n]}}\n')

    for number, case in enumerate(todo, 1):
        if out_of_time():
            print(f"stopped with {len(todo) - number + 1} of {len(todo)} to go", flush=True)
            break
        try:
            rows.append(measure(case, device, seconds=options.seconds))
        except torch.OutOfMemoryError:
            print(f"[{number}/{len(todo)}] {case}: out of memory", flush=True)
            continue
        keep()
        print(
            f"[{number}/{len(todo)}] {case.model} {case.layer} {case.micro_batch} x{case.tensor_width}",
            flush=True,
        )
    waiting = [row for row in rows if waits_for_host(row)]
    for count in range(2, options.rounds + 1):
        for row in waiting:
            if len(row["rounds"]) < count and not out_of_time():
                measure_again(row, device, seconds=options.seconds)
        keep()
        print(f"round {count} of {len(waiting)} rows that wait for their host", flush=True)
    print(f"{len(rows)} rows in {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
