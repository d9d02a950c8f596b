"""Load a user's program: a Python file with ``build() -> (model, loss_fn, batch)``. Needs no torch
before the file is run.

The file may also define

    optimizer(parameters)       an optimizer, or a pair of one and its scheduler; AdamW unless
                                given. If its parameter is called ``named_parameters``, it gets
                                (name, parameter) pairs
    scheduler(optimizer)        a learning-rate scheduler, which steps once after every step
    data(step)                  the global batch of a step; or ``data`` is an iterable of them,
                                such as a DataLoader; the fixed batch of ``build`` unless given
    callbacks                   functions that are called after every step with a ``StepMetrics``
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from argosy.errors import InputError, Problem, closest, invalid
from argosy.workload.capture.blame import blamed

_USES = {
    "optimizer": "optimizer(parameters)",
    "scheduler": "scheduler(optimizer)",
    "data": "data(step)",
    "callbacks": "callbacks = [function, ...]",
}
"""Names that a program may define beside ``build``, and how a run uses them."""
_SYNONYMS = {
    "lr_scheduler": "scheduler",
    "optimiser": "optimizer",
    "dataloader": "data",
    "loader": "data",
    "callback": "callbacks",
}
"""Other names that users give to these functions, and the names that a run uses."""
_OBJECTS = {
    "torch.optim.optimizer.Optimizer": "optimizer",
    "torch.optim.lr_scheduler.LRScheduler": "scheduler",
}
"""Classes whose objects cannot be used, since they hold parameters of the undivided model."""
_LOADER = "torch.utils.data.dataloader.DataLoader"
"""The full name of torch's class, which is compared without importing torch."""


@dataclass(frozen=True, kw_only=True)
class UserProgram:
    """The functions and data that a user's file defines."""

    build: Callable[[], Any]
    optimizer: Callable[[Any], Any] | None = None
    scheduler: Callable[[Any], Any] | None = None
    data: Callable[[int], Any] | Iterable[Any] | None = None
    callbacks: tuple[Callable[[Any], None], ...] = ()


def split_name(text: str) -> tuple[Path, str]:
    """Return the file and the function that ``file.py:build`` names; the function is ``build``
    unless given."""
    file, _, name = text.partition(":")
    path = Path(file)
    if path.suffix != ".py" or not path.is_file():
        actual = "no such file" if path.suffix == ".py" else f'"{text}"'
        raise invalid(
            file=file, found=actual, expected="a Python file and function, train.py:build"
        )
    return path, name or "build"


def check_program(text: str) -> None:
    """Raise an ``InputError`` if a file cannot be parsed or does not bind the function. The file is
    not run."""
    path, name = split_name(text)
    with blamed(str(path), expected="a Python file that can be imported"):
        tree = ast.parse(path.read_bytes(), filename=str(path))
    bound = _bound_names(tree)
    if "*" not in bound and name not in bound:
        public = [bound_name for bound_name in bound if not bound_name.startswith("_")]
        raise _no_function(path, name, public)


def _bound_names(tree: ast.Module) -> set[str]:
    """Return the names that the statements of a module may bind; ``*`` is among them if they cannot
    be listed."""
    bound: set[str] = set()
    statements: list[ast.AST] = list(tree.body)
    while statements:
        node = statements.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            bound.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                bound.add(node.id)
            elif node.id in ("globals", "exec", "vars", "setattr"):
                bound.add("*")
        statements += ast.iter_child_nodes(node)
    return bound


def _no_function(path: Path, name: str, known: Iterable[str]) -> InputError:
    problem = Problem(
        file=str(path),
        found=f'no function "{name}"',
        expected="build()",
        suggestion=closest(name, known),
    )
    return InputError([problem])


