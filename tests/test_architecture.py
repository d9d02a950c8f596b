"""The shape of the source: imports point down, torch stays where it belongs, files stay small and say what they are."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "argosy"

LAYERS: tuple[tuple[str, ...], ...] = (
    ("__init__", "__main__"),
    ("api",),
    ("cli",),
    ("integrations",),
    ("report", "exporters", "lab"),
    ("nbody",),
    ("runtime",),
    ("adapt",),
    ("choose",),
    ("explain",),
    ("planner", "baselines", "calibrate"),
    ("solve",),
    ("sim",),
    ("space",),
    ("cost",),
    ("plan", "timeline"),
    ("schedule",),
    ("workload", "cluster"),
    ("document",),
    ("lines",),
    ("dtype", "units", "errors"),
)
"""Folders and modules, top to bottom. A part imports from itself and from layers below its own, not from its layer."""

PARTS = {name for names in LAYERS for name in names}

ALLOWED: dict[tuple[str, str], str] = {
    ("cli", "__init__"): "shows the version",
    ("plan", "api"): "a plan's methods lead into the rest of the package",
    ("plan", "report"): "a method returns a report",
    ("plan", "timeline"): "a method returns a timeline",
    ("units", "errors"): "what is wrong with a text is said as errors says it",
}
"""Imports that do not point down, each with its reason."""

TORCH = ("workload/capture/", "runtime/", "nbody/", "lab/", "integrations/")
"""Where torch and transformers may be imported; everything else plans and simulates without them."""
HEAVY = ("torch", "transformers")

VAGUE = {"utils", "util", "common", "helpers", "helper", "manager", "handler", "misc", "base"}
MOST_LINES = 400

FILES = sorted(SOURCE.rglob("*.py"))
each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(SOURCE).as_posix())


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imported(file: Path) -> Iterator[str]:
    """Dotted names of every module that a file imports, wherever in the file; the package itself is ``__init__``."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            yield from ("argosy.__init__" if alias.name == "argosy" else alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: write imports in full"
            names = [alias.name if alias.name in PARTS else "__init__" for alias in node.names]
            yield from [f"argosy.{name}" for name in names] if node.module == "argosy" else [node.module or ""]


def part(file: Path) -> str:
    """The folder or module of ``src/argosy`` that a file belongs to."""
    return file.relative_to(SOURCE).parts[0].removesuffix(".py")


def layer(name: str) -> int:
    return next(index for index, names in enumerate(LAYERS) if name in names)


def test_every_part_has_its_layer() -> None:
    assert {part(file) for file in FILES} <= PARTS
    assert len(PARTS) == sum(map(len, LAYERS)), "a part stands in one layer"


@each_file
def test_imports_point_down(file: Path) -> None:
    here = part(file)
    for name in imported(file):
        if name.startswith("argosy."):
            there = name.split(".")[1]
            down = here == there or layer(here) < layer(there) or (here, there) in ALLOWED
            assert down, f"{here} imports {name}, which is not below it"


@pytest.mark.parametrize("pair", ALLOWED, ids=" imports ".join)
def test_every_allowance_is_used(pair: tuple[str, str]) -> None:
    here, there = pair
    used = {name.split(".")[1] for file in FILES if part(file) == here for name in imported(file) if "argosy." in name}
    assert there in used


@each_file
def test_torch_is_imported_only_where_it_may_be(file: Path) -> None:
    path = file.relative_to(SOURCE).as_posix()
    if not path.startswith(TORCH):
        assert not [name for name in imported(file) if name.split(".")[0] in HEAVY]


@each_file
def test_every_module_says_what_it_is(file: Path) -> None:
    opening = ast.get_docstring(tree(file))
    assert opening, "a module opens with a sentence"
    assert opening.split("\n\n")[0].rstrip().endswith((".", ":")), "the opening is a sentence"


@each_file
def test_no_module_has_a_name_that_says_nothing(file: Path) -> None:
    assert VAGUE.isdisjoint([*file.relative_to(SOURCE).with_suffix("").parts])


@each_file
def test_a_file_is_one_idea(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


@each_file
def test_nothing_prints(file: Path) -> None:
    calls = [node for node in ast.walk(tree(file)) if isinstance(node, ast.Call)]
    assert not [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]


def loaded_by(statement: str) -> set[str]:
    """Top-level packages in a fresh Python after a statement."""
    code = f"{statement}\nimport sys\nsys.stdout.write(' '.join({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split())


def test_importing_argosy_loads_nothing_heavy() -> None:
    assert loaded_by("import argosy").isdisjoint({*HEAVY, "numpy", "pydantic", "scipy"})


def test_planning_and_simulating_load_no_torch() -> None:
    modules = [
        ".".join(("argosy", *file.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
        for file in FILES
        if not file.relative_to(SOURCE).as_posix().startswith(TORCH) and file.stem != "__main__"
    ]
    assert loaded_by(f"import {', '.join(modules)}").isdisjoint(HEAVY)
