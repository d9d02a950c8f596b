"""Convert a local Hugging Face ``config.json`` to an architecture, without importing
``transformers``."""

from __future__ import annotations

from dataclasses import dataclass

from argosy.document import Document, validate
from argosy.dtype import Dtype
from argosy.errors import InputError, closest, in_order, raise_any
from argosy.workload.architecture import Architecture
from argosy.workload.families import deepseek, encoder, gpt, rotary
from argosy.workload.families.config import Config, rule_problems

FAMILIES: dict[str, type[Config]] = {
    "bert": encoder.Bert,
    "deepseek_v3": deepseek.DeepseekV3,
    "gemma": rotary.Gemma,
    "gemma2": rotary.Gemma2,
    "gemma3_text": rotary.Gemma3,
    "gpt2": gpt.Gpt2,
    "gpt_neo": gpt.GptNeo,
    "gpt_neox": gpt.GptNeox,
    "gpt_oss": rotary.GptOss,
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
"""Schema of each supported value of ``model_type``."""


@dataclass(frozen=True)
class ModelConfig:
    """A description of a model that a config contains."""

    architecture: Architecture
    dtype: Dtype | None
    """Dtype of the published weights, if the config names it."""


def read_config(document: Document) -> ModelConfig:
    """Return the model that a document describes; raise one ``InputError`` with every problem in
    it."""
    schema = _family(document)
    problems = rule_problems(document, schema)
    try:
        config = validate(document, schema)
    except InputError as error:
        problems = [*error.problems, *problems]
    raise_any(in_order(problems))
    return ModelConfig(config.architecture(), config.declared_dtype)


def _family(document: Document) -> type[Config]:
    model_type = document.data.get("model_type")
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    expected = "one of the supported model types " + ", ".join(FAMILIES)
    suggestion = closest(model_type, FAMILIES) if isinstance(model_type, str) else None
    raise document.error(("model_type",), expected, model_type, suggestion=suggestion)
