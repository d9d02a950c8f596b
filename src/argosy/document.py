"""Reading a TOML or JSON document, and saying exactly what is wrong with it.

``read_toml`` and ``read_json`` keep the line of every value; ``validate`` checks a document against a
pydantic model and turns every complaint into a ``Problem`` with file, line, path, found, expected and a
suggestion, all at once.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from argosy.errors import InputError, Mismatch, Problem, closest, show

Location = tuple[str | int, ...]
"""Where a value stands: ``("nodes", 0, "nic")``."""


class Schema(BaseModel):
    """Base of everything that is read from a file: unknown fields are refused, values are not coerced."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


SchemaT = TypeVar("SchemaT", bound=Schema)


@dataclass(frozen=True)
class Document:
    """A parsed file with the line on which each of its values stands."""

    file: str
    data: dict[str, Any]
    lines: Mapping[Location, int] = field(repr=False)

    def line(self, location: Location) -> int | None:
        """Line of the value at ``location``, or of the nearest enclosing value that has one."""
        for length in range(len(location), 0, -1):
            if location[:length] in self.lines:
                return self.lines[location[:length]]
        return None

    def problem(
        self, location: Location, expected: str, found: object = None, *, suggestion: str | None = None
    ) -> Problem:
        return Problem(
            file=self.file,
            line=self.line(location),
            path=show_path(location) or None,
            found=None if found is None else show(found),
            expected=expected,
            suggestion=suggestion,
        )

    def error(self, location: Location, expected: str, found: object = None, **options: str) -> InputError:
        return InputError([self.problem(location, expected, found, **options)])


def show_path(location: Location) -> str:
    """
    >>> show_path(("nodes", 0, "nic", "bandwidth"))
    'nodes[0].nic.bandwidth'
    """
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def read_text(path: Path | str) -> str:
    """The text of a file, or an ``InputError`` that says why it cannot be read."""
    path = Path(path)
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError([Problem(file=str(path), expected="an existing file")]) from None
    except UnicodeDecodeError:
        raise InputError([Problem(file=str(path), expected="UTF-8 text", found="other bytes")]) from None
    except OSError as error:
        raise InputError(
            [Problem(file=str(path), expected="a readable file", found=error.strerror)]
        ) from None


def read_toml(path: Path | str) -> Document:
    return parse_toml(read_text(path), file=str(path))


def read_json(path: Path | str) -> Document:
    return parse_json(read_text(path), file=str(path))


def parse_toml(text: str, *, file: str) -> Document:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message, _, place = str(error).rpartition(" (at ")
        line = int(place.split("line ")[1].split(",")[0]) if "line " in place else None
        raise InputError(
            [Problem(file=file, line=line, expected="valid TOML", found=_clause(message))]
        ) from None
    return Document(file, data, _lines(_LineScanner(text, separator="=").toml()))


def parse_json(text: str, *, file: str) -> Document:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        found = _clause(error.msg)
        raise InputError(
            [Problem(file=file, line=error.lineno, expected="valid JSON", found=found)]
        ) from None
    if not isinstance(data, dict):
        raise InputError([Problem(file=file, line=1, expected="a JSON object", found=show(data))])
    return Document(file, data, _lines(_LineScanner(text, separator=":").json()))


def _lines(scanned: Iterable[tuple[Location, int]]) -> dict[Location, int]:
    """The line of every value; a table that only its members name (``[a.b]``) stands where the first does."""
    lines: dict[Location, int] = {}
    for location, line in scanned:
        for length in range(1, len(location)):
            lines.setdefault(location[:length], line)
        lines[location] = line
    return lines


def validate(document: Document, schema: type[SchemaT]) -> SchemaT:
    """The document as an instance of ``schema``, or one ``InputError`` with every problem in it."""
    try:
        return schema.model_validate(document.data)
    except ValidationError as error:
        problems = [_problem(document, schema, detail) for detail in error.errors()]
        problems.sort(key=lambda problem: problem.line or 0)
        raise InputError(problems) from None


def _problem(document: Document, schema: type[BaseModel], detail: ErrorDetails) -> Problem:
    location: Location = detail["loc"]
    found, context = detail.get("input"), detail.get("ctx", {})
    cause = context.get("error")
    if isinstance(cause, Mismatch):
        return Problem(
            file=document.file,
            line=document.line(location),
            path=show_path(location),
            found=cause.found,
            expected=cause.expected,
            suggestion=cause.suggestion,
        )
    match detail["type"]:
        case "missing":
            return document.problem(location, "a value: this field is required")
        case "extra_forbidden":
            known = sorted(_fields_at(schema, location[:-1]))
            name = str(location[-1])
            expected = "one of the fields " + ", ".join(known)
            problem = document.problem(location, expected, suggestion=closest(name, known))
            return replace(problem, found="an unknown field")
        case "model_type" | "dict_type":
            return replace(document.problem(location, "a table"), found=show(found))
        case "literal_error":
            expected = "one of " + context["expected"].replace("'", '"').replace(" or ", ", ")
            known = [part.strip(' "') for part in expected.removeprefix("one of ").split(",")]
            suggestion = closest(found, known) if isinstance(found, str) else None
            return document.problem(location, expected, found, suggestion=suggestion)
    expected = _clause(detail["msg"]).removeprefix("input should be ").removeprefix("value error, ")
    return replace(document.problem(location, expected), found=show(found))


