"""Load what the arguments of a command name: plans, clusters, changes over time, schedules."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from argosy.cli.names import known_name
from argosy.cluster.file import build_cluster, cluster_from_content, load_cluster, with_changes
from argosy.cluster.fitted import fitted
from argosy.cluster.schema import ChangeSchema
from argosy.cluster.topology import CalibrationFactors, Cluster, is_meant
from argosy.cluster.tracefile import column_names
from argosy.cost.calibration import Calibration
from argosy.cost.calibration_file import read_calibration
from argosy.cost.compute import ComputeModel
from argosy.cost.remembered import CostModel, cost_model_ref, cost_model_words, remembered
from argosy.document import Document, JsonObject, Location, Schema, is_there, read_toml, validate
from argosy.errors import InputError, Mismatch, bad_input, closest, excluded, refused
from argosy.plan.check import check_plan
from argosy.plan.file import plan_from_document, schedule_to_dict
from argosy.plan.model import planned_chain
from argosy.plan.plan import Plan
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.sim.steady import shortened
from argosy.units import RATE, SIZE, TIME, Quantity
from argosy.workload.chain import Chain
from argosy.workload.hub import cached_config
from argosy.workload.load import preset_names, read_profiles
from argosy.workload.profile import Profile

if TYPE_CHECKING:
    from argosy.planner import Settings

# The value of --trace and --calibration that means none.
_NONE = "none"
# The largest number of iterations of a simulation, including skipped ones: the result has the time
# of each.
MOST_ITERATIONS = 10**6


@dataclass(frozen=True, kw_only=True)
class PlanningTask:
    """The inputs that a search for a plan needs."""

    chain: Chain
    cluster: Cluster
    global_batch: int
    settings: Settings
    model: ComputeModel


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A plan with everything that is needed to simulate it."""

    plan: Plan
    chain: Chain
    cluster: Cluster
    model: ComputeModel = field(default_factory=ComputeModel)

    @property
    def names(self) -> JsonObject:
        """Return the model, the cluster and the schedule, for a JSON document."""
        return {
            "model": self.plan.model.name,
            "cluster": self.cluster.identity,
            "schedule": schedule_to_dict(self.plan.schedule),
        }

    @property
    def task(self) -> PlanningTask:
        """Return the task that the plan is an answer to, with default settings."""
        from argosy.planner import Settings

        return PlanningTask(
            chain=self.chain,
            cluster=self.cluster,
            global_batch=self.plan.global_batch,
            settings=Settings(),
            model=self.model,
        )


@dataclass(frozen=True, kw_only=True)
class ScenarioInputs:
    """The inputs that replace those of a plan when it is simulated: cluster, changes, schedule,
    costs."""

    cluster: str | None = None
    trace: Sequence[str] | None = None
    schedule: str | None = None
    k: int | None = None
    profile: Sequence[str] | None = None
    calibration: str | None = None
    quiet: bool = False


def load_scenario(document: Document, given: ScenarioInputs | None = None) -> Scenario:
    """Load the plan in a document, on its own cluster or another, with other changes or
    schedule."""
    given = given or ScenarioInputs()
    plan = plan_from_document(document)
    plan = replace(plan, schedule=_schedule(plan.schedule, given.schedule, given.k))
    where = (
        cluster_from_content(plan.cluster.content)
        if given.cluster is None
        else load_cluster(given.cluster)
    )
    where = with_traces(where, given.trace) if given.trace else where
    chain = planned_chain(plan.model, model_of(plan, document))
    plan = _shortened(plan, where, quiet=given.quiet)
    check_plan(plan, chain, where, document=document)
    if not given.trace:
        _warn_of_another_cluster(plan, where)
    costs = cost_model_for(
        plan, document, chain, profiles=given.profile or (), calibration=given.calibration
    )
    scenario = Scenario(
        plan=plan, chain=costs.chain(chain), cluster=costs.cluster(where), model=costs.compute_model
    )
    if given.profile and not given.quiet:
        note_of_other_kinds(costs.profiles, where)
    return replace(scenario, plan=_with_what_holds(scenario))


