"""A command line that cannot be read, as a problem like any other: which option, what was found,
what was expected.

Typer says these things in the words of whichever library checks its values, and not always with the
value. What an option takes is read from its declaration; what was found is looked up among the
arguments.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, get_args, get_type_hints

import typer

from argosy.errors import InputError, bad_input, closest

UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""Of the click that typer uses, its own or another."""


def as_input_error(error: Any, arguments: Sequence[str]) -> InputError:
    """What typer says about ``arguments``, in our words."""
    command = error.ctx.command_path if error.ctx is not None else "argosy"
    see = f"see {command} --help"
    parameter = getattr(error, "param", None)
    option = getattr(error, "option_name", None)
    if parameter is not None:
        name, expected = _name(parameter), _expected(error.ctx, parameter)
        if "Missing" in type(error).__name__:
            return bad_input(expected, _Bare("nothing"), where=name, suggestion=see)
        return bad_input(expected, _found(parameter, arguments), where=name)
    if hasattr(error, "possibilities"):
        known = (
            {name for one in error.ctx.command.params for name in one.opts}
            if error.ctx is not None
            else set()
        )
        suggestion = closest(str(option), sorted(known)) or see
        return bad_input("one of its options", str(option), where=command, suggestion=suggestion)
    if option is not None:
        takes_none = "not take" in error.message
        values: list[object] = (
            list(_values([option], arguments)) if takes_none else [_Bare("nothing")]
        )
        return bad_input(
            "no value" if takes_none else "a value", values[-1] if values else None, where=option
        )
    if named := re.search(r"No such command ['\"](.*?)['\"]\.", error.message):
        names = list(error.ctx.command.commands)
        expected = f"one of the commands {', '.join(names)}"
        return bad_input(expected, named[1], where=command, suggestion=closest(named[1], names))
    if extra := re.search(r"extra argument(?:s|\(s\))? \((.*)\)", error.message, re.DOTALL):
        return bad_input("no more arguments", extra[1], where=command, suggestion=see)
    return bad_input(f"what {command} --help shows", error.message, where=command)


def is_help(error: Exception) -> bool:
    """Whether it is no error but the help of a command that needs another one."""
    return type(error).__name__ == "NoArgsIsHelpError"


@dataclass(frozen=True)
class _Bare:
    """Shown without quotes: a number, or what was not given at all."""

    text: str

    def __str__(self) -> str:
        return self.text


def _name(parameter: Any) -> str:
    """The option as help lists it first; an argument by what it stands for."""
    if parameter.param_type_name == "option":
        return str(parameter.opts[0])
    return str(parameter.metavar or parameter.name.upper())


def _expected(context: Any, parameter: Any) -> str:
    """From the annotation of the function that is the command."""
    function = context.command.callback
    hint = get_type_hints(getattr(function, "__wrapped__", function), include_extras=True)[
        parameter.name
    ]
    annotation, info = get_args(hint)[:2]
    kinds = {
        kind for part in (annotation, *get_args(annotation)) for kind in (part, *get_args(part))
    }
    choices = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, StrEnum)]
    if choices:
        return f"one of {', '.join(choices[0])}"
    what = "a whole number" if int in kinds else "a number" if float in kinds else None
    if what is None:
        return _sentence(info.help or "a value")
    if info.min is not None and info.max is not None:
        return f"{what} from {info.min:,} to {info.max:,}" if info.max < math.inf else what
    return what + (f" of at least {info.min}" if info.min is not None else "")


def _sentence(help_text: str) -> str:
    """A help text in the middle of a sentence, or as much of it as says what is meant.

    >>> _sentence("A plan.json, or the name of a bundled plan.")
    'a plan.json, or the name of a bundled plan'
    """
    first = help_text.partition(". ")[0].rstrip(".")
    return first if first[1:2].isupper() else first[:1].lower() + first[1:]


def _found(parameter: Any, arguments: Sequence[str]) -> object:
    """The value that was given; of several the first that is no number, or else the last."""
    if parameter.param_type_name == "option":
        values = list(_values(parameter.opts, arguments))
    else:
        values = [argument for argument in arguments if not argument.startswith("-")][-1:]
    strange = [value for value in values if not _is_number(value)]
    return strange[0] if strange else _Bare(values[-1]) if values else None


def _values(options: Sequence[str], arguments: Sequence[str]) -> Iterator[str]:
    """``--option VALUE``, ``--option=VALUE``, ``-o VALUE`` and ``-oVALUE``."""
    for at, argument in enumerate(arguments):
        for option in options:
            if argument == option:
                yield from arguments[at + 1 : at + 2]
            elif option.startswith("--") and argument.startswith(f"{option}="):
                yield argument.removeprefix(f"{option}=")
            elif (
                not option.startswith("--")
                and argument.startswith(option)
                and not argument.startswith("--")
            ):
                yield argument.removeprefix(option)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
