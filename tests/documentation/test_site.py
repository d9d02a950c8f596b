"""The documentation builds without a warning, and shows every command and every page."""

from __future__ import annotations

import html
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_site_builds(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    build = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-b",
        "html",
        "-d",
        str(tmp_path / "trees"),
    ]
    done = subprocess.run(
        [*build, str(ROOT / "docs"), str(tmp_path / "html")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    commands = (tmp_path / "html" / "reference" / "commands.html").read_text(encoding="utf-8")
    for name in ("argosy plan", "argosy run", "argosy lab up", "argosy nbody ic"):
        assert name in commands
    names = (tmp_path / "html" / "reference" / "python.html").read_text(encoding="utf-8")
    for name in ("find_plan", "Settings", "Plan.explain", "CPU seconds.", "Trainer.evaluate"):
        assert name in names
    plain = html.unescape(names)
    assert "name: str = 'program'" in plain, "a default that is a text keeps its quotes"
    for package in (ROOT / "src" / "argosy").rglob("__init__.py"):
        name = ".".join(package.parent.relative_to(ROOT / "src").parts)
        assert (tmp_path / "html" / "reference" / "rooms" / f"{name}.html").is_file()
    check_search(tmp_path / "html" / "searchindex.js")
    pages = [
        path.relative_to(ROOT / "docs").with_suffix(".html")
        for path in (ROOT / "docs").rglob("*.md")
    ]
    assert all((tmp_path / "html" / page).is_file() for page in pages)
    results = (tmp_path / "html" / "results.html").read_text(encoding="utf-8")
    assert 'href="reference/notes/2026-11-18-planning.html"' in results
    index = (tmp_path / "html" / "index.html").read_text(encoding="utf-8")
    assert (
        "https://" not in index.split("<footer", maxsplit=1)[0] or "fonts.googleapis" not in index
    )


def check_search(index: Path) -> None:
    """The site's search knows the words that a newcomer types."""
    words = index.read_text(encoding="utf-8").lower()
    for word in ("lora", "nccl", "slurm", "hugging", "out of memory"):
        assert word in words, word
