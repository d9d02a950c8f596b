"""A user's program: a Python file with ``build() -> (model, loss_fn, batch)``. Needs no torch before it is called.

The file may also define ``optimizer(parameters)`` (AdamW unless it does) and ``data(step) -> global batch`` (the fixed
batch of ``build`` unless it does).
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argosy.errors import InputError, Problem, closest
from argosy.workload.capture.blame import blamed


@dataclass(frozen=True, kw_only=True)
class Program:
    """The functions of a user's file."""

    build: Callable[[], Any]
    optimizer: Callable[[Any], Any] | None
    data: Callable[[int], Any] | None


def split_name(text: str) -> tuple[Path, str]:
    """The file and the function that ``file.py:build`` names; the function is ``build`` unless given."""
    file, _, name = text.partition(":")
    path = Path(file)
    if path.suffix != ".py" or not path.is_file():
        found = "no such file" if path.suffix == ".py" else f'"{text}"'
        raise InputError([Problem(file=file, found=found, expected="a Python file and function, train.py:build")])
    return path, name or "build"


def load_program(text: str) -> Program:
    """Run the file, as a module of its own beside whose folder its imports are found."""
    path, name = split_name(text)
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(f"argosy_program_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with blamed(str(path), expected="a Python file that can be imported"):
        spec.loader.exec_module(module)
    functions = {key: value for key, value in vars(module).items() if callable(value) and not key.startswith("_")}
    if name not in functions:
        suggestion = closest(name, functions)
        problem = Problem(file=str(path), found=f'no function "{name}"', expected="build()", suggestion=suggestion)
        raise InputError([problem])
    return Program(build=functions[name], optimizer=functions.get("optimizer"), data=functions.get("data"))
