"""The processes that torchrun started, out of sight of a library that would divide the work among
them itself.

A plan divides the model and every batch. A library such as accelerate that finds torchrun's
variables in the environment would divide the data as well. So they are taken out of the
environment, and given back only while Argosy joins the processes: to the library, every process is
the only one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
)


def hidden_variables() -> dict[str, str]:
    """Take torchrun's variables out of the environment; what they were."""
    return {name: os.environ.pop(name) for name in _NAMES if name in os.environ}


@contextlib.contextmanager
def visible(variables: dict[str, str]) -> Iterator[None]:
    """With these variables in the environment."""
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
