"""Let a command take its options as one value, a frozen dataclass whose fields typer reads."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import wraps
from typing import Any, TypeVar, get_type_hints

Options = TypeVar("Options")


def takes_options(command: Callable[[Options], None]) -> Callable[..., None]:
    """Return a function whose keyword arguments are the fields of the command's options.

    The command has one parameter ``options``, annotated with a dataclass. Each field is annotated
    as typer expects it of a parameter. The returned function builds the dataclass.
    """
    options_class: Any = get_type_hints(command)["options"]
    hints = get_type_hints(options_class, include_extras=True)

    @wraps(command)
    def call(**given: Any) -> None:
        command(options_class(**given))

    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if field.default is MISSING else field.default,
                annotation=hints[field.name],
            )
            for field in fields(options_class)
        ]
    )
    call.__annotations__ = hints
    del call.__dict__["__wrapped__"]  # typer would read the annotations of that
    return call


def picked(values: type[Options], options: Any) -> Options:
    """Return ``values`` with those of its fields that are among a command's options."""
    fields_of: Any = fields(values)  # type: ignore[arg-type]
    names = [field.name for field in fields_of if hasattr(options, field.name)]
    return values(**{name: getattr(options, name) for name in names})


def given(options: Any, *names: str) -> dict[str, object]:
    """Return those of the named options whose values are not their defaults, by how a user writes
    them, such as ``--schedule``."""
    hints = get_type_hints(type(options), include_extras=True)
    defaults = {field.name: field.default for field in fields(options)}
    values = {}
    for name in names:
        value, written = getattr(options, name), hints[name].__metadata__[0].default
        if value not in (defaults[name], []):
            values[written if isinstance(written, str) else name.upper()] = value
    return values
