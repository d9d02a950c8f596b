"""Train a small GPT on four unequal hosts, by Argosy's plan and by the even one, for ``argosy
demo``.

The hosts are those of a lab, with shaped links between them, or plain processes if this machine
cannot have a lab. The speed of a device is emulated in both (``runtime.job.paced``): its layers
compute, then wait until their time is over, so that measurements do not depend on the cores of this
machine. The losses are compared with those of a plain loop in one process.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from argosy.cli.terminal import tell, write_file
from argosy.cluster.file import cluster_from_content
from argosy.cluster.topology import Cluster, canonical
from argosy.cost.compute import ComputeModel
from argosy.document import JsonObject, make_folder
from argosy.dtype import Dtype
from argosy.plan.file import dumps_plan
from argosy.plan.plan import Plan
from argosy.units import TIME
from argosy.workload.chain import Chain
from argosy.workload.load import load_model
from argosy.workload.profile import Profile, ProfileRow
from argosy.workload.profile_file import dump_profile

if TYPE_CHECKING:
    from rich.console import Console


# The small GPT is trained for this many steps.
STEPS = 6
# A training step has this many samples.
GLOBAL_BATCH = 16
# The config.json of the model.
_MODEL = {
    "model_type": "gpt2",
    "vocab_size": 128,
    "n_positions": 32,
    "n_embd": 64,
    "n_layer": 8,
    "n_head": 4,
}
_SPEEDS = {"fast": 4.0, "middle": 2.0, "slow": 1.0, "slower": 1.0}
"""The relative speed of each host's one device."""
# The bandwidth of each host's link in a lab.
_RATES = {"fast": "100 Mbit/s", "middle": "50 Mbit/s", "slow": "50 Mbit/s", "slower": "25 Mbit/s"}
_LOOPBACK = "10 Gbit/s"
"""The bandwidth that is assumed between plain processes, whose links are not shaped."""
# Seconds of one sample's forward through a block at speed 1.
_SECONDS = 12e-3
_EVEN = "megatron"
"""The planner of the even plan: the best one with equal layers and samples everywhere."""


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """The hosts that the training runs on."""

    cluster: Cluster
    profiles: Sequence[Profile]
    lab: str | None
    """The lab's name; None for plain processes."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A plan, and the times and losses that its run measured."""

    title: str
    plan: Plan
    seconds: float
    """The measured seconds of a step."""
    losses: tuple[float, ...]
    timeline: Path

    @property
    def predicted(self) -> float:
        """Return the predicted seconds of a step."""
        assert self.plan.predicted is not None
        return self.plan.predicted.iteration_seconds

    def to_dict(self) -> JsonObject:
        """Return the name and the times of the plan as a dict for JSON."""
        return {
            "name": self.title,
            "predicted_seconds": self.predicted,
            "measured_seconds": self.seconds,
        }


def train(console: Console, out: Path, *, in_lab: bool = True, quiet: bool) -> JsonObject:
    """Plan, run both plans, and compare them with predictions, with each other, and with one
    process."""
    from importlib.util import find_spec

    from argosy.lab.system import why_not

    console.print("\n4. And does it train?", style="bold")
    if find_spec("torch") is None:
        console.print("To see it, install torch: pip install 'argosy[torch]'")
        return {"skipped": "torch is not installed"}
    reason = why_not() if in_lab else "--no-lab"
    folder = out / "tiny-gpt"
    make_folder(folder)
    cluster, profiles = _cluster(in_lab=reason is None), _profiles()
    _introduce(console, reason)
    chain, plans = _plans(folder, cluster, profiles, quiet=quiet)
    with contextlib.ExitStack() as stack:
        lab = None
        if reason is None:
            from argosy.lab.lab import Lab

            tell("building the lab: a host per node, a shaped cable per link", quiet=quiet)
            lab = stack.enter_context(Lab(cluster, name=f"demo-{os.getpid()}", shares=False)).name
        hosts = Hosts(cluster=cluster, profiles=profiles, lab=lab)
        trained = [_run(folder, hosts, title, plan, quiet=quiet) for title, plan in plans.items()]
    tell("training the same in one process, with a plain loop", quiet=quiet)
    alone = _alone(trained[0].plan)
    worst = max(
        abs(a - b) / b for result in trained for a, b in zip(result.losses, alone, strict=True)
    )
    page = folder / "report.html"
    _write_page(hosts, chain, trained, page, quiet=quiet)
    _show(console, hosts, trained, alone, worst)
    console.print(
        f"wrote {page}: both plans, predicted and measured, as a page to look at in a browser"
    )
    return {
        "hosts": "processes" if lab is None else "lab",
        "why_no_lab": reason,
        "plans": [result.to_dict() for result in trained],
        "losses": trained[0].losses,
        "largest_difference_to_one_process": worst,
        "page": str(page),
    }


