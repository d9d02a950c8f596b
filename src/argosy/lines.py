"""Find the line of each value in a TOML or JSON text.

Python's parsers keep no positions. The scanner here is small because it only reads text that one of
these parsers has accepted.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property

Location = tuple[str | int, ...]
"""Keys and indices that lead to a value: ``("nodes", 0, "nic")``."""
# Depth of nested tables up to which lines are kept; a deeper value gets the line of the table
# around it.
_DEEPEST = 32


def toml_lines(text: str) -> Iterator[tuple[Location, int]]:
    """Yield the location of every value of a valid TOML text with its line."""
    return _LineScanner(text, separator="=").toml()


def json_lines(text: str) -> Iterator[tuple[Location, int]]:
    """Yield the location of every value of a valid JSON text with its line."""
    return _LineScanner(text, separator=":").json()


class LazyLines(Mapping[Location, int]):
    """A mapping of locations to lines that scans the text on first use: a valid document never
    needs it."""

    def __init__(self, scan: Callable[[], Iterator[tuple[Location, int]]]) -> None:
        self.scan = scan

    @cached_property
    def found(self) -> dict[Location, int]:
        """Return the line of every value; a table that only its members name (``[a.b]``) has the
        line of the first of them."""
        lines: dict[Location, int] = {}
        with suppress(RecursionError):  # values nested too deeply get the line of their table
            for location, line in self.scan():
                if len(location) > _DEEPEST:
                    continue
                for length in range(len(location) - 1, 0, -1):
                    if location[:length] in lines:  # then all enclosing tables are in it too
                        break
                    lines[location[:length]] = line
                lines[location] = line
        return lines

    def __getitem__(self, location: Location) -> int:
        return self.found[location]

    def __iter__(self) -> Iterator[Location]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)


class _LineScanner:
    """A scanner that walks over text which a real parser has accepted, and yields the line of each
    value."""

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

    def _table_location(
        self, keys: Location, counts: dict[Location, int], is_array: bool
    ) -> Location:
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
        key = (
            json.loads(quoted) if self.separator == ":" else tomllib.loads(f"key = {quoted}")["key"]
        )
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