def load_program(text: str, *, trains: bool = False) -> UserProgram:
    """Run the file as a module whose imports are also found in its own folder.

    With ``trains``, raise an ``InputError`` if the file defines something that a run would ignore.
    """
    path, name = split_name(text)
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(f"argosy_program_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with blamed(str(path), expected="a Python file that can be imported"):
        spec.loader.exec_module(module)
    public = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    public = {key: value for key, value in public.items() if not isinstance(value, ModuleType)}
    functions = {key: value for key, value in public.items() if callable(value)}
    if name not in functions:
        raise _no_function(path, name, functions)
    mistakes = _mistakes(path, public, name) if trains else {}
    if mistakes:
        file = str(path)
        raise InputError(
            Problem(key, actual, expected, file=file)
            for key, (actual, expected) in mistakes.items()
        )
    return UserProgram(
        build=functions[name],
        optimizer=public.get("optimizer"),
        scheduler=public.get("scheduler"),
        data=public.get("data"),
        callbacks=tuple(public.get("callbacks", ())) if trains else (),
    )


def check_loader(program: UserProgram, global_batch: int) -> None:
    """Raise an ``InputError`` if a DataLoader makes batches that are not the plan's; the last one
    of an epoch may be short."""
    size = getattr(program.data, "batch_size", None)
    if _is_a(program.data, _LOADER) and size not in (None, global_batch):
        expected = f"batch_size={global_batch}, the plan's global batch"
        raise invalid("data", f"a DataLoader with batch_size={size}", expected)


def _mistakes(path: Path, public: Mapping[str, Any], build: str) -> dict[str, tuple[str, str]]:
    """Return by name what a program defines and a run would ignore or cannot use, as a pair: what
    was found and what is expected."""
    problems: dict[str, tuple[str, str]] = {}
    for key, value in public.items():
        kind = next((use for cls, use in _OBJECTS.items() if _is_a(value, cls)), None)
        if kind is not None:
            expected = (
                f"a function {_USES[kind]}, called once this process has its part of the model"
            )
            problems[key] = f"an object of class {type(value).__name__}", expected
        elif _is_a(value, _LOADER) and "data" not in public:
            problems[key] = "a DataLoader that is not used", f"its name to be data: data = {key}"
    for key in ("optimizer", "scheduler"):
        if key in public and key not in problems and not callable(public[key]):
            problems[key] = (
                f"an object of class {type(public[key]).__name__}",
                f"a function {_USES[key]}",
            )
    if "data" in public and (wrong := _wrong_data(public["data"])):
        problems["data"] = (
            wrong,
            "a function data(step), or an iterable of global batches such as a DataLoader",
        )
    callbacks = public.get("callbacks", ())
    if not isinstance(callbacks, (list, tuple)) or not all(map(callable, callbacks)):
        problems["callbacks"] = type(callbacks).__name__, "a list of functions of a StepMetrics"
    return problems | _misspelt(path, public, build)


def _is_a(value: object, name: str) -> bool:
    """Return whether a value's class or a base of it has this full name; torch need not be
    loaded."""
    return any(f"{cls.__module__}.{cls.__qualname__}" == name for cls in type(value).__mro__)


def _wrong_data(data: object) -> str | None:
    if callable(data):
        return None
    if hasattr(data, "__next__"):
        return f"a {type(data).__name__}, which can be read only once"
    iterable = hasattr(data, "__iter__") and not isinstance(data, (str, Mapping))
    is_tensor = hasattr(data, "untyped_storage")
    return None if iterable and not is_tensor else f"an object of class {type(data).__name__}"


def _misspelt(path: Path, public: Mapping[str, Any], build: str) -> dict[str, tuple[str, str]]:
    """Return the functions of the file that nothing calls and whose names are close to those that a
    run would use."""
    missing = [name for name in _USES if name not in public]
    loaded = {
        node.id
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    misspelt = {}
    for key, value in public.items():
        is_own = getattr(value, "__module__", None) == f"argosy_program_{path.stem}" and callable(
            value
        )
        is_list = isinstance(value, list) and value and all(map(callable, value))
        if not (is_own or is_list) or isinstance(value, type) or key == build or key in loaded:
            continue
        near = closest(key, missing) if len(key) > 4 else None
        meant = _SYNONYMS.get(key.lower()) or next(
            (name for name in missing if near and f'"{name}"' in near), None
        )
        if meant in missing:
            found = "functions that nothing calls" if is_list else "a function that nothing calls"
            misspelt[key] = found, f"the name in {_USES[meant]}"
    return misspelt
