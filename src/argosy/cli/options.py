"""Define options that several commands share."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from argosy.cli import names
from argosy.errors import bad_input
from argosy.schedule import ScheduleKind

# The largest tensor-parallel group: larger than any real one, and small enough to be listed.
_MOST_DEVICES = 65_536
# The largest number of cells per side of a mesh: more than fits into any memory.
_MOST_CELLS = 65_536


def no_nan(parameter: typer.CallbackParam, value: float | None) -> float | None:
    """Raise ``InputError`` if an option is NaN: not every version of typer rejects it."""
    if value is not None and math.isnan(value):
        raise bad_input("a number", value, parameter.opts[0])
    return value


Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object instead, with a version in it.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]
Width = Annotated[
    int | None,
    typer.Option(
        "--width", min=40, max=10_000, help="Columns to use; by default those of the terminal."
    ),
]
PlanSource = Annotated[
    str,
    typer.Argument(
        metavar="PLAN",
        help="A plan.json, or the name of a bundled plan.",
        show_default=False,
        autocompletion=names.plans,
    ),
]
OptionalPlan = Annotated[
    str | None,
    typer.Argument(
        metavar="PLAN",
        help="A plan.json, or the name of a bundled plan, in place of a model.",
        show_default=False,
        autocompletion=names.plans,
    ),
]
ClusterSource = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help="A cluster file or bundled name, in place of the cluster inside the plan.",
        autocompletion=names.clusters,
    ),
]
Traces = Annotated[
    list[str] | None,
    typer.Option(
        "--trace",
        help="What changes over time, in place of the cluster's own changes: LINK=FILE.csv, "
        "DEVICE=FILE.csv, a .toml with [[changes]], or none. Repeatable.",
        metavar="TRACE",
    ),
]
Profiles = Annotated[
    list[str] | None,
    typer.Option(
        "--profile",
        help="Measured layer times of one device kind, in place of the roofline: JSON, DAPPLE's "
        "text, or a bundled name such as h200-llama-2-7b. Repeatable. none: the roofline.",
        metavar="FILE",
        autocompletion=names.profiles,
    ),
]
CalibrationFile = Annotated[
    str | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        help="Constants of the cost model, as argosy calibrate -o writes them, or h200-bf16, "
        "h200-fp32. none: the default ones.",
        autocompletion=names.calibrations,
    ),
]
ScheduleName = Annotated[
    str | None,
    typer.Option("--schedule", help=f"In place of the plan's: {', '.join(ScheduleKind)}."),
]
GroupSize = Annotated[int | None, typer.Option("--k", help="Group size of the kfkb schedule.")]
Iterations = Annotated[
    int | None,
    typer.Option(
        "--iterations", "-n", help="How many to play; 1, or with --until as many as begin."
    ),
]
Until = Annotated[
    str | None,
    typer.Option("--until", help='No iteration begins after this time, such as "2 min".'),
]
TargetCluster = Annotated[
    str,
    typer.Option(
        "--cluster", "-c", help="A cluster file, or a bundled name.", autocompletion=names.clusters
    ),
]
OptionalCluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        "-c",
        help="A cluster file, or a bundled name; of a plan, by default its own.",
        autocompletion=names.clusters,
    ),
]
OptionalModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="A model's name (argosy models), a config.json or its folder, a .toml.",
        autocompletion=names.models,
    ),
]
OptionalBatch = Annotated[
    int | None, typer.Option("--global-batch", "-b", help="Samples per iteration.")
]
ProgramSource = Annotated[
    str | None,
    typer.Option(
        "--program", metavar="FILE.py:build", help="A torch program to share, in place of a model."
    ),
]
SequenceLength = Annotated[
    int | None,
    typer.Option("--sequence-length", help="Tokens per sample, in place of the model's."),
]
DtypeName = Annotated[
    str | None,
    typer.Option("--dtype", help="fp32, tf32, fp16, bf16 or fp8, in place of the model's."),
]
OptimizerName = Annotated[
    str | None,
    typer.Option(
        "--optimizer",
        help="adamw, adam, lion, momentum, adamw8bit, adafactor or sgd, in place of the model's; "
        "with --program, the one that the program makes.",
    ),
]
TrainName = Annotated[
    str | None,
    typer.Option("--train", help="full: all weights. lora: adapters beside frozen weights."),
]
LoraSettings = Annotated[
    str | None,
    typer.Option(
        "--lora",
        metavar="SETTINGS",
        help=(
            "rank=16,targets=q,v by default; targets: q, k, v, o, gate, up, down or all. Implies "
            "--train lora."
        ),
    ),
]
FreezePatterns = Annotated[
    list[str] | None,
    typer.Option(
        "--freeze",
        metavar="PATTERN",
        help="Layers that are not trained, such as 'block.[0-7]'. Repeatable.",
    ),
]
BaseWeights = Annotated[
    str | None,
    typer.Option("--base-weights", help="Format of frozen matrices in blocks: int8 or nf4."),
]
Level = Annotated[
    int,
    typer.Option(
        "--level",
        min=1,
        max=2,
        help="1: a good plan in seconds. 2: search on until --gap is proven.",
    ),
]
Gap = Annotated[
    float,
    typer.Option(
        "--gap",
        min=0,
        help="Level 2 ends when no plan can be faster by more than this.",
        callback=no_nan,
    ),
]
TimeBudget = Annotated[
    str | None,
    typer.Option(
        "--time-budget",
        help=(
            'CPU time after which the search ends, such as "30 s"; each of them with scenarios, '
            "traces or prices."
        ),
    ),
]
MemoryBudget = Annotated[
    str,
    typer.Option(
        "--memory-budget",
        help="Memory of the search itself, not of devices, at which it ends with the best plan "
        "so far.",
    ),
]
Schedules = Annotated[
    list[str] | None,
    typer.Option(
        "--schedule",
        metavar="SCHEDULE",
        help="Only this one: 1f1b, eager-1f1b, kfkb (k=2 and k=4), kfkb:K, gpipe, zero-bubble, "
        "interleaved, zero-bubble-v or dualpipe-v. Repeatable. Searched without this: 1f1b, "
        "eager-1f1b and kfkb, which keep few micro-batches in memory and need no backward in two "
        "halves, as gpipe and zero-bubble do; interleaved (2 and 4 chunks), zero-bubble-v and "
        "dualpipe-v are tried on the best plans, without a bound of their own.",
    ),
]
NoPrune = Annotated[
    bool, typer.Option("--no-prune", help="Remove nothing before it is looked at; slow.")
]
EvenShares = Annotated[
    bool,
    typer.Option(
        "--even-shares",
        help="Every replica takes as many samples: for systems that cannot share unevenly.",
    ),
]
MaxWidth = Annotated[
    int | None,
    typer.Option(
        "--max-width",
        min=1,
        max=_MOST_DEVICES,
        help="Tensor-parallel groups of at most so many devices.",
    ),
]
MaxContext = Annotated[
    int | None,
    typer.Option(
        "--max-context",
        min=1,
        help="Cut sequences into at most so many parts; by default only long ones are cut.",
    ),
]
MaxExpert = Annotated[
    int | None,
    typer.Option(
        "--max-expert",
        min=1,
        help="Split experts over at most so many holders; by default any number.",
    ),
]
NoMixed = Annotated[bool, typer.Option("--no-mixed", help="No stage on several kinds of device.")]
Scenarios = Annotated[
    list[str] | None,
    typer.Option(
        "--scenario",
        metavar="SCENARIO",
        help="A way the network may change: LINK=FILE.csv, LINK=GENERATOR:key=value,..., a .toml "
        "with [[changes]], or "
        "none; several joined by +. Repeatable: the plan is chosen over all of them.",
    ),
]
RobustName = Annotated[
    str,
    typer.Option(
        "--robust",
        help="What counts over the scenarios: mean, p95 or worst iteration time; of plan without "
        "scenarios, model: the slow end of the interval that a prediction has.",
    ),
]
ForTarget = Annotated[
    str | None,
    typer.Option(
        "--for",
        metavar="SYSTEM",
        help="Only plans that this system can run, so that argosy export --to SYSTEM takes them: "
        "torchtitan, megatron, deepspeed, flagscale or torch. Also takes its constants, unless "
        "--calibration names others.",
    ),
]
ForTrace = Annotated[
    str | None,
    typer.Option(
        "--for-trace",
        metavar="SCENARIO",
        help=(
            "Compare one plan for all, re-planning at every change, and hindsight, over this way "
            "to change."
        ),
    ),
]
Objective = Annotated[
    str, typer.Option("--objective", help="throughput, or cost: the cheapest step.")
]
MaxPrice = Annotated[
    float | None,
    typer.Option(
        "--max-price-per-hour", min=0, help="Devices for at most so much an hour.", callback=no_nan
    ),
]
MaxCost = Annotated[
    float | None,
    typer.Option(
        "--max-cost-per-step", min=0, help="Steps for at most so much each.", callback=no_nan
    ),
]
Islands = Annotated[
    str,
    typer.Option(
        "--islands",
        metavar="auto|off|N",
        help="Groups of devices that train on their own and exchange parameters now and then "
        "(DiLoCo): another "
        "algorithm, for slow links. auto: where that is faster than the best synchronous plan.",
    ),
]
SyncEvery = Annotated[
    str,
    typer.Option(
        "--sync-every",
        metavar="H|auto",
        help="With --islands: steps between exchanges. auto: as few as are cheap.",
    ),
]
MaxSyncEvery = Annotated[
    int,
    typer.Option(
        "--max-sync-every", min=1, help="With --islands: the most that --sync-every auto chooses."
    ),
]
Fragments = Annotated[
    int,
    typer.Option(
        "--fragments", min=1, help="With --islands: parts of the model that are exchanged in turn."
    ),
]
Overlap = Annotated[
    bool, typer.Option("--overlap", help="With --islands: steps go on during exchanges.")
]
Compress = Annotated[
    str,
    typer.Option(
        "--compress", help="With --islands: none, bf16 or int8, the numbers that are exchanged."
    ),
]
OuterRates = Annotated[
    str,
    typer.Option(
        "--outer",
        metavar="RATE,MOMENTUM",
        help="With --islands: the outer optimizer; 1,0 is a plain average.",
    ),
]
OffloadKinds = Annotated[
    str | None,
    typer.Option(
        "--offload",
        metavar="KINDS",
        help="What a stage may keep in host memory: some of optimizer, activations, weights, with "
        "commas between them; optimizer=nvme for a drive. Stages use it where it is faster or "
        "nothing else fits. weights and nvme are priced and not run.",
    ),
]
PowerRank = Annotated[
    int,
    typer.Option(
        "--powersgd",
        metavar="RANK",
        min=0,
        max=1024,
        help=(
            "Sum gradients as matrices of this rank (PowerSGD): another algorithm, for slow "
            "links. 0: as they are."
        ),
    ),
]
Runnable = Annotated[
    bool,
    typer.Option("--runnable", help="Only plans that argosy's own runtime executes as they are."),
]
Workers = Annotated[
    int,
    typer.Option("--workers", min=1, max=256, help="How many simulate the finalists side by side."),
]
ExecutorName = Annotated[
    str, typer.Option("--executor", help="What the workers are: process or thread.")
]
MeshCells = Annotated[
    int | None,
    typer.Option(
        "--mesh",
        min=4,
        max=_MOST_CELLS,
        help="Cells per side; by default twice the particles of a side.",
    ),
]
Clip = Annotated[
    float | None,
    typer.Option("--clip", min=0, help="Most that the gradient's norm may be.", callback=no_nan),
]
Patience = Annotated[
    float,
    typer.Option(
        "--patience", min=1, max=1e9, help="Seconds to wait for a silent rank.", callback=no_nan
    ),
]
LostAfter = Annotated[
    float,
    typer.Option(
        "--lost-after",
        min=0.5,
        help="Seconds of silence after which a node is lost.",
        callback=no_nan,
    ),
]
