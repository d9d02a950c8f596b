"""The references that follow from the code: every command, every file with its fields, every name
of the package."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo
from python_reference import python_page
from room_pages import room_pages

from argosy.cli.app import app
from argosy.cluster.schema import ClusterSchema
from argosy.errors import Mismatch
from argosy.plan.file import PlanSchema
from argosy.timeline.file import TimelineSchema
from argosy.workload.profile_file import ProfileSchema

FILES: tuple[tuple[str, str, type[BaseModel]], ...] = (
    (
        "cluster.toml",
        "A cluster; its words are explained in [clusters](../clusters.md).",
        ClusterSchema,
    ),
    (
        "plan.json",
        "A plan; an example with every field is in [formats](../formats.md).",
        PlanSchema,
    ),
    ("timeline.json", "What a simulation or a run returns.", TimelineSchema),
    ("profile.json", "Measured layers of a model on one kind of device.", ProfileSchema),
)


def write_references(folder: Path) -> None:
    """Write the pages of commands, files, Python names and folders, if they changed."""
    (folder / "rooms").mkdir(parents=True, exist_ok=True)
    pages = {"commands.md": commands_page(), "files.md": files_page(), "python.md": python_page()}
    pages |= {f"rooms/{name}": text for name, text in room_pages().items()}
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def copy_notes(source: Path, folder: Path) -> None:
    """The dated notes of the benchmarks as pages of the site, with their pictures; they lie outside
    of its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(path for path in source.iterdir() if path.suffix in (".md", ".svg", ".png")):
        content, copy = path.read_bytes(), folder / path.name
        if path.suffix == ".md":
            content = b"---\norphan: true\n---\n" + content.replace(b"](../../docs/", b"](../../")
        if not copy.exists() or copy.read_bytes() != content:
            copy.write_bytes(content)


def link_notes(name: str, text: str) -> str:
    """A page whose links to notes lead to their copies; a reader of the repository follows them as
    they are written."""
    return (
        text.replace("](../benchmarks/results/", "](reference/notes/")
        if name == "results"
        else text
    )


def commands_page() -> str:
    parts = [
        "# Commands\n\nGenerated from the program. Exit codes: 0 fine, 2 bad input, 3 infeasible, 4 a run failed.\n"
    ]
    for name, command in _commands("argosy", typer.main.get_command(app)):
        context = typer.Context(command, info_name=name, terminal_width=100, max_content_width=100)
        parts.append(f"## `{name}`\n\n```text\n{command.get_help(context).rstrip()}\n```\n")
    return "\n".join(parts)


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    children: dict[str, Any] | None = getattr(command, "commands", None)
    if children is None:
        yield name, command
        return
    for part, child in children.items():
        yield from _commands(f"{name} {part}", child)


def files_page() -> str:
    parts = [
        "# Fields of files\n\nGenerated from the models that read them. **Bold**: must be there.\n"
    ]
    for name, text, model in FILES:
        parts.append(f"## `{name}`\n\n{text}\n")
        for path, table in _tables(model):
            parts.append((f"### `{path}`\n\n" if path else "") + table)
    return "\n".join(parts)


def _tables(
    model: type[BaseModel], path: str = "", seen: frozenset[type] = frozenset()
) -> Iterator[tuple[str, str]]:
    """A table for the model, then one for each model inside it."""
    rows, inside = ["| field | values | default |", "| --- | --- | --- |"], []
    for name, field in model.model_fields.items():
        shown = field.alias or name
        label = f"**`{shown}`**" if field.is_required() else f"`{shown}`"
        words = _expected(field.metadata) or _words(field.annotation)
        rows.append(f"| {label} | {words} | {_default(field)} |")
        inside += [(shown, part) for part in _models(field.annotation) if part not in seen]
    yield path, "\n".join(rows) + "\n"
    for name, part in inside:
        yield from _tables(part, f"{path}.{name}" if path else name, seen | {model, part})


def _models(kind: Any) -> list[type[BaseModel]]:
    if (
        isinstance(kind, type)
        and not isinstance(kind, types.GenericAlias)
        and issubclass(kind, BaseModel)
    ):
        return [kind]
    return [model for part in typing.get_args(kind) for model in _models(part)]


def _words(kind: Any) -> str:
    """A type for people: a list of numbers, one of some words, a table."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return "one of " + ", ".join(f"`{value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(
            dict.fromkeys(_words(part) for part in arguments if part is not type(None))
        )
    if origin is typing.Annotated:
        return _expected(arguments[1:]) or _words(arguments[0])
    if origin in (list, tuple, set, frozenset):
        return "list of: " + " or ".join(
            dict.fromkeys(_words(part) for part in arguments if part is not ...)
        )
    if origin is dict:
        return f"table of: {_words(arguments[1])}"
    if kind in _PLAIN:
        return _PLAIN[kind]
    if _models(kind):
        return "table"
    return "any" if kind is Any else f"`{getattr(kind, '__name__', kind)}`"


def _expected(metadata: Sequence[object]) -> str | None:
    """What a field's own check says that it expects, asked by giving it something that nobody
    expects."""
    for check in metadata:
        if isinstance(check, BeforeValidator):
            try:
                typing.cast("Callable[[object], object]", check.func)(object())
            except Mismatch as mismatch:
                return mismatch.expected.replace("|", "\\|")
    return None


_PLAIN: dict[Any, str] = {int: "whole number", float: "number", str: "text", bool: "true or false"}


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return ""
    value = field.get_default(call_default_factory=True, validated_data={})
    return "" if value in (None, [], {}, ()) or isinstance(value, BaseModel) else f"`{value}`"


if __name__ == "__main__":
    write_references(Path(__file__).parent / "reference")
