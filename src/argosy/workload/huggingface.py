"""A local Hugging Face ``config.json`` to an architecture, without importing ``transformers``."""

from __future__ import annotations

from dataclasses import dataclass, replace

from argosy.document import Document, Location, show_path, validate
from argosy.dtype import Dtype
from argosy.errors import InputError, Problem, closest
from argosy.workload.architecture import Architecture
from argosy.workload.families import encoder, gpt, rotary
from argosy.workload.families.config import Config, rule_problems

FAMILIES: dict[str, type[Config]] = {
    "bert": encoder.Bert,
    "gemma": rotary.Gemma,
    "gemma2": rotary.Gemma2,
    "gpt2": gpt.Gpt2,
    "gpt_neo": gpt.GptNeo,
    "gpt_neox": gpt.GptNeox,
    "llama": rotary.Llama,
    "mistral": rotary.Mistral,
    "mixtral": rotary.Mixtral,
    "olmoe": rotary.Olmoe,
    "opt": gpt.Opt,
    "phi3": rotary.Phi3,
    "qwen2": rotary.Qwen2,
    "qwen2_moe": rotary.Qwen2Moe,
    "qwen3": rotary.Qwen3,
    "qwen3_moe": rotary.Qwen3Moe,
    "roberta": encoder.Roberta,
    "t5": encoder.T5,
    "vit": encoder.Vit,
}
"""Supported values of ``model_type``."""


@dataclass(frozen=True)
class ModelConfig:
    """What a config says about a model."""

    architecture: Architecture
    dtype: Dtype | None
    """Of the published weights, where the config names it."""


def read_config(document: Document, root: Location = ()) -> ModelConfig:
    """The model that the table at ``root`` of a document describes, or every problem in it at once."""
    inner = _table(document, root)
    try:
        config = _validated(inner)
    except InputError as error:
        raise InputError([_rooted(problem, document, root) for problem in error.problems]) from None
    return ModelConfig(config.architecture(), config.declared_dtype)


def _validated(document: Document) -> Config:
    schema = _family(document)
    problems = rule_problems(document, schema)
    try:
        config = validate(document, schema)
    except InputError as error:
        problems = [*error.problems, *problems]
    if problems:
        raise InputError(sorted(problems, key=lambda problem: problem.line or 0))
    return config


def _family(document: Document) -> type[Config]:
    model_type = document.data.get("model_type")
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    expected = "one of the supported model types " + ", ".join(FAMILIES)
    suggestion = closest(model_type, FAMILIES) if isinstance(model_type, str) else None
    raise InputError([document.problem(("model_type",), expected, model_type, suggestion=suggestion)])


def _table(document: Document, root: Location) -> Document:
    """The table at ``root`` as a document of its own, with its lines."""
    data = document.data
    for part in root:
        data = data[part]  # type: ignore[index]
    depth = len(root)
    lines = {place[depth:]: line for place, line in document.lines.items() if place[:depth] == root}
    return Document(document.file, data, lines)


def _rooted(problem: Problem, document: Document, root: Location) -> Problem:
    """The problem as seen from the whole document."""
    path = ".".join(part for part in (show_path(root), problem.path) if part)
    return replace(problem, path=path or None, line=problem.line or document.line(root))
