"""How the documentation is built: Sphinx, MyST Markdown, furo; the references are generated
first."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]

from argosy import __version__  # noqa: E402

project = "Argosy"
author = "the Argosy authors"
copyright = "2026, the Argosy authors"  # noqa: A001
release = __version__

extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
suppress_warnings = ["myst.xref_missing", "misc.highlighting_failure"]

html_theme = "furo"
html_title = "Argosy"
html_static_path: list[str] = []
html_theme_options = {"source_directory": "docs/", "navigation_with_keys": True}
html_show_sphinx = False


def setup(app: Any) -> None:
    from generate import copy_notes, link_notes, write_references

    write_references(HERE / "reference")
    copy_notes(HERE.parent / "benchmarks" / "results", HERE / "reference" / "notes")
    app.connect(
        "source-read", lambda _, name, source: source.__setitem__(0, link_notes(name, source[0]))
    )
