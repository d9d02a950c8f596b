"""Turn the options of ``argosy plan`` into a search: settings, cluster, model or program, costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from argosy.cli.command import given, picked
from argosy.cli.inputs import (
    PlanningTask,
    check_at_least,
    compute_model,
    load_calibration,
    parse_size,
    parse_time,
    refuse_options,
    whole_number,
)
from argosy.cli.terminal import check_output
from argosy.cluster.file import load_cluster
from argosy.cluster.topology import Cluster
from argosy.cost.calibration import Calibration
from argosy.errors import bad_input, closest, excluded, refused
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.workload.chain import Chain
from argosy.workload.load import load_model
from argosy.workload.settings import parse_settings
from argosy.workload.tuning import parse_tuning

if TYPE_CHECKING:
    from argosy.choose.islands import IslandOptions
    from argosy.cli.planning.plan import PlanOptions
    from argosy.planner import CapturedProgram, Settings


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A request that holds the options of ``argosy plan`` and everything that they name."""

    options: PlanOptions
    task: PlanningTask
    program: CapturedProgram | None
    """The captured program; None if a model is planned."""
    model: str
    """The model as the user named it, or the name of the program."""
    islands: IslandOptions | None
    """The options of islands; None if none are requested."""
    reload: Callable[..., Chain]
    """Loads the model again with other options of ``load_model``."""

    def check_divisible_batch(self, option: str) -> None:
        """Raise ``InputError`` if an option cannot be combined with a program that mixes
        samples."""
        if self.program is not None and self.program.mixes is not None:
            raise excluded(option, "a program that mixes samples")


def read_request(options: PlanOptions) -> PlanRequest:
    """Check the options of ``argosy plan`` and load what they name; raise ``InputError``."""
    from argosy.cli.planning.choose import check_what_counts
    from argosy.cli.planning.islands import IslandRequest, check_divisible

    program = None if options.program is None else _captured(options, options.program)
    model = options.model if program is None else program.chain.name
    global_batch = options.global_batch if program is None else program.samples
    if model is None or global_batch is None:
        raise refused("argosy plan needs --model and --global-batch, or --program FILE.py:build")
    check_at_least("--global-batch", global_batch, 1)
    islands = picked(IslandRequest, options).options()
    check_what_counts(options)
    if islands is not None:
        _check_islands(options, program)
    if options.output is not None:
        inputs = (options.cluster, model, options.calibration, *(options.profile or ()))
        check_output(options.output, *inputs, json=options.json)
    settings, calibration = _settings(options, global_batch)
    constants = load_calibration(calibration)
    cluster = constants.cluster(load_cluster(options.cluster))
    check_divisible(islands, cluster)
    if program is None:
        chain, reload = _model(options, model, constants, settings)
    else:
        program, reload = _placed(options, program, constants, cluster)
        chain = program.chain
    costs = compute_model(
        options.profile or (), constants, chain=chain, cluster=cluster, quiet=options.quiet
    )
    task = PlanningTask(
        chain=chain, cluster=cluster, global_batch=global_batch, settings=settings, model=costs
    )
    return PlanRequest(
        options=options, task=task, program=program, model=model, islands=islands, reload=reload
    )


def _captured(options: PlanOptions, text: str) -> CapturedProgram:
    """Capture the program of ``--program``; options that it decides itself are rejected."""
    from argosy.cli.planning.program import capture_program

    model = ("model", "global_batch", "sequence_length")
    tuning = ("train", "lora", "base_weights", "max_expert", "freeze")
    refuse_options(given(options, *model, *tuning), "cannot be combined with --program")
    refuse_options(
        given(options, "for_system"),
        "cannot be combined with --program: other systems train their own models; leave it out and "
        "use argosy run",
    )
    parse_settings(optimizer=options.optimizer)
    if options.output is not None:
        check_output(options.output, options.cluster, text.partition(":")[0], json=options.json)
    return capture_program(
        text, dtype=options.dtype, quiet=options.quiet, powersgd=options.powersgd
    )


def _check_islands(options: PlanOptions, program: CapturedProgram | None) -> None:
    """Raise ``InputError`` if an option cannot be combined with ``--islands``."""
    prices = ("max_price_per_hour", "max_cost_per_step", "objective")
    conflicting = given(options, "scenario", "for_system", "for_trace", *prices, "robust")
    refuse_options(conflicting, "cannot be combined with --islands")
    if program is not None and program.mixes is not None:
        raise excluded("--program of a step that mixes samples", "--islands")


