"""Read TOML and JSON documents, and report every problem in them with its place.

``read_toml`` and ``read_json`` keep the line of every value. ``validate`` checks a document against
a pydantic model and turns every error into a ``Problem`` with file, line, path, the value found,
the value expected and a suggestion. It reports all problems at once.
"""

from __future__ import annotations

import inspect
import json
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from argosy.errors import (
    MOST_PROBLEMS,
    InputError,
    Mismatch,
    Problem,
    closest,
    impossible,
    invalid,
    refused,
    show,
)
from argosy.lines import LazyLines, json_lines, toml_lines
from argosy.lines import Location as Location

# Folders in which a shell puts the pipes that it opens for a command.
_OWN_PIPES = (Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd"))
# Largest number of parts in a dotted key of a TOML file. Python's parser takes hours for keys with
# very many parts, and no file of Argosy needs them.
_MOST_PARTS = 100


# A JSON object as Python reads it.
JsonObject = dict[str, Any]


class Schema(BaseModel):
    """A base class for everything that is read from a file. It rejects unknown fields and does not
    coerce values."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    makes: ClassVar[Any] = None
    """The class of the values that such tables describe."""

    def value(self, **others: Any) -> Any:
        """Return what a table describes; ``others`` are fields that it states in another form."""
        names = _parameters(self.makes) - others.keys()
        own = {name: _value(content) for name, content in self if name in names}
        return self.makes(**own, **others)


@cache
def _parameters(kind: Any) -> frozenset[str]:
    return frozenset(inspect.signature(kind).parameters)


def _value(content: Any) -> Any:
    """Return the value of a field: lists and tables by name are tuples."""
    if isinstance(content, Schema):
        return content.value()
    if isinstance(content, dict):
        return tuple(content.items())
    return tuple(map(_value, content)) if isinstance(content, list) else content


SchemaT = TypeVar("SchemaT", bound=Schema)
Kind = TypeVar("Kind", bound=Enum)
# A value of an enum, which a file has as a word.
Word = Annotated[Kind, Field(strict=False)]


@dataclass(frozen=True)
class Document:
    """A parsed file that records on which line each of its values is."""

    file: str
    data: JsonObject
    lines: Mapping[Location, int] = field(repr=False)
    prefix: Location = ()
    """Location of ``data`` in the file; not empty if the document is a part of another one."""

    def inside(self, *location: str | int) -> Document:
        """Return the table at ``location`` as a document whose problems are still located in the
        whole file."""
        data: Any = self.data
        for part in location:
            data = data[part]
        return Document(self.file, data, self.lines, (*self.prefix, *location))

    def chosen(self, kind: str, name: str) -> Document:
        """Return the table ``name`` of a file that has one table per ``kind``; raise if there is no
        such table."""
        if not isinstance(self.data.get(name), dict):
            expected = f"a {kind} of this file ({', '.join(self.data)})"
            suggestion = closest(name, self.data)
            raise invalid(kind, show(name), expected, file=self.file, suggestion=suggestion)
        return self.inside(name)

    def line(self, location: Location) -> int | None:
        """Return the line of the value at ``location``, or of the nearest enclosing value that has
        one."""
        location = (*self.prefix, *location)
        for length in range(len(location), 0, -1):
            if location[:length] in self.lines:
                return self.lines[location[:length]]
        return None

    def problem(
        self,
        location: Location,
        expected: str,
        found: object = None,
        *,
        suggestion: str | None = None,
    ) -> Problem:
        """Return a problem with the value at ``location``."""
        return Problem(
            show_path((*self.prefix, *location)) or None,
            None if found is None else show(found),
            expected,
            file=self.file,
            line=self.line(location),
            suggestion=suggestion,
        )

    def error(
        self,
        location: Location,
        expected: str,
        found: object = None,
        *,
        suggestion: str | None = None,
    ) -> InputError:
        """Return an error with a single problem with the value at ``location``."""
        return InputError([self.problem(location, expected, found, suggestion=suggestion)])

    def mismatch(self, location: Location, error: Mismatch) -> Problem:
        """Return the problem that a ``Mismatch`` reports about the value at ``location``."""
        return replace(
            self.problem(location, error.expected, suggestion=error.suggestion), found=error.found
        )

    def placed(self, problem: Problem, location: Location) -> Problem:
        """Return ``problem`` unchanged if it names a file, else located at ``location``."""
        if problem.file is not None:
            return problem
        place = self.problem(location, "")
        return replace(problem, file=place.file, line=place.line, path=problem.path or place.path)


def show_path(location: Location) -> str:
    """Return a location as text.

    >>> show_path(("nodes", 0, "nic", "bandwidth"))
    'nodes[0].nic.bandwidth'
    """
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def parse_path(path: str) -> Location:
    """Return the location that a text names.

    >>> parse_path("nodes[0].nic.bandwidth")
    ('nodes', 0, 'nic', 'bandwidth')
    """
    parts = re.findall(r"\[(\d+)\]|([^.\[\]]+)", path)
    return tuple(int(index) if index else name for index, name in parts)


def is_there(path: Path | str) -> bool:
    """Return whether a file or folder of that name exists; False for names that no file can have,
    such as very long ones."""
    _check_path(path)
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


def _check_path(path: object) -> None:
    if not isinstance(path, str | Path):
        raise invalid(None, f"an object of class {type(path).__name__}", "a file or a name")


def make_folder(path: Path) -> None:
    """Create a folder and its parents; raise an ``InputError`` with the reason if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise impossible(f"create the folder {path}", error, "another folder") from None


def check_readable(path: Path) -> None:
    """Raise an ``InputError`` if the path exists and is a device, a socket or a named pipe.

    Reading one of these may never end, and an input file may name one. A pipe that this process
    already holds, such as ``<(command)`` of a shell, has an end and is accepted.
    """
    mode = path.stat().st_mode
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        raise invalid(file=str(path), expected="a file", found="a device")
    if stat.S_ISSOCK(mode) or (stat.S_ISFIFO(mode) and path.parent not in _OWN_PIPES):
        actual = "a socket" if stat.S_ISSOCK(mode) else "a named pipe"
        raise invalid(file=str(path), expected="a file", found=actual)


def read_text(path: Path | str) -> str:
    """Return the text of a file; raise an ``InputError`` with the reason if it cannot be read."""
    _check_path(path)
    path = Path(path)
    try:
        check_readable(path)
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise refused("there is no such file", file=str(path)) from None
    except UnicodeDecodeError:
        raise invalid(file=str(path), expected="UTF-8 text", found="other bytes") from None
    except ValueError:  # such as a name with a null character in it
        raise refused("no file can have this name", file=repr(str(path))) from None
    except IsADirectoryError:
        raise invalid(file=str(path), expected="a file", found="a folder") from None
    except OSError as error:
        raise impossible(f"read {path}", error, "another file") from None


def read_toml(path: Path | str) -> Document:
    """Read a TOML file; raise an ``InputError`` if that fails."""
    return parse_toml(read_text(path), file=str(path))


def read_json(path: Path | str) -> Document:
    """Read a JSON file; raise an ``InputError`` if that fails."""
    return parse_json(read_text(path), file=str(path))


def parse_toml(text: str, *, file: str) -> Document:
    """Parse TOML text; raise an ``InputError`` if it is not valid."""
    if _has_deep_keys(text):
        raise _unreadable(file, RecursionError())
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message, _, place = str(error).rpartition(" (at ")
        ended = text.rstrip("\n").count("\n") + 1
        line = int(place.split("line ")[1].split(",")[0]) if "line " in place else ended
        actual = re.sub("^cannot ", "an attempt to ", re.sub("^expected ", "no ", _clause(message)))
        raise invalid(file=file, line=line, expected="valid TOML", found=actual) from None
    except (ValueError, RecursionError) as error:
        raise _unreadable(file, error) from None
    return Document(file, data, LazyLines(lambda: toml_lines(text)))


def _has_deep_keys(text: str) -> bool:
    """Return whether some key such as ``a.b.c`` has more parts than any file needs; Python's parser
    takes hours for such keys."""
    if text.count(".") <= _MOST_PARTS:
        return False
    plain = re.sub(r"\"[^\"\n]*\"|'[^'\n]*'", "q", text)
    keys = re.split(r"[=\n,{}\[\]]", re.sub(r"#[^\n]*", "", plain))
    return any(key.count(".") > _MOST_PARTS for key in keys)


def parse_json(text: str, *, file: str) -> Document:
    """Parse JSON text; raise an ``InputError`` if it is not valid, repeats a name or is no
    object."""
    repeats = False

    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal repeats
        data = dict(pairs)
        repeats = repeats or len(data) < len(pairs)
        return data

    try:
        data = json.loads(text, object_pairs_hook=table)
    except json.JSONDecodeError as error:
        actual = re.sub("^expecting ", "no ", _clause(error.msg).removesuffix(" starting at"))
        raise invalid(file=file, line=error.lineno, expected="valid JSON", found=actual) from None
    except (ValueError, RecursionError) as error:
        raise _unreadable(file, error) from None
    if repeats:
        raise InputError([_repeated(text, file)])
    if not isinstance(data, dict):
        raise invalid(file=file, line=1, expected="a JSON object", found=show(data))
    return Document(file, data, LazyLines(lambda: json_lines(text)))


def _repeated(text: str, file: str) -> Problem:
    """Return the problem that a name occurs twice in one JSON object."""
    seen: set[Location] = set()
    for location, line in json_lines(text):
        problem = Problem(show_path(location), "a second value", "only one", file=file, line=line)
        if location in seen:
            break
        seen.add(location)
    return problem


def _unreadable(file: str, error: Exception) -> InputError:
    """Return the error for a text that is valid but exceeds the limits of Python's parsers."""
    is_nested = isinstance(error, RecursionError)
    reason = "its tables are nested too deeply" if is_nested else "a number in it is too long"
    return impossible(f"read {file}", reason, "a simpler document")


def validate(document: Document, schema: type[SchemaT]) -> SchemaT:
    """Return the document as an instance of ``schema``; raise one ``InputError`` with every problem
    in it."""
    try:
        return schema.model_validate(document.data)
    except ValidationError as error:
        if _is_of_another_kind(document, schema):
            raise InputError([_another_kind(document, schema)]) from None
        details = error.errors(include_url=False)
        problems = [_problem(document, schema, detail) for detail in details[:MOST_PROBLEMS]]
        problems.sort(key=lambda problem: problem.line or 0)
        raise InputError(problems, more=len(details) - len(problems)) from None


_OF_ANY_KIND = frozenset({"version", "source"})
"""Fields that do not identify the kind of a document, because many kinds have them."""
# Largest number of field names that the message about a wrong kind of file lists.
_MOST_NAMED = 6


def _is_of_another_kind(document: Document, schema: type[BaseModel]) -> bool:
    """Return whether a whole file is of another kind: it has more than two fields, none of them
    belongs to the schema, and most of them are no misspelling of one that does."""
    if document.prefix or not isinstance(document.data, dict):  # a part of a file has no kind
        return False
    identifying, known = document.data.keys() - _OF_ANY_KIND, _fields_at(schema, ())
    if len(identifying) <= 2 or not identifying.isdisjoint(known):
        return False
    return 2 * sum(closest(name, known) is not None for name in identifying) < len(identifying)


def _another_kind(document: Document, schema: type[BaseModel]) -> Problem:
    """Return one problem for a file of another kind, in place of one problem per field."""
    required = [
        info.alias or name for name, info in schema.model_fields.items() if info.is_required()
    ]
    expected = ", ".join(name for name in required if name not in _OF_ANY_KIND)
    identifying = [name for name in document.data if name not in _OF_ANY_KIND]
    rest = ["..."] if len(identifying) > _MOST_NAMED else []
    actual = f"a file of another kind, with {', '.join(identifying[:_MOST_NAMED] + rest)}"
    return replace(document.problem((), f"a file with {expected}"), found=actual)


def _problem(document: Document, schema: type[BaseModel], detail: ErrorDetails) -> Problem:
    location: Location = tuple(part for part in detail["loc"] if part != "[key]")
    actual, context = detail.get("input"), detail.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, Mismatch):
        return document.mismatch(location, cause)
    match detail["type"]:
        case "missing":
            return document.problem(location, "a value: this field is required")
        case "extra_forbidden":
            known = sorted(_fields_at(schema, location[:-1]))
            expected = "one of the fields " + ", ".join(known)
            problem = document.problem(
                location, expected, suggestion=closest(str(location[-1]), known)
            )
            return replace(problem, found="an unknown field")
        case "model_type" | "dict_type":
            return replace(document.problem(location, "a table"), found=show(actual))
        case "literal_error" | "enum":
            choices = context["expected"].replace("'", '"').replace(" or ", ", ")
            known = [part.strip('"') for part in choices.split(", ") if part.startswith('"')]
            suggestion = closest(actual, known) if isinstance(actual, str) else None
            problem = document.problem(location, f"one of {choices}", suggestion=suggestion)
            return replace(problem, found=show(actual))
        case "too_short" | "too_long":
            least, most = context.get("min_length"), context.get("max_length")
            expected = f"at least {least}" if most is None else f"at most {most}"
            return replace(
                document.problem(location, expected), found=f"{context['actual_length']} items"
            )
    expected = _clause(detail["msg"]).removeprefix("input should be ").removeprefix("value error, ")
    return replace(document.problem(location, expected), found=show(actual))


def _clause(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


def _fields_at(schema: type[BaseModel], location: Location) -> list[str]:
    """Return the field names of the model that describes the table at ``location``."""
    current: type[BaseModel] = schema
    for part in location:
        if isinstance(part, str) and part in current.model_fields:
            current = next(_models_in(current.model_fields[part].annotation), current)
    return [info.alias or name for name, info in current.model_fields.items()]


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)