def _shortened(plan: Plan, cluster: Cluster, *, quiet: bool) -> Plan:
    """Return the part of a plan that can be simulated in seconds.

    Prints a note on stderr if that is not the whole plan.
    """
    short = shortened(plan, cluster)
    if short is not plan and not quiet:
        counts = f"{short.num_micro_batches:,} of {plan.num_micro_batches:,} micro-batches"
        sys.stderr.write(
            f"note: {counts} are played, which the others repeat; all times are of these\n"
        )
    return short


def cost_model_for(
    plan: Plan,
    document: Document | None,
    chain: Chain | None = None,
    *,
    profiles: Sequence[str] = (),
    calibration: str | None = None,
) -> CostModel:
    """Return the cost model of a plan, with profiles or constants replaced by those of the
    options."""
    costs = remembered(plan, document)
    if profiles:
        costs = replace(costs, profiles=_profiles_of(profiles, chain))
    if calibration is not None:
        costs = replace(costs, calibration=load_calibration(calibration))
    return costs


def _with_what_holds(scenario: Scenario) -> Plan:
    """Return the plan, without predictions that were made under another cost model.

    In that case a warning is printed on stderr, and prediction, certificate and runner-ups are
    removed.
    """
    plan = scenario.plan
    difference = another_cost_model(plan, scenario.chain, scenario.cluster.fit, scenario.model)
    if difference is None:
        return plan
    why = "the plan's prediction and certificate are not shown, because they do not hold here"
    sys.stderr.write(f"warning: {difference}: {why}\n")
    return replace(plan, predicted=None, certificate=None, runner_ups=())


def another_cost_model(
    plan: Plan, chain: Chain, fit: CalibrationFactors, model: ComputeModel
) -> str | None:
    """Return how the cost model in use differs from the plan's; None if it is the same."""
    made_for = replace(cluster_from_content(plan.cluster.content), fit=fit)
    used = cost_model_ref(chain, made_for, model)
    if used == plan.cost_model:
        return None
    made, here = cost_model_words(plan.cost_model), cost_model_words(used)
    return f"the plan was made with the {made}, and this command uses the {here}"


def model_of(plan: Plan, document: Document, *, suggestion: str | None = None) -> str | None:
    """Return the preset or file that a plan names; None if the plan contains the layers of a
    program.

    A file is searched relative to the working folder, then beside the plan, so that a folder with
    both can be used from anywhere. Raises ``InputError`` if it is not found.
    """
    if plan.model.content:
        return None
    model = _model_of(plan, document)
    if model is None:
        expected = "a preset, or a file or folder that is here or beside the plan"
        raise document.error(("model", "name"), expected, plan.model.name, suggestion=suggestion)
    return model


def _model_of(plan: Plan, document: Document) -> str | None:
    """Return the preset or file that a plan names; None if it is not found."""
    name = plan.model.name
    beside = Path(document.file).parent / name
    if name in preset_names() or is_there(name) or cached_config(name) is not None:
        return name
    return str(beside) if is_there(beside) else None


def costs_of_run(plan: Plan, document: Document, given: str | None, *, needed: bool) -> str | None:
    """Return the location of a run's model costs: ``given``, or beside the plan.

    Returns None if it is the name in the plan. Raises ``InputError`` if the costs are ``needed``
    and cannot be found.
    """
    if given is None and needed:
        given = model_of(plan, document, suggestion="--model says where its costs are")
    location = given or _model_of(plan, document)
    return None if location == plan.model.name else location


def load_calibration(path: str | None) -> Calibration:
    """Return the constants in a file, or the cost model's own for None and ``none``."""
    return Calibration() if path is None or path == _NONE else read_calibration(path)


