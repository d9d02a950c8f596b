"""Tables of broken input as text that reads like the files themselves.

## what is wrong
the input, any number of lines
> the first problem, word for word,
| which may go on in the next line
> the second problem
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Case:
    """One broken input and the whole message about it."""

    text: str
    message: str


def cases(table: str) -> list[object]:
    """The cases of a table as parameters of a test, each with its title as id."""
    parsed = []
    for block in table.strip("\n").split("## ")[1:]:
        title, *lines = block.splitlines()
        text = [line for line in lines if line[:1] not in (">", "|")]
        said = [line[1:].strip() for line in lines if line.startswith((">", "|"))]
        breaks = [
            "\n" if line.startswith(">") else " " for line in lines if line.startswith((">", "|"))
        ]
        message = "".join(gap + part for gap, part in zip(breaks, said, strict=True)).lstrip("\n")
        assert message, f"{title}: a case says what is wrong"
        parsed.append(pytest.param(Case("\n".join(text).rstrip("\n") + "\n", message), id=title))
    return parsed
