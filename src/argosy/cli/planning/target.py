"""Restrict the search of ``argosy plan --for`` to plans that another system can run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from argosy.cli.names import known_name
from argosy.errors import bad_input, excluded
from argosy.workload.chain import Chain

if TYPE_CHECKING:
    from argosy.plan.targets import Target
    from argosy.planner import Settings


def with_target(
    settings: Settings, name: str, calibration: str | None, *, named: bool, where: str = "--for"
) -> tuple[Settings, str | None]:
    """Return the settings restricted to a system, and its constants if no others are given.

    ``named`` is set if the user named the schedules; ``where`` is the option in errors.
    """
    from argosy.plan.targets import TARGETS, TargetName

    target = TARGETS[TargetName(known_name(where, name, TargetName, "systems"))]
    if settings.runnable:
        raise excluded("--runnable", where)
    if settings.offload:
        raise excluded("--offload", where)
    for spec in settings.schedules if named else ():
        if spec.kind not in target.schedules:
            names = " or ".join(target.schedules)
            raise bad_input(f"{names}, which {target.full_name} runs", spec.kind, "--schedule")
    return replace(settings, target=target), calibration or target.calibration


def check_target(target: Target | None, chain: Chain, model: str) -> None:
    """Raise ``InputError`` if the target cannot train the model."""
    if target is not None:
        from argosy.exporters.check import check_model

        check_model(target, chain, model)