def _profiles_of(paths: Sequence[str], chain: Chain | None) -> tuple[Profile, ...]:
    """Read profiles; raise ``InputError`` for one of another model than the chain."""
    measured = read_profiles(paths)
    for profile in measured:
        if chain is not None:
            _check_same_model(profile, chain)
    return measured


def _warn_of_another_cluster(plan: Plan, cluster: Cluster) -> None:
    """Warn on stderr if a cluster is not exactly the one that the plan was made for."""
    if plan.cluster.hash != cluster.hash:
        made_for = (
            f"the plan was made for {plan.cluster.name} as it was (hash {plan.cluster.hash[:8]})"
        )
        difference = f"{made_for}; {cluster.name} is not the same (hash {cluster.hash[:8]})"
        sys.stderr.write(f"warning: {difference}: what the plan predicts may not hold here\n")


def compute_model(
    profiles: Sequence[str],
    calibration: Calibration | None = None,
    *,
    chain: Chain | None = None,
    cluster: Cluster,
    quiet: bool,
) -> ComputeModel:
    """Return the compute model: profiles for the device kinds that have them, else the roofline."""
    measured = _profiles_of(profiles, chain)
    if not quiet:
        note_of_other_kinds(measured, cluster)
    constants = calibration or Calibration()
    return constants.compute_model({profile.device: profile for profile in measured} or None)


def note_of_other_kinds(profiles: Sequence[Profile], cluster: Cluster) -> None:
    """Print on stderr which profiles have no effect on this cluster.

    It is no error, because one set of profiles may be used for several clusters.
    """
    kinds = sorted({device.kind.name for device in cluster.devices})
    others = sorted({profile.device for profile in profiles} - set(kinds))
    if others:
        difference = f"{cluster.name} has no {' and no '.join(others)}, but {', '.join(kinds)}"
        sys.stderr.write(
            f"note: {difference}: --profile changes nothing for a kind that is not there\n"
        )


def _check_same_model(profile: Profile, chain: Chain) -> None:
    """Raise ``InputError`` for a profile of another model or sequence length.

    Layers of different models have the same names, so their times could be confused.
    """
    names = preset_names()
    if profile.model in names and chain.name in names and profile.model != chain.name:
        raise bad_input(f"a profile of {chain.name}", profile.model, "--profile")
    if profile.sequence_length not in (1, chain.sequence_length):
        expected = (
            f"a profile with {chain.sequence_length} tokens per sample, or --sequence-length as "
            "measured"
        )
        raise bad_input(expected, profile.sequence_length, "--profile")


def parse_time(where: str, text: str | None) -> float:
    """Return the seconds of an option; infinity if it is not given."""
    if text is None:
        return math.inf
    try:
        return TIME.parse(text)
    except Mismatch:
        raise bad_input('a time such as "30 s"', text, where) from None


def parse_rate(where: str, text: str) -> float:
    """Parse an option or argument as bytes/s."""
    return _parse(RATE, where, text)


def parse_size(where: str, text: str) -> float:
    """Parse an option as bytes."""
    return _parse(SIZE, where, text)


def _parse(quantity: Quantity, where: str, text: str) -> float:
    """Parse a quantity; raise ``InputError`` that names the option."""
    try:
        return quantity.parse(text)
    except Mismatch as error:
        raise InputError([error.at(path=where)]) from None


def refuse_options(given: Mapping[str, object], why: str) -> None:
    """Raise ``InputError`` for the first option that was given and cannot be used here.

    ``why`` is the rest of the sentence about the option, such as "cannot be combined with --plan".
    None and False mean that an option was not given.
    """
    for option, value in given.items():
        if value is not None and value is not False:
            raise refused(f"{option} {why}")


def whole_number(text: str) -> int | None:
    """Return a text as a whole number; None if it is none.

    Python rejects ``²``, which is a digit and no number, and texts of thousands of digits.
    """
    try:
        return int(text) if text.strip().isdecimal() else None
    except ValueError:
        return None


