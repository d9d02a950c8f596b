"""Check whether a run may begin, or continue, in a folder. Needs no torch."""

from __future__ import annotations

from argosy.errors import impossible
from argosy.runtime.elastic.claims import Claims
from argosy.runtime.processes.run_folder import CHECKPOINTS, checkpoints, forget_after, steps_saved
from argosy.runtime.processes.run_spec import RunSpec


def check_folder(spec: RunSpec) -> None:
    """Raise an ``InputError`` if checkpoints of an earlier run would be used as this run's."""
    claims = Claims(spec.folder)
    outcome = claims.outcome()
    if spec.resume:
        claims.begin_again()
        if claims.newest() is None:  # before any process reads lines that are added
            forget_after(spec.folder, steps_saved(spec.folder))
    elif outcome is not None:
        reason = f"the run there is over ({outcome.message})"
        remedy = "another --out, or --resume to train more steps"
        raise impossible(f"start a run in {spec.folder}", reason, remedy)
    elif claims.newest() is None and checkpoints(spec.folder / CHECKPOINTS):
        reason = "it contains checkpoints of an earlier run"
        remedy = "another --out, or --resume to continue that run"
        raise impossible(f"start a run in {spec.folder}", reason, remedy)
