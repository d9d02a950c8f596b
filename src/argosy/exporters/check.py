"""Check whether a system can train a model at all, before a plan is searched for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from argosy.errors import InputError
from argosy.exporters import flagscale, megatron, torchtitan
from argosy.exporters.form import Limit, any_of, training_is_known
from argosy.plan.plan import ModelRef
from argosy.plan.targets import TARGETS, Target
from argosy.workload.chain import Chain
from argosy.workload.load import load_architecture


def check_model(target: Target, chain: Chain, model: str) -> None:
    """Raise ``InputError`` with everything in a model that prevents an exact export of its plans.

    The last problem names the systems that take the model.
    """
    problems = [limit.problem for limit in _limits(target, chain, model)]
    if not problems:
        return
    names = [name for name, other in TARGETS.items() if not any(_limits(other, chain, model))]
    last = problems[-1]
    ways = (
        [f"--for {any_of(names)} takes it"] if names else ["without --for, Argosy itself trains it"]
    )
    if last.suggestion is not None and last.path != "model.name":
        ways.insert(0, last.suggestion)
    problems[-1] = replace(last, suggestion=", or ".join(ways))
    raise InputError(problems)


def _limits(target: Target, chain: Chain, model: str) -> Iterator[Limit]:
    """Yield everything in a model that a target cannot express."""
    planned = ModelRef.of(chain)
    yield from training_is_known(planned, target)
    if target is torchtitan.TARGET:
        yield from torchtitan.model_limits(planned, chain)
    elif target in (megatron.TARGET, flagscale.TARGET):
        yield from megatron.model_limits(planned, chain, load_architecture(model), target)
