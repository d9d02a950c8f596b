"""Turn an invalid command line into an ``InputError`` that names the option and the expected value.

Typer uses the messages of the library that checks a value, and these do not always contain the
value. The expected value is read from the declaration of the option, and the value found is looked
up among the arguments.
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
"""The class of usage errors of the click that typer uses, its own or another."""


def as_input_error(error: Any, arguments: Sequence[str]) -> InputError:
    """Return typer's error about ``arguments`` as an ``InputError``."""
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
            {
                name
                for parameter_of_command in error.ctx.command.params
                for name in parameter_of_command.opts
            }
            if error.ctx is not None
            else set()
        )
        suggestion = closest(str(option), sorted(known)) or see
        return bad_input("one of its options", str(option), where=command, suggestion=suggestion)
    if option is not None:
        # Only a flag is refused with a value; any other option is refused without one.
        takes_none = any(argument.startswith(f"{option}=") for argument in arguments)
        values: list[object] = (
            list(_values([option], arguments)) if takes_none else [_Bare("nothing")]
        )
        return bad_input(
            "no value" if takes_none else "a value", values[-1] if values else None, where=option
        )
    if error.ctx is not None and hasattr(error.ctx.command, "commands"):
        names = list(error.ctx.command.commands)
        named = _unknown_command(error.ctx, arguments)
        expected = f"one of the commands {', '.join(names)}"
        return bad_input(expected, named, where=command, suggestion=closest(named, names))
    if extra := re.search(r"extra argument(?:s|\(s\))? \((.*)\)", error.message, re.DOTALL):
        return bad_input("no more arguments", extra[1], where=command, suggestion=see)
    return bad_input(f"what {command} --help shows", error.message, where=command)


def _unknown_command(context: Any, arguments: Sequence[str]) -> str:
    """Return the word that should have been a subcommand; groups have only flags before it."""
    depth = len(context.command_path.split()) - 1
    words = [word for word in arguments if word == "-" or not word.startswith("-")]
    return words[depth] if depth < len(words) else ""


def is_help(error: Exception) -> bool:
    """Return whether an error is only the help of a command that needs a subcommand."""
    return type(error).__name__ == "NoArgsIsHelpError"


@dataclass(frozen=True)
class _Bare:
    """A text that is shown without quotes: a number, or the absence of a value."""

    text: str

    def __str__(self) -> str:
        return self.text


def _name(parameter: Any) -> str:
    """Return the first name of an option, or the placeholder of an argument."""
    if parameter.param_type_name == "option":
        return str(parameter.opts[0])
    return str(parameter.metavar or parameter.name.upper())


def _expected(context: Any, parameter: Any) -> str:
    """Describe the expected value from the annotation of the command's function."""
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
    number = "a whole number" if int in kinds else "a number" if float in kinds else None
    if number is None:
        return _sentence(info.help or "a value")
    if info.min is not None and info.max is not None:
        return f"{number} from {info.min:,} to {info.max:,}" if info.max < math.inf else number
    return number + (f" of at least {info.min}" if info.min is not None else "")


def _sentence(help_text: str) -> str:
    """Return the first sentence of a help text in a form that fits into another sentence.

    >>> _sentence("A plan.json, or the name of a bundled plan.")
    'a plan.json, or the name of a bundled plan'
    """
    first = help_text.partition(". ")[0].rstrip(".")
    return first if first[1:2].isupper() else first[:1].lower() + first[1:]


def _found(parameter: Any, arguments: Sequence[str]) -> object:
    """Return the value that was given; if there are several, the first that is no number, else the
    last."""
    if parameter.param_type_name == "option":
        values = list(_values(parameter.opts, arguments))
    else:
        values = [argument for argument in arguments if not argument.startswith("-")][-1:]
    not_numbers = [value for value in values if not _is_number(value)]
    return not_numbers[0] if not_numbers else _Bare(values[-1]) if values else None


def _values(options: Sequence[str], arguments: Sequence[str]) -> Iterator[str]:
    """Yield the values of ``--option VALUE``, ``--option=VALUE``, ``-o VALUE`` and ``-oVALUE``."""
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
    """Return whether a text is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True
