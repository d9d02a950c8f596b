"""Check whether a system can train a model at all, before a plan is searched for it."""

from __future__ import annotations

from collections.abc import Iterator

from argosy.exporters import flagscale, megatron, torchtitan
from argosy.exporters.form import Limit, settle, training_is_known
from argosy.plan.plan import ModelRef
from argosy.plan.targets import Target
from argosy.workload.chain import Chain
from argosy.workload.load import load_architecture


def check_model(target: Target, chain: Chain, model: str) -> None:
    """Raise ``InputError`` with everything in a model that prevents an exact export of its
    plans."""
    settle(_limits(target, chain, model), lossy=False)


def _limits(target: Target, chain: Chain, model: str) -> Iterator[Limit]:
    """Yield everything in a model that a target cannot express."""
    planned = ModelRef.of(chain)
    yield from training_is_known(planned, target)
    if target is torchtitan.TARGET:
        yield from torchtitan.model_limits(planned, chain)
    elif target in (megatron.TARGET, flagscale.TARGET):
        yield from megatron.model_limits(planned, chain, load_architecture(model), target)
