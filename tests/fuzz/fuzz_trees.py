"""Changes to a parsed document that keep it a document: what a person, another version or an
attacker would write.

A tree is what JSON and TOML parse to. Every function takes its luck from the ``Random`` it is
given, so that the name of a target and a number say everything about an input.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from random import Random
from typing import Any

Slot = tuple[Any, Any]
"""A container and the key or index at which a value stands in it."""

NUMBERS: tuple[Any, ...] = (
    0,
    1,
    -1,
    2,
    3,
    7,
    2**31,
    2**63,
    -(2**63),
    10**18,
    10**400,
    0.0,
    -0.0,
    0.5,
    1e-320,
    1e-12,
    1e300,
    -1e300,
    1.7976931348623157e308,
    math.nan,
    math.inf,
    -math.inf,
)
TEXTS = (
    "",
    " ",
    "0",
    "-1",
    "1e999",
    "nan",
    "inf Gbit/s",
    "-5 ms",
    "25 Gbit/s",
    "0 B/s",
    "1e308 GB/s",
    "10 ms",
    "none",
    "*",
    "[",
    "[0-9]",
    "a0",
    "a0.0",
    "a0.nic",
    "../../etc/passwd",
    "/dev/null",
    "/dev/zero",
    "\x00",
    "\x1b[31mred",
    "\ud7ff\U0001f30d\u202e",
    "²",
    "٣",
    "é" * 300,
    "x" * 5000,
    "<script>alert(1)</script>",
    "{{ 7 * 7 }}",
    "%s%n",
    "[bold]markup[/]",
    "[/]",
    "line\nbreak",
)


LONG = 1_000_000
REPEATED = (
    "[",
    "]",
    " ",
    "\t",
    "=",
    ",",
    ".",
    "_",
    "-",
    '"',
    "9",
    "x",
    "1_",
    "_1",
    "a ",
    "a[",
    "[1],",
    "a=",
    "--",
    ":",
)
"""Repeated up to ``LONG`` characters, they show a reader whose time grows faster than its input."""


def odd_text(random: Random) -> str:
    """A text that few expect; one in a hundred is a megabyte long."""
    if random.random() < 0.01:
        part = random.choice(REPEATED)
        return part * (LONG // len(part))
    return random.choice(TEXTS)


def slots(tree: Any) -> Iterator[Slot]:
    """Every place in a tree that holds a value."""
    pairs = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for key, value in pairs:
        yield tree, key
        yield from slots(value)


def changed(random: Random, tree: Any) -> Any:
    """A copy of the tree with one change, mostly, and with up to six."""
    tree = copy.deepcopy(tree)
    for _ in range(random.choice((1, 1, 1, 2, 3, 6))):
        places = list(slots(tree))
        if not places:
            return other_value(random, tree)
        _change(random, *random.choice(places), places)
    return tree


def _change(random: Random, holder: Any, key: Any, places: list[Slot]) -> None:
    """Change, remove, repeat or move the value at ``holder[key]``."""
    value = holder[key]
    match random.randrange(10):
        case 0:
            del holder[key]
        case 1:
            _repeat(random, holder, key)
        case 2:
            there, at = random.choice(places)
            if at in there if isinstance(there, dict) else at < len(there):
                holder[key], there[at] = copy.deepcopy(there[at]), copy.deepcopy(value)
        case 3 if isinstance(holder, dict):
            holder[random.choice(("", "name", "version", "x", "count", *TEXTS))] = holder.pop(key)
        case 4:
            holder[key] = nested(random)
        case 5 | 6 if isinstance(value, int | float) and not isinstance(value, bool):
            holder[key] = near(random, value)
        case _:
            holder[key] = other_value(random, value)


def _repeat(random: Random, holder: Any, key: Any) -> None:
    """The value once more, or a few times more, beside itself."""
    if isinstance(holder, list):
        holder[key:key] = [copy.deepcopy(holder[key]) for _ in range(random.choice((1, 2, 40)))]
    else:
        holder[f"{key}{random.choice(('', '2', ' '))}"] = copy.deepcopy(holder[key])


def near(random: Random, value: float) -> Any:
    """A number beside this one, or the same in another type."""
    candidates: list[Any] = [
        -value,
        value + 1,
        value - 1,
        value * 2,
        str(value),
        [value],
        {"value": value},
    ]
    if abs(value) < 1e300:
        candidates += [int(value), float(value), value * 1000, value / 1000]
    return random.choice(candidates)


def other_value(random: Random, value: Any) -> Any:
    """A value of the same type that is unlikely, or one of another type."""
    match random.randrange(7):
        case 0 | 1:
            return random.choice(NUMBERS)
        case 2 | 3:
            return odd_text(random)
        case 4:
            return random.choice((None, True, False, [], {}, [[]], [None], {"": None}))
        case 5 if isinstance(value, str) and value:
            at = random.randrange(len(value))
            return value[:at] + odd_text(random) + value[at + random.randrange(3) :]
    return [value, value] if random.random() < 0.5 else {"value": value}


def nested(random: Random) -> Any:
    """Lists or tables within each other, often more than a parser takes."""
    tree: Any = 0
    for _ in range(random.choice((2, 20, 300))):
        tree = [tree] if random.random() < 0.5 else {"a": tree}
    return tree


def json_text(tree: Any) -> str:
    """JSON as Python reads it: with ``NaN`` and ``Infinity``."""
    return json.dumps(tree, ensure_ascii=False)


def toml_text(tree: Any) -> str:
    """A table as TOML, a value per line; TOML has no null, so such values are left out."""
    if not isinstance(tree, dict):
        return f"value = {_toml(tree)}\n"
    return "".join(
        f"{json.dumps(str(key))} = {_toml(value)}\n"
        for key, value in tree.items()
        if value is not None
    )


def _toml(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return json.dumps(value).replace("\x7f", "\\u007f")
        case float():
            return repr(value)
        case dict():
            pairs = (
                f"{json.dumps(str(key))} = {_toml(item)}"
                for key, item in value.items()
                if item is not None
            )
            return "{" + ", ".join(pairs) + "}"
        case list():
            return "[" + ", ".join(_toml(item) for item in value if item is not None) + "]"
    return str(value)
