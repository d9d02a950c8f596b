"""Offer the package to Python programs: every function takes names, files or objects, and returns
what a notebook can show.

    plan = argosy.find_plan("llama-3-8b", "mixed-16", global_batch=128, dtype="fp16")
    plan.explain()
    plan.simulate(iterations=3).iteration_seconds
    plan.save("plan.json")
    argosy.compare("gpt2-xl", "mixed-16", global_batch=64)
    argosy.export(plan, "torchtitan", folder="job")

A model is a ``Chain`` or anything that ``load_model`` accepts; a cluster is a ``Cluster`` or
anything that ``load_cluster`` accepts; a plan is a ``Plan`` or anything that ``load_plan`` accepts.
A plan brings its model and its cluster with it unless others are given.
"""

from __future__ import annotations

import html
import io
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from pydantic import BaseModel, ValidationError, create_model

from argosy.cluster.file import cluster_from_content, load_cluster
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.cost.remembered import remembered, with_what_holds
from argosy.dtype import Dtype
from argosy.errors import bad_input, excluded
from argosy.plan import check
from argosy.plan.file import dumps_plan, load_plan
from argosy.plan.model import planned_chain
from argosy.plan.plan import Plan
from argosy.planner import CapturedProgram, Settings
from argosy.planner import find_plan as search_plan
from argosy.timeline import Timeline
from argosy.workload.chain import Chain
from argosy.workload.load import load_model

if TYPE_CHECKING:
    from argosy.cost.calibration import Calibration
    from argosy.exporters.form import Export
    from argosy.report.page import Report

# Tables are printed this many characters wide.
_COLUMNS = 120
# The settings of a search that count something.
_COUNTS = ("replicas", "width", "context", "expert", "max_width", "max_context", "max_expert")


@dataclass(frozen=True, repr=False)
class Shown:
    """A result that prints well: ``value`` is for programs, ``text`` for people."""

    value: Any
    text: str

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.text)}</pre>"


@dataclass(frozen=True, kw_only=True)
class _Played:
    """A plan together with everything that a simulation of it needs."""

    plan: Plan
    chain: Chain
    cluster: Cluster
    model: ComputeModel


def _plan(plan: Plan | str | Path) -> Plan:
    return (
        plan
        if isinstance(plan, Plan)
        else load_plan(_named(plan, "a Plan, a plan's file or name", "plan"))
    )


def _cluster(cluster: Cluster | str | Path) -> Cluster:
    if isinstance(cluster, Cluster):
        return cluster
    return load_cluster(_named(cluster, "a Cluster, a cluster's file or name", "cluster"))


def _chain(model: Chain | str | Path, **sizes: Any) -> Chain:
    given = [name for name, value in sizes.items() if value is not None]
    if not isinstance(model, Chain):
        return load_model(_named(model, "a Chain, a model's file or name", "model"), **sizes)
    if given:
        raise excluded(given[0], "a Chain, which has its own")
    return model


def _named(value: object, expected: str, where: str) -> str | Path:
    if isinstance(value, str | Path):
        return value
    raise bad_input(expected, f"an object of class {type(value).__name__}", where)


def _whole(value: Any, where: str, *, least: int = 1) -> int:
    """Return a whole number of at least ``least``, also one of numpy."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise bad_input(f"a whole number, at least {least}", value, where)
    return number


def _settings(settings: Settings | None) -> Settings:
    """Return the settings of a search, which a program may have made with any values."""
    if settings is None:
        return Settings()
    if not isinstance(settings, Settings):
        found = f"an object of class {type(settings).__name__}"
        raise bad_input("argosy.Settings, such as Settings(level=2)", found, "settings")
    if settings.level not in (1, 2):
        raise bad_input("1 or 2", settings.level, "settings.level")
    try:
        _schema_of_settings().model_validate(vars(settings), strict=True)
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        expected = next(field.type for field in fields(Settings) if field.name == name)
        raise bad_input(str(expected), getattr(settings, name), f"settings.{name}") from None
    for name in _COUNTS:
        if getattr(settings, name) is not None:
            _whole(getattr(settings, name), f"settings.{name}")
    return settings


@lru_cache(maxsize=1)
def _schema_of_settings() -> type[BaseModel]:
    """Return a schema that has the types of ``Settings``."""
    types: dict[str, Any] = {name: (kind, ...) for name, kind in get_type_hints(Settings).items()}
    return create_model("Settings", __config__={"arbitrary_types_allowed": True}, **types)


def _cost_model(model: ComputeModel | None) -> ComputeModel | None:
    if model is None or isinstance(model, ComputeModel):
        return model
    found = f"an object of class {type(model).__name__}"
    raise bad_input("a ComputeModel, which is the cost model", found, "model")


def _played(
    plan: Plan | str | Path, model: Chain | str | Path | None, cluster: Cluster | str | Path | None
) -> _Played:
    loaded = _plan(plan)
    where = cluster_from_content(loaded.cluster.content) if cluster is None else _cluster(cluster)
    ref = loaded.model
    if model is None:
        chain = planned_chain(ref)
    elif isinstance(model, Chain):
        chain = model
    else:
        chain = _chain(
            model, sequence_length=ref.sequence_length, dtype=ref.dtype, optimizer=ref.optimizer
        )
    check.check_plan(loaded, chain, where)
    costs = remembered(loaded)
    chain, where, priced = costs.chain(chain), costs.cluster(where), costs.compute_model
    return _Played(
        plan=with_what_holds(loaded, chain, where, priced), chain=chain, cluster=where, model=priced
    )


def _text(*parts: Any) -> str:
    """Return the text that ``rich`` prints for tables and lines, without colours."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=_COLUMNS, force_terminal=False, highlight=False)
    for part in parts:
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip()


