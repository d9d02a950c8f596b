"""Find the layers of a model: the pieces of an ``nn.Module`` between which a pipeline may cut.

A model declares its layers in one of three ways, tried in this order:

    (1)  it has a method ``argosy_layers()`` that returns modules, first to last;
    (2)  it is an ``nn.Sequential``: its children;
    (3)  its class is in the table of known families (``FAMILIES``), or it is such a model with
         adapters inside its layers (``peft``).

Layer 0 is called with the arguments of the model; every later layer with the result of the one
before, a pytree of tensors whose first dim is the samples; the last returns the model's result. If
the last layer has a method ``finish``, that is called instead, with the result of the layer before
followed by the model's own arguments (to compute a loss from labels, for example). A value that
skips layers, such as an encoder's output for every decoder block, is part of what they return.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from argosy.errors import invalid
from argosy.runtime.stages.huggingface import (
    check_settings,
    gpt2_layers,
    rotary_layers,
    vit_layers,
)
from argosy.runtime.stages.huggingface_encoders import bert_layers, t5_layers
from argosy.workload.capture.embeddings import check_embeddings
from argosy.workload.capture.hooks import check_hooks

FAMILIES: dict[str, Callable[[nn.Module], tuple[nn.Module, ...]]] = {
    "BertForMaskedLM": bert_layers,
    "BertForQuestionAnswering": bert_layers,
    "BertForSequenceClassification": bert_layers,
    "BertForTokenClassification": bert_layers,
    "GPT2LMHeadModel": gpt2_layers,
    "LlamaForCausalLM": rotary_layers,
    "MistralForCausalLM": rotary_layers,
    "MixtralForCausalLM": rotary_layers,
    "Qwen2ForCausalLM": rotary_layers,
    "Qwen3ForCausalLM": rotary_layers,
    "Qwen3MoeForCausalLM": rotary_layers,
    "T5ForConditionalGeneration": t5_layers,
    "ViTForImageClassification": vit_layers,
}
"""The functions that divide a model into layers, by the name of its class."""
_MEANS = (bert_layers, t5_layers)
"""Families whose loss is a mean, also if they are given ``num_items_in_batch``."""
# Wrappers that divide or copy a model themselves, by the names of their classes.
_DIVIDED = (
    "DataParallel",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "DeepSpeedEngine",
)


def ignores_items(model: nn.Module) -> bool:
    """Return whether the loss of a model is a mean, also if it is given ``num_items_in_batch``."""
    return FAMILIES.get(type(without_wrapper(model)).__name__) in _MEANS


def has_layers(model: nn.Module) -> bool:
    """Return whether one of (1) to (3) applies."""
    model = without_wrapper(model)
    return (
        callable(getattr(model, "argosy_layers", None))
        or isinstance(model, nn.Sequential)
        or type(model).__name__ in FAMILIES
    )


def find_layers(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the layers of a model by (1) to (3); raise an ``InputError`` that explains what to do
    if none applies."""
    check_hooks(model)
    check_embeddings(model)
    model = without_wrapper(model)
    own = getattr(model, "argosy_layers", None)
    if callable(own):
        return tuple(_modules(own(), type(model).__name__))
    if isinstance(model, nn.Sequential):
        return tuple(model)
    name = type(model).__name__
    if name in FAMILIES:
        check_settings(model)
        return FAMILIES[name](model)
    expected = (
        f"an nn.Sequential, a model with argosy_layers(), or one of {', '.join(sorted(FAMILIES))}"
    )
    suggestion = f"add a method argosy_layers() to {name} that returns its layers, first to last"
    raise invalid("model", name, expected, suggestion=suggestion)


def without_wrapper(model: nn.Module) -> nn.Module:
    """The model inside a ``PeftModel`` whose adapters are all inside layers, such as LoRA's.

    Adapters that change what the model is called with (prompt and prefix tuning) need the wrapper.
    """
    if "PeftModel" not in {base.__name__ for base in type(model).__mro__}:
        return model
    config: Any = getattr(model, "active_peft_config", None)
    if config is None or getattr(config, "is_prompt_learning", True):
        return model
    inner: nn.Module = model.get_base_model()  # type: ignore[operator]
    return inner


def check_unwrapped(model: nn.Module) -> None:
    """Raise an ``InputError`` for a model that another library has already divided or copied."""
    kind = type(model).__name__
    if kind in _DIVIDED:
        suggestion = "give model.module, and call neither accelerate's prepare nor the wrapper"
        expected = "the model itself, which the plan divides"
        raise invalid("model", f"a {kind}", expected, suggestion=suggestion)


def _modules(layers: Sequence[object], name: str) -> list[nn.Module]:
    modules = []
    for index, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            path = f"{name}.argosy_layers()[{index}]"
            raise invalid(path, type(layer).__name__, "an nn.Module")
        modules.append(layer)
    return modules
