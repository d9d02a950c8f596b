"""Check whether a run may begin, or continue, in a folder. Needs no torch."""

from __future__ import annotations

from argosy.errors import InputError, Problem
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
        found, expected = (
            f"a run that is over: {outcome.message}",
            "another folder, or --resume to train more steps",
        )
        raise InputError([Problem(path="--out", found=found, expected=expected)])
    elif claims.newest() is None and checkpoints(spec.folder / CHECKPOINTS):
        expected = "another folder, or --resume to continue from them"
        raise InputError(
            [Problem(path="--out", found="checkpoints of an earlier run", expected=expected)]
        )
