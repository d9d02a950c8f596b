"""Generate a page for each folder of the package, and a list of them, from the source's own
docstrings."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"


def room_pages() -> dict[str, str]:
    """Return the text of every page by its file name."""
    folders = sorted(path.parent for path in (SOURCE / "argosy").rglob("__init__.py"))
    pages = {f"{_dotted(folder)}.md": _page(folder) for folder in folders}
    names = "\n".join(name.removesuffix(".md") for name in sorted(pages))
    head = "# Folders of the source\n\nGenerated from the docstrings, one page per folder; [the tour](../../layout.md) has their order.\n"
    return pages | {"index.md": f"{head}\n```{{toctree}}\n:maxdepth: 1\n\n{names}\n```\n"}


def _dotted(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


def _page(folder: Path) -> str:
    parts = [f"# `{_dotted(folder)}`\n\n{_prose(_parsed(folder / '__init__.py'))}\n"]
    for file in sorted(folder.glob("*.py")):
        if file.name != "__init__.py":
            parts.append(_section(file))
    return "\n".join(parts)


def _section(file: Path) -> str:
    """Return what a module is for, and its public classes and functions with their first
    sentences."""
    module = _parsed(file)
    rows = [f"| `{name}` | {text} |" for name, text in _names(module)]
    table = ["| name | what it is |", "| --- | --- |", *rows] if rows else []
    return "\n".join([f"## `{_dotted(file)}`\n", _prose(module), "", *table, ""])


def _names(module: ast.Module) -> Iterator[tuple[str, str]]:
    for node in module.body:
        is_defined = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if is_defined and not node.name.startswith("_"):
            yield node.name, _sentence(ast.get_docstring(node) or "")


def _sentence(text: str) -> str:
    """Return the first paragraph in one line, for a cell of a table."""
    return " ".join(text.split("\n\n")[0].split()).replace("``", "`").replace("|", "\\|")


def _prose(module: ast.Module) -> str:
    """Return a module's docstring as Markdown; indented blocks are code."""
    blocks = []
    for block in (ast.get_docstring(module) or "").split("\n\n"):
        is_code = block.startswith("    ") or ">>>" in block
        code = textwrap.dedent(block).replace("``", "")
        blocks.append(f"```text\n{code}\n```" if is_code else block.replace("``", "`"))
    return "\n\n".join(blocks)


def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))
