"""The last part of ``argosy demo --train``: a small GPT trained by the plan that was found for unequal processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from argosy.plan.plan import Plan

STEPS = 8
_MODEL = {"model_type": "gpt2", "vocab_size": 128, "n_positions": 32, "n_embd": 64, "n_layer": 6, "n_head": 4}
_NIC = {"bandwidth": "1 Gbit/s", "latency": "100 us"}
_CLUSTER = {
    "name": "three-processes",
    "nodes": [
        {"name": "fast", "count": 1, "devices": {"kind": "CPU-core", "count": 1}, "nic": _NIC},
        {"name": "slow", "count": 2, "devices": {"kind": "CPU-core", "count": 1, "efficiency": 0.5}, "nic": _NIC},
    ],
}
"""One process taken to be twice as fast as the other two; on this machine they are equal, so times are no promise."""


def train(console: Console, out: Path, *, quiet: bool) -> None:
    """Plan, run, and compare the losses with those of a plain loop in one process."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        console.print("\nTo see it train: pip install 'argosy[torch]', then argosy demo --train")
        return
    plan = _plan(out, quiet=quiet)
    by_plan = _run(out, quiet=quiet)
    alone = _alone(plan)
    worst = max(abs(one - other) / other for one, other in zip(by_plan["losses"], alone, strict=True))
    console.print("\n4. And does it train?", style="bold")
    for index, stage in enumerate(plan.stages):
        console.print(stage.describe(index, dict.fromkeys(stage.devices, "process")))
    console.print(
        f"{STEPS} steps of a small GPT on {len(plan.devices)} processes: loss {by_plan['losses'][0]:.4f} -> "
        f"{by_plan['losses'][-1]:.4f}; a plain loop in one process: {alone[0]:.4f} -> {alone[-1]:.4f}; "
        f"they differ by at most {worst:.1e}."
    )
    console.print(f"wrote {by_plan['timeline']} and {by_plan['checkpoints']}/", soft_wrap=True)


def _plan(out: Path, *, quiet: bool) -> Plan:
    from argosy.cli.plan import search
    from argosy.cli.terminal import write_file
    from argosy.cluster.file import cluster_from_content
    from argosy.cluster.topology import canonical
    from argosy.cost.compute import ComputeModel
    from argosy.plan.file import dumps_plan
    from argosy.planner import Settings
    from argosy.workload.load import load_model

    config = out / "tiny-gpt" / "config.json"
    config.parent.mkdir(parents=True, exist_ok=True)
    write_file(config, json.dumps(_MODEL).encode())
    chain, cluster = load_model(str(config), dtype="fp32"), cluster_from_content(canonical(_CLUSTER))
    settings = Settings(runnable=True)
    plan = search(chain, cluster, global_batch=24, settings=settings, model=ComputeModel(), quiet=quiet)
    write_file(out / "tiny-gpt" / "plan.json", dumps_plan(plan).encode())
    return plan


def _run(out: Path, *, quiet: bool) -> dict[str, Any]:
    """``argosy run`` as anybody would call it; every process on this machine."""
    from argosy.cli.run import start_here

    return start_here(out / "tiny-gpt" / "plan.json", _program(), out / "tiny-gpt" / "run", STEPS, quiet=quiet)


def _alone(plan: Plan) -> list[float]:
    sizes = [str(number) for number in (STEPS, plan.micro_batch_size, plan.num_micro_batches)]
    command = [sys.executable, "-m", "argosy.runtime.tiny_gpt", *sizes]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    losses: list[float] = json.loads(done.stdout)
    return losses


def _program() -> Path:
    import argosy.runtime

    return Path(argosy.runtime.__file__).parent / "tiny_gpt.py"