def _introduce(console: Console, reason: str | None) -> None:
    """Print where the training runs."""
    if reason is None:
        links = ", ".join(_RATES.values())
        where = f"four hosts of a lab on this machine, with links of {links}"
    else:
        where = f"four plain processes, their links not shaped (no lab: {reason})"
    console.print(
        f"A small GPT on {where}. Their speeds of 4 : 2 : 1 : 1 are emulated: a layer "
        "computes, then waits.\n"
    )


def _cluster(*, in_lab: bool) -> Cluster:
    """Build the cluster of four hosts, with shaped links if it is a lab."""
    content = {
        "name": "four-hosts",
        "kinds": [
            {
                "name": _kind(speed),
                "memory": "1 GiB",
                "memory_bandwidth": "20 GB/s",
                "flops": {"fp32": f"{speed:g} GFLOP/s"},
            }
            for speed in sorted(set(_SPEEDS.values()))
        ],
        "nodes": [
            {
                "name": name,
                "devices": {"kind": _kind(speed)},
                "nic": {"bandwidth": _RATES[name] if in_lab else _LOOPBACK, "latency": "100 us"},
            }
            for name, speed in _SPEEDS.items()
        ],
    }
    return cluster_from_content(canonical(content))


def _kind(speed: float) -> str:
    """Return the name of the device kind of a speed."""
    return f"CPU-{speed:g}"


def _profiles() -> list[Profile]:
    """Return the emulated times of layers as profiles for planner and simulator."""

    def row(layer: str, seconds: float) -> ProfileRow:
        """Return the row of a layer; a backward takes twice as long as a forward."""
        times = {"forward_seconds": seconds, "backward_seconds": 2 * seconds}
        return ProfileRow(layer=layer, micro_batch=1, tensor_width=1, dtype=Dtype.FP32, **times)

    return [
        Profile(
            device=_kind(speed),
            model="tiny-gpt",
            rows=(row("embedding", 0.0), row("block", _SECONDS / speed), row("head", 0.0)),
        )
        for speed in sorted(set(_SPEEDS.values()))
    ]


def _model(profiles: Sequence[Profile]) -> ComputeModel:
    """Return the compute model of the profiles."""
    return ComputeModel(profiles={profile.device: profile for profile in profiles})


def _plans(
    folder: Path, cluster: Cluster, profiles: Sequence[Profile], *, quiet: bool
) -> tuple[Chain, dict[str, Plan]]:
    """Return Argosy's plan and the even one, both with predictions."""
    from argosy.baselines import BASELINES, NoPlan, PlanningJob
    from argosy.cli.inputs import PlanningTask
    from argosy.cli.planning.searching import search
    from argosy.explain import with_prediction
    from argosy.planner import Settings

    write_file(folder / "config.json", json.dumps(_MODEL).encode())
    for profile in profiles:
        write_file(folder / f"{profile.device}.json", dump_profile(profile).encode())
    chain, model = load_model(str(folder / "config.json"), dtype="fp32"), _model(profiles)
    job = PlanningJob(chain=chain, cluster=cluster, global_batch=GLOBAL_BATCH, model=model)
    even = BASELINES[_EVEN](job)
    assert not isinstance(even, NoPlan), even.reason
    settings = Settings(runnable=True, max_width=1, max_context=1, max_expert=1)
    task = PlanningTask(
        chain=chain, cluster=cluster, global_batch=GLOBAL_BATCH, settings=settings, model=model
    )
    plans = {
        "argosy": search(chain, task, quiet=quiet),
        "even": with_prediction(even, chain, cluster, model=model),
    }
    for title, plan in plans.items():
        write_file(folder / f"{title}.json", dumps_plan(plan).encode())
    return chain, plans