def _settings(options: PlanOptions, global_batch: int) -> tuple[Settings, str | None]:
    """Return the settings of the search, and the calibration file, which ``--for`` may choose."""
    from argosy.cli.planning.target import with_target
    from argosy.planner import Settings
    from argosy.solve.settings import with_offload

    time_budget = parse_time("--time-budget", options.time_budget)
    if options.powersgd:
        width = () if options.max_width == 1 else ("max_width",)
        conflicting = given(options, *width, "for_system", "max_expert", "max_context", "offload")
        refuse_options(conflicting, "cannot be combined with --powersgd")
    settings = Settings(
        level=options.level,
        gap=options.gap,
        time_budget=time_budget,
        prune=not options.no_prune,
        runnable=options.runnable,
        memory_budget=parse_size("--memory-budget", options.memory_budget),
        mixed=False if options.no_mixed else None,
        even_shares=options.even_shares,
        max_width=options.max_width,
        max_context=options.max_context,
        max_expert=options.max_expert,
    )
    if options.schedule:
        settings = replace(settings, schedules=parse_schedules(options.schedule, global_batch))
    if options.offload is not None:
        settings = with_offload(settings, options.offload)
    if options.for_system is None:
        return settings, options.calibration
    named = options.schedule is not None
    return with_target(settings, options.for_system, options.calibration, named=named)


def _model(
    options: PlanOptions, name: str, constants: Calibration, settings: Settings
) -> tuple[Chain, Callable[..., Chain]]:
    """Return the chain of a model, and a function that loads it with other options."""
    from argosy.cli.planning.target import check_target

    tuning = parse_tuning(
        train=options.train,
        lora=options.lora,
        freeze=options.freeze or (),
        base=options.base_weights,
    )
    given: dict[str, Any] = {
        "sequence_length": options.sequence_length,
        "dtype": options.dtype,
        "optimizer": options.optimizer,
        "tuning": tuning,
        "powersgd": options.powersgd,
    }

    def reload(**changes: Any) -> Chain:
        return constants.chain(load_model(name, **{**given, **changes}))

    chain = reload()
    check_target(settings.target, chain, name)
    return chain, reload


def _placed(
    options: PlanOptions, program: CapturedProgram, constants: Calibration, cluster: Cluster
) -> tuple[CapturedProgram, Callable[..., Chain]]:
    """Return a program on a cluster, and a function that returns its chain with another
    optimizer."""
    from argosy.cli.planning.infeasible import with_optimizer

    optimizer = parse_settings(optimizer=options.optimizer).optimizer
    placed = program.on(cluster)
    chain = constants.chain(placed.chain)
    chain = replace(chain, optimizer=optimizer or chain.optimizer)
    return replace(placed, chain=chain), partial(with_optimizer, chain)


def parse_schedules(names: Sequence[str], global_batch: int) -> tuple[ScheduleSpec, ...]:
    """Return the schedules of ``--schedule``, each once; ``kfkb`` alone means every k that is
    searched. A group of k micro-batches needs k samples."""
    from argosy.planner import SCHEDULES

    searched_on_request = [
        ScheduleSpec(kind=kind) for kind in (ScheduleKind.GPIPE, ScheduleKind.ZERO_BUBBLE)
    ]
    interleaved = [ScheduleSpec(kind=ScheduleKind.INTERLEAVED, chunks=chunks) for chunks in (2, 4)]
    interleaved += [ScheduleSpec(kind=kind) for kind in ScheduleKind if kind.is_v]
    searched = [*SCHEDULES, *searched_on_request, *interleaved]
    known = list(dict.fromkeys(str(spec.kind) for spec in searched))
    chosen: list[ScheduleSpec] = []
    for name in names:
        kind, separator, k = name.partition(":")
        if kind in known and not separator:
            named = [spec for spec in searched if str(spec.kind) == kind]
        elif kind == ScheduleKind.KFKB and (group := whole_number(k)):
            named = [ScheduleSpec(kind=ScheduleKind.KFKB, k=group)]
        else:
            expected = f"one of the schedules {', '.join(known)} or kfkb:K with K of at least 1"
            raise bad_input(expected, name, "--schedule", suggestion=closest(name, known))
        if min(spec.k for spec in named) > global_batch:
            raise bad_input(f"a k of at most {global_batch}, the batch", name, "--schedule")
        chosen += named
    return tuple(dict.fromkeys(chosen))