def find_plan(
    chain: Chain | CapturedProgram | str | Path,
    cluster: Cluster | str | Path,
    *,
    global_batch: int | None = None,
    settings: Settings | None = None,
    model: ComputeModel | None = None,
    sequence_length: int | None = None,
    dtype: Dtype | str | None = None,
    optimizer: str | None = None,
    system: str | None = None,
) -> Plan:
    """Find the best plan for a model on a cluster, with its certificate, prediction, history and
    cost model.

    ``sequence_length``, ``dtype`` and ``optimizer`` are for a model that is given by name;
    ``model`` is the cost model. A program that ``capture_program`` captured has its own batch, and
    needs no ``global_batch``. ``system`` is ``torchtitan``, ``megatron``, ``deepspeed``,
    ``flagscale`` or ``torch``: only plans that it runs, priced with its constants.
    """
    workload = (
        chain
        if isinstance(chain, CapturedProgram)
        else _chain(chain, sequence_length=sequence_length, dtype=dtype, optimizer=optimizer)
    )
    where, settings, model = _cluster(cluster), _settings(settings), _cost_model(model)
    batch = None if global_batch is None else _whole(global_batch, "global_batch")
    if system is not None:
        if isinstance(workload, CapturedProgram):
            raise excluded("system", "a captured program, which only Argosy runs")
        if model is not None:
            raise excluded("system", "model, the cost model: a system has its own")
        name = workload.name if isinstance(chain, Chain) else str(chain)
        settings, constants = _for_system(system, settings, workload, name)
        workload, where = constants.chain(workload), constants.cluster(where)
        model = constants.compute_model()
    return search_plan(workload, where, global_batch=batch, settings=settings, model=model)


def _for_system(
    system: str, settings: Settings, chain: Chain, name: str
) -> tuple[Settings, Calibration]:
    """Return the settings restricted to a system, and its constants; raise ``InputError`` if it
    cannot train the model."""
    from argosy.cli.planning.target import check_target, with_target
    from argosy.cost.calibration_file import read_calibration

    named = settings.schedules != Settings().schedules
    settings, calibration = with_target(settings, system, None, named=named, where="system")
    assert calibration is not None, "every target has constants"
    check_target(settings.target, chain, name)
    return settings, read_calibration(calibration)


def check_plan(
    plan: Plan | str | Path,
    chain: Chain | str | Path | None = None,
    cluster: Cluster | str | Path | None = None,
) -> None:
    """Raise one ``InputError`` with everything that is wrong with a plan, or return."""
    _played(plan, chain, cluster)


def simulate(
    plan: Plan | str | Path,
    chain: Chain | str | Path | None = None,
    cluster: Cluster | str | Path | None = None,
    *,
    model: ComputeModel | None = None,
    iterations: int = 1,
    record: int | None = None,
    until: float = math.inf,
) -> Timeline:
    """Simulate a plan in the exact engine; by default on its own cluster and under its own cost
    model.

    ``record`` is the number of iterations whose spans are kept, ``until`` the second at which to
    stop.
    """
    from argosy.sim.simulate import simulate as simulate_plan

    if not isinstance(until, int | float) or isinstance(until, bool) or not until > 0:
        raise bad_input("seconds, more than 0", until, "until")
    model = _cost_model(model)
    played = _played(plan, chain, cluster)
    return simulate_plan(
        played.plan,
        played.chain,
        played.cluster,
        model=played.model if model is None else model,
        iterations=_whole(iterations, "iterations"),
        record=None if record is None else _whole(record, "record", least=0),
        until=until,
    )