def _run(folder: Path, hosts: Hosts, title: str, plan: Plan, *, quiet: bool) -> Trained:
    """Run ``argosy run`` as a user would; every process is given the times of its layers."""
    import argosy.runtime
    from argosy.cli.running.run import start_here
    from argosy.runtime.job.launch import Launch
    from argosy.runtime.processes.emulated import PACES
    from argosy.runtime.processes.ranks import devices_by_rank
    from argosy.runtime.processes.run_spec import RunSpec

    spec = RunSpec(
        plan=str(folder / f"{title}.json"),
        program=str(Path(argosy.runtime.__file__).parent / "job" / "tiny_gpt.py"),
        out=str(folder / f"run-{title}"),
        steps=STEPS,
    )
    launch = Launch(plan=plan, spec=spec, here=True, lab=hosts.lab)
    paces = [
        _SECONDS / _SPEEDS[hosts.cluster.device(name).node.rstrip("0")]
        for name in devices_by_rank(plan)
    ]
    environment = {PACES: ",".join(f"{pace:g}" for pace in paces), "OMP_NUM_THREADS": "1"}
    tell(f"training by the {title} plan: starting {len(paces)} processes", quiet=quiet)
    figures = start_here(launch, quiet=quiet, environment=environment)
    return Trained(
        title=title,
        plan=plan,
        seconds=figures["iteration_seconds"],
        losses=tuple(figures["losses"]),
        timeline=Path(figures["timeline"]),
    )


def _alone(plan: Plan) -> list[float]:
    """Train in one process with a plain loop, and return the losses."""
    sizes = [str(number) for number in (STEPS, plan.micro_batch_size, plan.num_micro_batches)]
    command = [sys.executable, "-m", "argosy.runtime.job.tiny_gpt", *sizes]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def _write_page(
    hosts: Hosts, chain: Chain, trained: Sequence[Trained], page: Path, *, quiet: bool
) -> None:
    """Write a page with both plans, predicted and measured."""
    from argosy.cli.planning.report import write_page
    from argosy.report.page import Report
    from argosy.timeline.file import load_timeline

    report = Report(
        plan=trained[0].plan,
        chain=chain,
        cluster=hosts.cluster,
        model=_model(hosts.profiles),
        measured={f"{result.title} plan": load_timeline(result.timeline) for result in trained},
        rivals=[(f"{result.title} plan, measured", result.seconds, "") for result in trained],
    )
    write_page(report, page, quiet=quiet)


def _show(
    console: Console, hosts: Hosts, trained: Sequence[Trained], alone: Sequence[float], worst: float
) -> None:
    """Print the times and the losses."""
    from argosy.report.plan import devices_in_short
    from argosy.report.tables import plain_table

    table = plain_table("plan", ">predicted", ">measured", ">off by")
    for result in trained:
        times = [TIME.short(seconds) for seconds in (result.predicted, result.seconds)]
        table.add_row(
            result.title, *times, f"{100 * (result.predicted / result.seconds - 1):+.0f} %"
        )
    console.print(table)
    console.print()
    for result in trained:
        layers = "; ".join(
            f"{s.end - s.first} on {devices_in_short(s.devices, hosts.cluster)}"
            for s in result.plan.stages
        )
        count, size = result.plan.num_micro_batches, result.plan.micro_batch_size
        console.print(
            f"{result.title}: layers {layers}; {count} micro-batches of {size}, "
            f"{result.plan.schedule!r}"
        )
    ours, even = trained
    console.print(
        f"\nArgosy's plan is {even.seconds / ours.seconds:.2f}x as fast as the even one when "
        f"measured, {even.predicted / ours.predicted:.2f}x as predicted."
    )
    console.print(
        f"{STEPS} steps: loss {ours.losses[0]:.4f} -> {ours.losses[-1]:.4f}; a plain loop in one "
        f"process: {alone[0]:.4f} -> {alone[-1]:.4f}; they differ by at most {worst:.1e}."
    )
