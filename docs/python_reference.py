"""The reference of the package from Python: signatures, docstrings, and the strings below
fields."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import argosy

METHODS = {
    "Plan": ("explain", "simulate", "report", "save"),
    "Report": ("save",),
    "Trainer": (
        "accumulate",
        "step",
        "evaluate",
        "save",
        "load",
        "move",
        "set_schedule",
        "set_shares",
    ),
}
"""Methods that are shown, by class; of others only the fields."""


def python_page() -> str:
    """Every public name of ``argosy``: functions first, then classes."""
    found = {name: _value(name) for name in argosy.__all__ if name != "__version__"}
    values = {name: value for name, value in found.items() if value is not None}
    functions = {name: value for name, value in values.items() if not inspect.isclass(value)}
    classes = {name: value for name, value in values.items() if inspect.isclass(value)}
    parts = [
        "# Python\n\nGenerated from the package. A model, a cluster or a plan may be an object, a file or a name.\n"
    ]
    parts += ["## Functions\n", *(_function(name, value) for name, value in functions.items())]
    parts += ["## Classes\n", *(_class(name, value) for name, value in classes.items())]
    return "\n".join(parts)


def _value(name: str) -> Any:
    """What a name stands for; None if it needs torch and there is none."""
    try:
        return getattr(argosy, name)
    except ModuleNotFoundError:
        return None


def _function(name: str, value: Any, level: str = "###") -> str:
    return f"{level} `{name}`\n\n```text\n{name}{_signature(value)}\n```\n\n{_prose(inspect.getdoc(value))}\n"


def _signature(value: Any) -> str:
    """The signature, a parameter per line if it is long."""
    signature = inspect.signature(value)
    kept = [
        one.replace(name=one.name) for one in signature.parameters.values() if one.name != "self"
    ]
    quoted = str(signature.replace(parameters=kept))
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", quoted)  # annotations are texts, not defaults
    return text if len(text) < 90 else re.sub(r", (?=[\w*]+[:,])", ",\n    ", text)


def _prose(text: str | None) -> str:
    """A docstring as Markdown: literals in single quotes of code, indented blocks as code."""
    lines = []
    for part in (text or "").replace("``", "`").split("\n\n"):
        is_code = part.startswith(("    ", ">>>"))
        lines.append(f"```text\n{textwrap.dedent(part)}\n```" if is_code else part)
    return "\n\n".join(lines)


def _class(name: str, kind: type) -> str:
    parts = [f"### `{name}`\n\n{_prose(inspect.getdoc(kind))}\n"]
    rows = list(_fields(kind)) if dataclasses.is_dataclass(kind) else []
    if rows:
        parts.append(
            "\n".join(["| field | type | default | meaning |", "| --- | --- | --- | --- |", *rows])
            + "\n"
        )
    parts += [
        _function(f"{name}.{method}", getattr(kind, method), "####")
        for method in METHODS.get(name, ())
    ]
    return "\n".join(parts)


def _fields(kind: Any) -> Iterator[str]:
    """A row per field, with the string below it in the source."""
    told = _strings(kind)
    for field in dataclasses.fields(kind):
        default = "required"
        if field.default is not dataclasses.MISSING:
            shown = repr(field.default)
            default = f"`{shown}`" if len(shown) <= 40 else "see the source"
        elif field.default_factory is not dataclasses.MISSING:
            default = "made for each"
        cells = (f"`{field.name}`", f"`{field.type}`", default, told.get(field.name, ""))
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _strings(kind: Any) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for node, after in zip(body.body, body.body[1:], strict=False):
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and is_text:
            found[node.target.id] = " ".join(str(after.value.value).replace("``", "`").split())  # type: ignore[attr-defined]
    return found