def check_at_least(option: str, value: int, least: int) -> int:
    """Return a value; raise ``InputError`` if it is below ``least``."""
    if value < least:
        raise bad_input(f"a whole number of at least {least}", value, option)
    return value


def check_iterations(count: int) -> int:
    """Return a number of iterations; raise ``InputError`` if it is too large for a result with
    every time."""
    if not 1 <= count <= MOST_ITERATIONS:
        least = "a whole number of at least 1" if count < 1 else f"at most {MOST_ITERATIONS:,}"
        raise bad_input(least, count, "--iterations")
    return count


def too_long(until: str | None) -> InputError:
    """Return the error for a time in which too many iterations begin."""
    return bad_input(
        f"a time in which fewer than {MOST_ITERATIONS:,} iterations begin", until, "--until"
    )


def _schedule(planned: ScheduleSpec, name: str | None, k: int | None) -> ScheduleSpec:
    """Return the plan's schedule, or that of the options; ``--k`` alone means kfkb."""
    if name is None and k is None:
        return planned
    if name is None:
        kind = ScheduleKind.KFKB
    else:
        kind = ScheduleKind(known_name("--schedule", name, ScheduleKind, "schedules"))
    if k is not None and kind is not ScheduleKind.KFKB:
        raise excluded("--k", f"--schedule {kind}; it applies to kfkb")
    wanted = planned.k if k is None else check_at_least("--k", k, 1)
    chunks = planned.chunks if kind is ScheduleKind.INTERLEAVED else 1
    return ScheduleSpec(kind=kind, k=wanted, chunks=chunks)


class _ChangesSchema(Schema):
    """A file for ``--trace`` that contains only the [[changes]] of a cluster file."""

    changes: list[ChangeSchema] = Field(min_length=1)


def with_traces(cluster: Cluster, traces: Sequence[str], *, option: str = "--trace") -> Cluster:
    """Return the cluster with its own changes replaced by those that ``option`` names, in order."""
    cluster = with_changes(cluster, [])
    for trace in traces:
        if trace == _NONE:
            continue
        target, separator, file = trace.partition("=")
        if separator and target and file.endswith(".csv"):
            change = {_what(cluster, target, file, option): target, "trace": file}
            cluster = _add_changes(cluster, Document(option, {"changes": [change]}, {}), Path())
        elif trace.endswith(".toml"):
            document = read_toml(trace)
            validate(document, _ChangesSchema)
            cluster = _add_changes(cluster, document, Path(trace).parent)
        else:
            expected = f"LINK=FILE.csv, DEVICE=FILE.csv, a .toml with [[changes]], or {_NONE}"
            raise bad_input(expected, trace, option)
    return cluster


def _what(cluster: Cluster, target: str, file: str, option: str) -> str:
    """Return ``link`` or ``device``, whichever ``target`` matches.

    If it matches both, the columns of its file decide.
    """
    columns = column_names(file)
    edges = sorted(cluster.edges)
    devices = [device.name for device in cluster.devices]
    is_link = any(is_meant(edge, target) for edge in edges)
    is_device = any(is_meant(device, target) for device in devices)
    if not is_link and not is_device:
        expected = f"a link or device of {cluster.name}, such as {edges[0]} or {devices[0]}"
        raise bad_input(expected, target, option, suggestion=closest(target, [*edges, *devices]))
    if is_link and is_device:
        is_device = "speed" in columns
    return "device" if is_device else "link"


def _add_changes(cluster: Cluster, document: Document, folder: Path) -> Cluster:
    """Return the cluster with one more file of changes; problems are reported at the file's own
    lines."""
    content: JsonObject = json.loads(cluster.content)
    earlier = content.get("changes", [])
    lines: dict[Location, int] = {
        ("changes", int(place[1]) + len(earlier), *place[2:]): line
        for place, line in document.lines.items()
        if len(place) > 1
    }
    combined = {**content, "changes": [*earlier, *document.data["changes"]]}
    return fitted(
        build_cluster(Document(document.file, combined, lines), folder=folder), cluster.fit
    )