def _clause(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


def _fields_at(schema: type[BaseModel], location: Location) -> list[str]:
    """Field names of the model that describes the table at ``location``."""
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


class _LineScanner:
    """Walks text that a real parser has already accepted and yields the line of every value.

    Python's parsers keep no positions; knowing the syntax to be valid makes a scanner of this size enough.
    """

    def __init__(self, text: str, *, separator: str) -> None:
        self.text = text.replace("\r\n", "\n") + "\n"
        self.position = 0
        self.line = 1
        self.separator = separator

    def json(self) -> Iterator[tuple[Location, int]]:
        self._skip_blank()
        yield from self._value(())

    def toml(self) -> Iterator[tuple[Location, int]]:
        table: Location = ()
        counts: dict[Location, int] = {}
        self._skip_blank()
        while self.position < len(self.text):
            line = self.line
            if self._peek() == "[":
                is_array = self.text.startswith("[[", self.position)
                self._advance(2 if is_array else 1)
                table = self._table_location(self._keys("]"), counts, is_array)
                self._advance(2 if is_array else 1)
                yield table, line
            else:
                location = table + self._keys("=")
                self._advance(1)
                self._skip_blank()
                yield from self._value(location, line)
            self._skip_blank()

    def _table_location(self, keys: Location, counts: dict[Location, int], is_array: bool) -> Location:
        location: Location = ()
        for index, key in enumerate(keys):
            location = (*location, key)
            last = index == len(keys) - 1
            if last and is_array:
                counts[location] = counts.get(location, -1) + 1
            if location in counts and (not last or is_array):
                location = (*location, counts[location])
        return location

    def _keys(self, end: str) -> Location:
        keys: list[str] = []
        while True:
            self._skip_blank()
            if self._peek() in "\"'":
                keys.append(self._quoted_key())
            else:
                start = self.position
                while self._peek() not in f". \t{end}":
                    self._advance(1)
                keys.append(self.text[start : self.position])
            self._skip_blank()
            if self._peek() != ".":
                return tuple(keys)
            self._advance(1)

    def _value(self, location: Location, line: int | None = None) -> Iterator[tuple[Location, int]]:
        yield location, line or self.line
        opening = self._peek()
        if opening in "\"'":
            self._string()
        elif opening in "[{":
            yield from self._items(location, is_table=opening == "{")
        else:
            while self._peek() not in ",]}\n#":
                self._advance(1)

    def _items(self, location: Location, *, is_table: bool) -> Iterator[tuple[Location, int]]:
        self._advance(1)
        index = 0
        while True:
            self._skip_blank()
            if self._peek() in "]}":
                self._advance(1)
                return
            if self._peek() == ",":
                self._advance(1)
                continue
            line = self.line
            if is_table:
                inner = location + self._keys(self.separator)
                self._advance(1)
                self._skip_blank()
            else:
                inner = (*location, index)
                index += 1
            yield from self._value(inner, line)

    def _quoted_key(self) -> str:
        start = self.position
        self._string()
        quoted = self.text[start : self.position]
        key = json.loads(quoted) if self.separator == ":" else tomllib.loads(f"key = {quoted}")["key"]
        assert isinstance(key, str)
        return key

    def _string(self) -> None:
        quote = self._peek()
        delimiter = quote * 3 if self.text.startswith(quote * 3, self.position) else quote
        self._advance(len(delimiter))
        while not self.text.startswith(delimiter, self.position):
            self._advance(2 if self._peek() == "\\" and quote == '"' else 1)
        self._advance(len(delimiter))
        while len(delimiter) == 3 and self._peek() == quote:
            self._advance(1)

    def _skip_blank(self) -> None:
        while self.position < len(self.text):
            if self._peek() == "#":
                while self._peek() != "\n":
                    self._advance(1)
            elif self._peek().isspace():
                self._advance(1)
            else:
                return

    def _peek(self) -> str:
        return self.text[self.position : self.position + 1]

    def _advance(self, count: int) -> None:
        self.line += self.text.count("\n", self.position, self.position + count)
        self.position += count
