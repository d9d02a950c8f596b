"""Read a user's own measured runs from a JSON file, version 1.

    {version, source?, blocking?, prefetch?, profiles?: [file, ...],
     runs: [{name?, plan: file, SETTINGS, seconds | timeline: file, peak_bytes?}
            {name?, model, cluster, sequence_length?, dtype?, optimizer?, tensor?, data?, pipeline?,
             context?, expert?, virtual_stages?, schedule?, cuts?: [blocks of each stage, ...],
             micro_batch, global_batch, recompute?, zero?, shard?, fused_attention?, SETTINGS,
             seconds | timeline, peak_bytes?}]}
    SETTINGS: system?, tuned_kernels?, compiled?, fused_loss?, buffers?, sequence_parallel?,
              async_tensor?, selective?, stops_early?, repeats_exchanges?, prefetch?,
              gradient_dtype?, reduce_dtype?

A run names the plan that ran, or the degrees of an even plan as Megatron-LM counts them, with
``micro_batch`` per replica. ``shard`` is the number of replicas over which ZeRO shards (hybrid
sharding if fewer than all). SETTINGS are fields of ``cost.calibration.Calibration``; a ``system``
sets those that the calibration of its name has, and settings beside it prevail. In place of
``seconds`` a run may name the timeline that ``argosy run`` has written: the median of its steps
counts, without the first, which includes set-up, unless it is the only one
(``Timeline.usual_seconds``). File names are relative to the folder of the file.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from argosy.calibrate import korthikanti, llm_foundry, sailor, torchtitan, vtrain
from argosy.calibrate.run import Degrees, MeasuredRun, Measurements, even_plan
from argosy.calibrate.table import columns_of, plain_name
from argosy.cluster.file import bundled_clusters, cluster_from_content, load_cluster
from argosy.cluster.topology import Cluster
from argosy.cost.calibration import Calibration
from argosy.cost.calibration_file import SharedOrNot, read_calibration
from argosy.document import Document, JsonObject, Schema, Word, is_there, read_json, validate
from argosy.errors import InputError, Mismatch, Problem, invalid
from argosy.plan.check import check_plan
from argosy.plan.file import plan_from_document, read_plan
from argosy.plan.model import planned_chain
from argosy.plan.plan import Plan, Recompute
from argosy.schedule import ScheduleKind
from argosy.timeline.file import load_timeline
from argosy.workload.chain import Chain
from argosy.workload.fields import Amount, Count, DtypeField, Name, OptimizerField
from argosy.workload.load import load_model, preset_names
from argosy.workload.profile_file import read_profile
from argosy.workload.systems import Buffers, Selective

SETTINGS = (
    "tuned_kernels",
    "compiled",
    "fused_loss",
    "buffers",
    "sequence_parallel",
    "async_tensor",
    "selective",
    "stops_early",
    "repeats_exchanges",
    "prefetch",
    "gradient_dtype",
    "reduce_dtype",
)
"""Names of the constants that a run states about the system that ran it."""


def _seconds(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise Mismatch(value, "seconds of an iteration, above 0")
    return float(value)


class _Run(Schema):
    makes = Degrees

    name: Name | None = None
    plan: Name | None = None
    model: Name | None = None
    cluster: Name | None = None
    sequence_length: Count | None = None
    dtype: DtypeField | None = None
    optimizer: OptimizerField | None = None
    tensor: Count = 1
    data: Count = 1
    pipeline: Count = 1
    micro_batch: Count | None = None
    global_batch: Count | None = None
    context: Count = 1
    expert: Count = 1
    virtual_stages: Count = 1
    schedule: Word[ScheduleKind] = ScheduleKind.ONE_F_ONE_B
    cuts: list[Count] = Field(default_factory=list)
    recompute: Word[Recompute] = Recompute.NONE
    zero: Literal[0, 1, 2, 3] = 0
    shard: Count | None = None
    fused_attention: bool = True
    system: Literal["megatron", "torchtitan", "deepspeed", "torch"] | None = None
    tuned_kernels: bool | None = None
    compiled: bool | None = None
    fused_loss: bool | None = None
    buffers: Word[Buffers] | None = None
    sequence_parallel: bool | None = None
    async_tensor: bool | None = None
    selective: Word[Selective] | None = None
    stops_early: bool | None = None
    repeats_exchanges: bool | None = None
    prefetch: bool | None = None
    gradient_dtype: DtypeField | None = None
    reduce_dtype: DtypeField | None = None
    seconds: Annotated[float, BeforeValidator(_seconds)] | None = None
    timeline: Name | None = None
    peak_bytes: Amount | None = None


class _File(Schema):
    version: Literal[1]
    source: str = ""
    blocking: SharedOrNot = False
    prefetch: bool = False
    profiles: list[Name] = Field(default_factory=list)
    runs: list[_Run] = Field(min_length=1)


def read_measured(source: Path | str, *, partly: bool = False) -> Measurements:
    """Read runs from a JSON file of this form, a published table (CSV), or a folder of Sailor's
    runs; if ``partly``, rows and runs that cannot be read are left out, with the reasons."""
    path = Path(source)
    if not is_there(path):
        expected = (
            "a file of measured runs (JSON, or a published table as CSV) or a folder of Sailor's"
        )
        raise invalid(file=str(path), expected=expected)
    if path.is_dir():
        return sailor.read_sailor_runs(path)
    if path.suffix in (".csv", ".tsv"):
        return _read_table(path, partly=partly)
    return read_runs(path, partly=partly)


_TABLES = (
    (vtrain.COLUMNS, vtrain.read_vtrain),
    (llm_foundry.COLUMNS, llm_foundry.read_llm_foundry),
    (torchtitan.COLUMNS, torchtitan.read_torchtitan),
    (korthikanti.COLUMNS, korthikanti.read_korthikanti),
    (sailor.COLUMNS, sailor.read_mixed),
)
"""Published tables that can be read, with the columns that each must have."""


def _read_table(path: Path, *, partly: bool) -> Measurements:
    columns = columns_of(path)
    for needed, read in _TABLES:
        if columns >= set(map(plain_name, needed)):
            return read(path, partly=partly)
    if not columns:
        raise invalid(file=str(path), expected="a head line and at least one row")
    absent = [[name for name in needed if plain_name(name) not in columns] for needed, _ in _TABLES]
    counts = [len(needed) for needed, _ in _TABLES]
    missing, count = min(zip(absent, counts, strict=True), key=lambda pair: len(pair[0]) / pair[1])
    if len(missing) == count:
        expected = "the columns of a table that docs/formats.md describes, or runs in JSON"
        raise invalid(file=str(path), line=1, expected=expected)
    expected = f"also the columns {', '.join(sorted(missing))}"
    raise invalid(file=str(path), line=1, expected=expected, suggestion=_other_rate(columns))


def _other_rate(columns: Collection[str]) -> str | None:
    """Return what to do with a table that states speed in another way."""
    if any("mfu" in name or "flop" in name for name in columns):
        return "FLOP per second are counted in several ways, so state tokens or seconds"
    if any("sample" in name or name in ("seconds", "step_time_s") for name in columns):
        return "a run in JSON takes the seconds of an iteration"
    return None


def read_runs(path: Path | str, *, partly: bool = False) -> Measurements:
    """Read a user's own measured runs from a JSON file; if ``partly``, runs that cannot be read are
    left out, unless none can be read."""
    path = Path(path)
    document = read_json(path)
    content = validate(document, _File)
    profiles = [read_profile(path.parent / name) for name in content.profiles]
    runs: list[MeasuredRun] = []
    left_out: list[str] = []
    for index, run in enumerate(content.runs):
        try:
            found = _run(document, index, run, path.parent)
            for device in () if profiles else map(found.cluster.device, found.plan.devices):
                device.kind.peak(found.chain.dtype)
            runs.append(replace(found, row=index))
        except InputError as error:
            placed = _placed(document, index, error)
            if not partly or len(content.runs) == 1:
                raise placed from None
            left_out.append(str(placed).splitlines()[0])
    if not runs:
        raise invalid(file=str(path), expected=f"a run that can be read; {left_out[0]}")
    return Measurements(
        source=content.source or path.stem,
        runs=tuple(runs),
        profiles={profile.device: profile for profile in profiles},
        blocking=content.blocking,
        prefetch=content.prefetch,
        left_out=tuple(left_out),
    )


def _placed(document: Document, index: int, error: InputError) -> InputError:
    """Return the error with the place of its run; a problem that all stages of an even plan have is
    reported once."""
    place, line = f"runs[{index}]", document.line(("runs", index))
    problems: dict[tuple[object, ...], Problem] = {}
    for problem in error.problems:
        path = problem.path or ""
        if problem.file in (None, document.file) and not path.startswith("runs["):
            path = f"{place}.{path}" if path else place
            problem = replace(problem, file=document.file, line=line, path=path)
        key = (problem.found, problem.expected, problem.message, problem.file)
        problems.setdefault(key, problem)
    return InputError(problems.values())


def _run(document: Document, index: int, run: _Run, folder: Path) -> MeasuredRun:
    if (run.seconds is None) == (run.timeline is None):
        raise document.error(
            ("runs", index, "seconds"), 'given, or a "timeline" in its place, and not both'
        )
    seconds, peak = (
        (run.seconds, None) if run.timeline is None else _measured(folder / run.timeline)
    )
    assert seconds is not None
    peak = run.peak_bytes if run.peak_bytes is not None else peak
    plan, chain, cluster, name = _plan_of_run(document, index, run, folder)
    stated = {name: getattr(run, name) for name in SETTINGS}
    stated["shard"] = run.shard if run.shard != run.data else None
    return MeasuredRun(
        name=name,
        plan=plan,
        chain=chain,
        cluster=cluster,
        seconds=seconds,
        peak_bytes=peak,
        settings={
            **_settings_of(run.system),
            **{name: value for name, value in stated.items() if value is not None},
        },
    )


@cache
def _settings_of(system: str | None) -> dict[str, Any]:
    """Return what the calibration of a system sets."""
    if system is None:
        return {}
    usual, own = Calibration(), read_calibration(system)
    constants = {field.name: getattr(own, field.name) for field in fields(Calibration)}
    return {name: value for name, value in constants.items() if value != getattr(usual, name)}


def _measured(path: Path) -> tuple[float, float | None]:
    """Return the seconds of a step and the peak bytes, if recorded, from the timeline of a run."""
    timeline = load_timeline(path)
    seconds = timeline.usual_seconds
    if timeline.clock != "measured" or seconds is None:
        actual = f"{timeline.clock}, {len(timeline.iteration_seconds)} iterations"
        expected = "a measured timeline with a finished iteration, as argosy run ends with"
        raise invalid(file=str(path), found=actual, expected=expected)
    peaks = timeline.peak_memory().values()
    return seconds, max(peaks, default=0.0) or None


def _plan_of_run(
    document: Document, index: int, run: _Run, folder: Path
) -> tuple[Plan, Chain, Cluster, str]:
    """Return plan, chain, cluster and name of a run: from its plan file, or from its degrees."""
    if run.plan is not None:
        return _plan_from_file(run, folder)
    missing = [
        name
        for name in ("model", "cluster", "micro_batch", "global_batch")
        if getattr(run, name) is None
    ]
    if missing:
        raise document.error(("runs", index, missing[0]), 'given, or a "plan" in place of degrees')
    assert run.model and run.cluster and run.micro_batch and run.global_batch
    if run.shard is not None and run.data % run.shard:
        expected = f"a divisor of data = {run.data}"
        raise document.error(("runs", index, "shard"), expected, run.shard)
    degrees: Degrees = run.value(chunks=run.virtual_stages)
    settings: JsonObject = {
        "sequence_length": run.sequence_length,
        "dtype": run.dtype,
        "optimizer": run.optimizer,
    }
    named = run.model if run.model in preset_names() else folder / run.model
    chain = load_model(named, fused_attention=run.fused_attention, **settings)
    cluster = _cluster(run.cluster, folder)
    plan = even_plan(degrees, chain, cluster)
    check_plan(plan, chain, cluster, file=document.file)
    return plan, chain, cluster, run.name or f"{run.model} {degrees!r}"


def _plan_from_file(run: _Run, folder: Path) -> tuple[Plan, Chain, Cluster, str]:
    """Return plan, chain, cluster and name of a run that names its plan file."""
    assert run.plan is not None
    path = folder / run.plan
    document = read_plan(str(path) if is_there(path) else run.plan)
    plan = plan_from_document(document)
    cluster = (
        cluster_from_content(plan.cluster.content)
        if run.cluster is None
        else _cluster(run.cluster, folder)
    )
    chain = planned_chain(plan.model)
    check_plan(plan, chain, cluster, document=document)
    return plan, chain, cluster, run.name or Path(run.plan).stem


def _cluster(name: str, folder: Path) -> Cluster:
    return load_cluster(name if name in bundled_clusters() else folder / name)
