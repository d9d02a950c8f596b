"""Families of Hugging Face models as layers, through the modules that they are made of."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

FAMILIES: dict[str, Callable[[nn.Module], tuple[nn.Module, ...]]] = {}
"""By the name of the class."""
