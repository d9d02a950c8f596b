"""Build the chain of the model that a plan names."""

from __future__ import annotations

from argosy.document import Document, parse_json
from argosy.plan.plan import ModelRef
from argosy.workload.chain import Chain, captured_chain
from argosy.workload.layers_file import layers_of
from argosy.workload.load import load_model


def planned_chain(model: ModelRef, named: str | None = None) -> Chain:
    """Return the chain of a model: from the plan if it has the layers of a captured program, else
    by name; ``named`` overrides both."""
    if model.content and named is None:
        document = Document("plan", parse_json(model.content, file="plan").data, {})
        return captured_chain(
            model.name,
            layers_of(document),
            model.dtype,
            model.optimizer,
            model.powersgd,
            model.sequence_length,
        )
    return load_model(
        named or model.name,
        sequence_length=model.sequence_length,
        dtype=model.dtype,
        optimizer=model.optimizer,
        tuning=model.tuning,
        powersgd=model.powersgd,
    )
