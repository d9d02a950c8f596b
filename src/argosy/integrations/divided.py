"""Refuse calls that need the whole model after its weights were divided among processes.

A process keeps the weights of its own stages; all others become meta tensors, from which a call
such as ``generate`` would fail with a message about devices, and a file would be written without
values.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from argosy.errors import impossible

# Methods of a model that need all weights, by what a script calls instead.
_WHOLE = {
    "forward": "trainer.evaluate or trainer.predict",
    "generate": "trainer.save_model on all processes, and from_pretrained in another script",
    "save_pretrained": "trainer.save_model on all processes",
    "state_dict": "trainer.save_model on all processes",
}


class DividedModel(nn.Module):
    """A model whose parts are on many ranks; accelerate treats it as one of its own wrappers."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def refuse_whole_calls(model: nn.Module) -> None:
    """Make methods that need the whole model raise an ``InputError``; values that are given to
    ``save_pretrained`` are still written."""
    for name, remedy in _WHOLE.items():
        method = getattr(model, name, None)
        if callable(method):
            setattr(model, name, _refusing(method, name, remedy))


def _refusing(method: Any, name: str, remedy: str) -> Any:
    @functools.wraps(method)
    def refuse(*positional: Any, **keywords: Any) -> Any:
        if name == "save_pretrained" and keywords.get("state_dict") is not None:
            return method(*positional, **keywords)
        raise impossible(f"call model.{name}", "its weights are divided among processes", remedy)

    return refuse
