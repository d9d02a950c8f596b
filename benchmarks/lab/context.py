"""``python -m benchmarks.lab.context [NOTE.md]``: one long sequence on two unequal devices, with
and without context.

A model as llama's, of one sample of many tokens, is planned twice: with sequences whole and with
sequences cut. Weights, gradients, keys, values and their transfers are real; the time of a block is
emulated (``context_worker``).
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from argosy.cost.compute import ComputeModel
from argosy.dtype import Dtype
from argosy.lab.lab import Lab, LabClock
from argosy.lab.system import why_not
from argosy.plan.file import dumps_plan
from argosy.plan.plan import Plan
from argosy.planner import Settings, find_plan
from argosy.runtime.processes.ranks import devices_by_rank
from argosy.sim.simulate import simulate
from argosy.workload.chain import Chain, Layer
from argosy.workload.profile import Profile, ProfileRow
from benchmarks.lab.cases import cluster_of
from benchmarks.lab.context_worker import BLOCKS, SECONDS, TOKENS, VOCABULARY, WIDTH
from benchmarks.lab.emulated import speed_of
from benchmarks.lab.run import _PATH, payload_share, with_payload

CLUSTER = cluster_of("context", [(2.0, 200.0), (1.0, 200.0)])
STEPS = 3
_BYTES = 4.0 * TOKENS * WIDTH


def chain() -> Chain:
    """What planner and simulator are given of the model."""
    end = {"kind": "end", "forward_flop": 1e6, "backward_flop": 2e6, "max_context": TOKENS // 2}
    block = Layer(
        name="block", kind="block", forward_flop=1e9, backward_flop=2e9, attention_flop=5e8, parameters=10 * WIDTH**2,
        activation_bytes=12 * _BYTES, output_bytes=_BYTES, key_value_bytes=2 * _BYTES, max_context=TOKENS // 2,
    )  # fmt: skip
    table = VOCABULARY * WIDTH
    layers = [
        Layer(name="embedding", parameters=table, activation_bytes=0.0, output_bytes=_BYTES, **end),
        *(replace(block, name=f"block{index}") for index in range(BLOCKS)),
        Layer(
            name="head", parameters=table + WIDTH, activation_bytes=_BYTES, output_bytes=4.0, **end
        ),
    ]
    return Chain(
        name="llama-like",
        layers=tuple(layers),
        sequence_length=TOKENS,
        dtype=Dtype.FP32,
        optimizer="sgd",
    )


def model() -> ComputeModel:
    profiles = {}
    for kind in {device.kind.name for device in CLUSTER.devices}:
        rows = tuple(
            ProfileRow(
                layer=layer,
                micro_batch=1,
                tensor_width=1,
                dtype=Dtype.FP32,
                forward_seconds=seconds / speed_of(kind),
                backward_seconds=2 * seconds / speed_of(kind),
            )
            for layer, seconds in (("block", SECONDS), ("end", 1e-3))
        )
        profiles[kind] = Profile(device=kind, model="llama-like", rows=rows)
    return ComputeModel(profiles=profiles)


def measured(plan: Plan, folder: Path) -> float:
    """Median seconds of an iteration on real processes in a lab."""
    plan_file, result = folder / "plan.json", folder / "result.json"
    plan_file.write_text(dumps_plan(plan), encoding="utf-8")
    worker = [
        sys.executable,
        "-m",
        "benchmarks.lab.context_worker",
        str(plan_file),
        str(STEPS),
        str(result),
    ]
    with Lab(CLUSTER, shares=False) as lab:
        lab.run(
            worker,
            devices=devices_by_rank(plan),
            environment=_PATH,
            timeout=500,
            clock=LabClock.READY,
        )
    return statistics.median(json.loads(result.read_text(encoding="utf-8")))


def main(arguments: Sequence[str]) -> int:
    reason = why_not()
    if reason is not None:
        print(f"no lab here: {reason}", file=sys.stderr)
        return 4
    note = (
        Path(arguments[0])
        if arguments
        else Path(f"benchmarks/results/{time.strftime('%Y-%m-%d')}-context.md")
    )
    lines = [
        "# One sequence on two unequal devices",
        "",
        f"{time.strftime('%Y-%m-%d')}. A model as llama's ({BLOCKS} blocks, {TOKENS} tokens, batch 1) on devices of",
        "speed 2 and 1 over 200 Mbit/s, in the lab: real processes, weights, keys, values and messages; blocks take",
        f"emulated times ({SECONDS:g} s at speed 1). Planned by `argosy plan --runnable`. Median of {STEPS} steps.",
        "",
        "| plan | predicted | measured | error |",
        "| --- | --- | --- | --- |",
    ]
    with tempfile.TemporaryDirectory() as name:
        share = payload_share(Path(name))
        for most in (1, 2):
            settings = Settings(level=2, runnable=True, max_context=most, max_width=1)
            plan = find_plan(chain(), CLUSTER, global_batch=1, settings=settings, model=model())
            ends = simulate(
                plan, chain(), with_payload(CLUSTER, share), model=model(), iterations=STEPS
            ).iteration_ends
            predicted, found = ends[-1] / STEPS, measured(plan, Path(name))
            stages = "; ".join(
                f"{stage.num_layers} layers on {', '.join(stage.devices)}"
                + (
                    f" in parts {'/'.join(f'{share:.3g}' for share in stage.replicas[0].shares)}"
                    * (stage.context > 1)
                )
                for stage in plan.stages
            )
            lines.append(
                f"| {stages} | {predicted:.3f} s | {found:.3f} s | {100 * (predicted / found - 1):+.1f} % |"
            )
            print(lines[-1], flush=True)
    note.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