def explain(
    plan: Plan | str | Path,
    chain: Chain | str | Path | None = None,
    cluster: Cluster | str | Path | None = None,
) -> Shown:
    """Explain why a plan takes as long as it does, and what would help; ``value`` is an
    ``Explanation``."""
    from argosy.cli.planning.explain import explanation_parts
    from argosy.explain import explain_plan

    played = _played(plan, chain, cluster)
    explanation = explain_plan(played.plan, played.chain, played.cluster, model=played.model)
    return Shown(explanation, _text(*explanation_parts(explanation, played.cluster)))


def report(
    plan: Plan | str | Path,
    chain: Chain | str | Path | None = None,
    cluster: Cluster | str | Path | None = None,
) -> Report:
    """Build the page of a plan: a notebook shows it, ``save`` writes it."""
    from argosy.report.page import Report

    played = _played(plan, chain, cluster)
    return Report(plan=played.plan, chain=played.chain, cluster=played.cluster, model=played.model)


def save(plan: Plan, path: str | Path) -> Path:
    """Write a plan to a file that ``load_plan`` and every command reads."""
    from argosy.cli.terminal import write_file

    target = Path(_named(path, "a path", "path"))
    write_file(target, dumps_plan(plan).encode())
    return target


def compare(
    chain: Chain | str | Path,
    cluster: Cluster | str | Path,
    *,
    global_batch: int | None = None,
    only: str | Sequence[str] = (),
    level: int = 1,
    model: ComputeModel | None = None,
    sequence_length: int | None = None,
    dtype: Dtype | str | None = None,
    optimizer: str | None = None,
) -> Shown:
    """Compare the plans of other planners with Argosy's in one simulator; ``value`` is a list of
    rows.

    ``only`` names the planners to compare with, by default all; ``global_batch`` is 8 per device
    unless given.
    """
    from argosy.baselines import BASELINES
    from argosy.cli.inputs import PlanningTask
    from argosy.cli.names import known_name
    from argosy.cli.planning.compare import SAMPLES_PER_DEVICE, compared
    from argosy.report.contest import contest_table

    where = _cluster(cluster)
    loaded = _chain(chain, sequence_length=sequence_length, dtype=dtype, optimizer=optimizer)
    if not isinstance(only, Sequence):
        raise bad_input("a planner's name, or a list of names", only, "only")
    chosen = (only,) if isinstance(only, str) else only or BASELINES
    names = tuple(known_name("only", name, BASELINES) for name in chosen)
    batch = SAMPLES_PER_DEVICE * len(where.devices) if global_batch is None else global_batch
    task = PlanningTask(
        chain=loaded,
        cluster=where,
        global_batch=_whole(batch, "global_batch"),
        settings=_settings(Settings(level=level)),
        model=_cost_model(model) or ComputeModel(),
    )
    rows = compared(task, names=names, quiet=True)
    return Shown(rows, _text(contest_table(rows, with_shape=True)))


def export(
    plan: Plan | str | Path,
    to: str,
    *,
    cluster: Cluster | str | Path | None = None,
    lossy: bool = False,
    folder: str | Path | None = None,
    zone: str | None = None,
    program: str | None = None,
    steps: int | None = None,
    image: str | None = None,
) -> Export:
    """Write a plan for another system; ``files`` are names and contents, ``lost`` lists what they
    cannot express.

    The files are written to ``folder`` if one is given. ``zone`` is for sailor, ``program`` and
    ``steps`` are for torchrun, jobset, kubeflow and skypilot, ``image`` is for jobset and
    kubeflow.
    """
    from argosy.cli.names import known_name
    from argosy.cli.terminal import write_file
    from argosy.exporters.systems import System
    from argosy.exporters.write import ExportOptions, export_plan

    system = System(known_name("to", to, [str(name) for name in System]))
    loaded = _plan(plan)
    where = cluster_from_content(loaded.cluster.content) if cluster is None else _cluster(cluster)
    file = str(plan) if isinstance(plan, str | Path) else "plan.json"
    if program is not None:
        _named(program, "a file and a function, such as train.py:build", "program")
    steps = None if steps is None else _whole(steps, "steps")
    place = None if folder is None else Path(_named(folder, "a path", "folder"))
    options = ExportOptions(
        lossy=lossy, zone=zone, plan_file=file, program=program, steps=steps, image=image
    )
    export = export_plan(loaded, where, system, options)
    for name, text in export.files if place is not None else ():
        write_file((place or Path()) / name, text.encode(), make_folder=True)
    return export


def plan_html(plan: Plan) -> str:
    """Return a plan as HTML for a notebook: its stages in a table."""
    from argosy.report.plan import plan_title, stage_table

    where = cluster_from_content(plan.cluster.content)
    predicted = (
        ()
        if plan.predicted is None
        else (f"{plan.predicted.iteration_seconds:.4g} s an iteration, predicted",)
    )
    return Shown(plan, _text(plan_title(plan), stage_table(plan, where), *predicted))._repr_html_()
