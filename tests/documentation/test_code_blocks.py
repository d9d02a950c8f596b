"""Every code block of the documentation is run, in the order of its page, in one folder per page.

``sh``: every command must succeed (or end as its comment ``# exit 3`` says). ``python``: executed;
with a first line ``# name.py`` also written there for later blocks. ``toml``, ``json``, ``csv``:
must parse; with a first line that names a file, written there. ``text`` is output or a drawing;
with ``<!-- printed -->`` in the line before it, commands above it must have printed every line, of
which ``...`` leaves parts out. A block that cannot be run here says why in the line before it:
``<!-- not run: why -->``.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from argosy.cli import main

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    if "reference" not in path.parts
)
LANGUAGES = {"toctree", "include", "sh", "python", "toml", "json", "csv", "text"}
_NAMED = re.compile(r"# (?P<name>[\w./-]+\.(py|toml|json|csv))")
_EXIT = re.compile(r"#\s*exit (?P<code>\d+)\s*$")
_LONGEST = 180


@dataclass(frozen=True)
class Block:
    language: str
    line: int
    text: str
    before: str
    """The line before the block."""

    @property
    def is_skipped(self) -> bool:
        return self.before.startswith("<!-- not run: ") and len(self.before) > 22

    @property
    def is_printed(self) -> bool:
        return self.before == "<!-- printed -->"


def blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    start, language = 0, ""
    for number, line in enumerate(lines):
        if not line.lstrip().startswith("```"):
            continue
        if not start:
            start, language = number + 1, re.sub(r"[`{}]|\s.*", "", line.strip())
            continue
        before = lines[start - 2].strip() if start > 1 else ""
        body = "\n".join(lines[start:number]) + "\n"
        yield Block(language, start, body, before)
        start = 0


def test_every_block_says_what_it_is() -> None:
    unknown = [
        f"{page.relative_to(ROOT)}:{block.line}: {block.language or 'nothing'}"
        for page in PAGES
        for block in blocks(page)
        if block.language not in LANGUAGES
    ]
    assert not unknown


LONG = {"shared-link", "two-kinds"}
"""A minute or more."""


def pages() -> list[object]:
    """Those with blocks."""
    return [
        pytest.param(
            page, id=page.stem, marks=[pytest.mark.exhaustive] if page.stem in LONG else []
        )
        for page in PAGES
        if list(blocks(page))
    ]


@pytest.mark.parametrize("page", pages())
def test_the_blocks_of_a_page_run(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if (
        page.stem == "measure"
    ):  # what measures needs torch, and says so where only a person reads it
        pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), *sys.path]))
    said = ""
    for block in blocks(page):
        said += "".join(capfd.readouterr())
        if block.is_printed:
            missing = not_printed(block.text, said)
            assert not missing, f"{page.relative_to(ROOT)}:{block.line}: {missing} in\n{said}"
        if block.is_skipped or block.language in {"text", "toctree", "include"}:
            continue
        try:
            _run(block)
        except Exception as error:
            pytest.fail(f"{page.relative_to(ROOT)}:{block.line}: {type(error).__name__}: {error}")


def not_printed(text: str, said: str) -> list[str]:
    """The parts of a block that are not in an output, whatever the spaces and line breaks."""
    parts = [part for line in text.splitlines() for part in line.split("...")]
    printed = " ".join(said.split())
    return [part for part in parts if " ".join(part.split()) not in printed]


def test_a_line_that_was_not_printed_is_found() -> None:
    said = "certificate  no plan of\n   any shape is faster\nwrote a"
    assert not_printed("certificate  no plan ... is faster\nwrote a\n", said) == []
    assert not_printed("certificate  a plan ...\nwrote b\n", said) == [
        "certificate  a plan ",
        "wrote b",
    ]


def _run(block: Block) -> None:
    named = _NAMED.match(block.text)
    text = (
        block.text
        if named is None or block.language in ("python", "toml")
        else block.text.split("\n", 1)[1]
    )
    if named is not None:
        Path(named["name"]).parent.mkdir(parents=True, exist_ok=True)
        Path(named["name"]).write_text(text, encoding="utf-8")
    if block.language == "sh":
        for command in re.sub(r"\\\n\s*", " ", text).splitlines():
            _command(command)
    elif block.language == "python":
        exec(compile(text, f"line {block.line}", "exec"), {"__name__": "documentation"})
    elif block.language == "toml":
        tomllib.loads(text)
    elif block.language == "json":
        json.loads(text)
    else:
        widths = {len(row) for row in csv.reader(text.splitlines())}
        assert len(widths) == 1, f"rows of {sorted(widths)} columns"


def _command(line: str) -> None:
    if not line.strip() or line.lstrip().startswith("#"):
        return
    told = _EXIT.search(line)
    expected = int(told["code"]) if told else 0
    words = shlex.split(line, comments=True)
    if words[0] == "argosy" and not {">", "|", "run", "&&"} & set(words):
        with pytest.raises(SystemExit) as stop:
            main(words[1:])
        code = int(stop.value.code or 0)
    else:
        command = (
            line.replace("argosy ", f"{sys.executable} -m argosy ", 1)
            if words[0] == "argosy"
            else line
        )
        code = subprocess.run(["bash", "-c", command], check=False, timeout=_LONGEST).returncode
    assert code == expected, f"`{line}` ended with {code}, not {expected}"
