"""The shape of the source: imports point down, torch stays where it belongs, files stay small and
say what they are."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "argosy"

LAYERS: tuple[tuple[str, ...], ...] = (
    ("__init__", "__main__"),
    ("api",),
    ("cli",),
    ("integrations",),
    ("report", "exporters", "lab"),
    ("nbody", "measure"),
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
    ("bundled",),
    ("document",),
    ("lines",),
    ("dtype", "units", "errors"),
)
"""Folders and modules, top to bottom. A part imports from itself and from layers below its own, not
from its layer."""

PARTS = {name for names in LAYERS for name in names}

ALLOWED: dict[tuple[str, str], str] = {
    ("cli", "__init__"): "shows the version",
    ("plan", "api"): "a plan's methods lead into the rest of the package",
    ("plan", "report"): "a method returns a report",
    ("plan", "timeline"): "a method returns a timeline",
    ("units", "errors"): "what is wrong with a text is said as errors says it",
}
"""Imports that do not point down, each with its reason."""

TORCH = ("workload/capture/", "runtime/", "measure/", "nbody/", "lab/", "integrations/")
"""Where torch and transformers may be imported; everything else plans and simulates without
them."""
HEAVY = ("torch", "transformers")

VAGUE = {"utils", "util", "common", "helpers", "helper", "manager", "handler", "misc", "base"}
MOST_LINES = 500
MOST_MODULES = 20
MOST_ROOM_LINES = 15
"""Lines of the docstring that opens a folder."""

ROOMS: dict[str, tuple[str, ...]] = {
    "cli": ("running", "planning", "gravity", "catalogue"),
    "nbody": ("analysis", "gpu", "processes", "planning", "motion", "initial", "force", "files"),
    "runtime": (
        "islands",
        "elastic",
        "job",
        "step",
        "state",
        "sources",
        "weights",
        "stages",
        "graphs",
        "communication",
        "processes",
    ),
    "sim": ("tasks", "engine"),
    "solve": ("finalists", "search", "programs"),
}
"""Sub-packages of a part, top to bottom. At run time each imports only those below it; modules of the
part's own folder are not ordered."""

MOST_FUNCTION_LINES = 50
MOST_PARAMETERS = 6
KERNELS = {"compiled", "compiled_exactly", "inlined", "_jit"}
"""Decorators of kernels for numba and Triton. How a kernel rounds depends on how it is divided, and
its parameters are arrays and sizes, so its length and its parameters are not limited."""

_API = "keyword-only options of the public interface, which users see in its documentation"
_TORCH = "torch calls it, and determines its parameters"
_ARRAYS = "arrays of one computation, each of which is named where it is called"
_PARTS = "an object that is assembled once from parts that no other function groups"
_PRICED = "a chain, a plan or an architecture with the options of one question about it"
MANY_PARAMETERS = {
    "adapt.controller.__init__": _PARTS,
    "adapt.controller.after_step": _PRICED,
    "adapt.play.play": _PRICED,
    "api.compare": _API,
    "api.export": _API,
    "api.find_plan": _API,
    "api.simulate": _API,
    "choose.islands.find_island_plan": _PRICED,
    "choose.robust.find_robust_plan": _PRICED,
    "nbody.force.gravity.tree_force": _ARRAYS,
    "nbody.gpu.force.__call__": _ARRAYS,
    "nbody.gpu.kernels.sum_tasks": _ARRAYS,
    "nbody.initial.conditions.initial_conditions": _API,
    "nbody.processes.domain.essential_tree": _ARRAYS,
    "report.gantt.gantt": _API,
    "runtime.elastic.snapshot.__init__": _PARTS,
    "runtime.graphs.attention.attend": _TORCH,
    "runtime.graphs.attention.backward": _TORCH,
    "runtime.graphs.attention.math_backward": _TORCH,
    "runtime.islands.membership.__init__": _PARTS,
    "runtime.stages.dropout._attention": _TORCH,
    "runtime.stages.experts._routed": _TORCH,
    "runtime.stages.graph_stage.__init__": _PARTS,
    "runtime.stages.ring.forward": _TORCH,
    "runtime.stages.stage.__init__": _PARTS,
    "runtime.step.executor.__init__": _PARTS,
    "runtime.step.trainer.parallelize": _API,
    "runtime.weights.holding.__init__": _PARTS,
    "sim.constant.pipeline_seconds": _ARRAYS,
    "sim.islands.play_islands": _PRICED,
    "sim.simulate.play": _PRICED,
    "sim.simulate.simulate": _PRICED,
    "solve.finalists.interleave.with_interleaved": _PRICED,
    "solve.finalists.variant.in_place_of": _PRICED,
    "solve.pool_search.__init__": _PARTS,
    "solve.search.menu.__init__": _PARTS,
    "space.enumerate._with_zero": _PRICED,
    "space.price.seconds": _PRICED,
    "workload.capture.decompose.backward": _TORCH,
    "workload.capture.decompose.batch_norm": _TORCH,
    "workload.capture.decompose.batch_norm_backward": _TORCH,
    "workload.capture.forward.capture_forward": _PRICED,
    "workload.load.load_model": _API,
    "workload.transformer.build_chain": _PRICED,
    "workload.capture.rewritten.attention": _TORCH,
}
"""Functions with more than six parameters, each with its reason."""

FILES = sorted(SOURCE.rglob("*.py"))
each_file = pytest.mark.parametrize(
    "file", FILES, ids=lambda file: file.relative_to(SOURCE).as_posix()
)


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imported(file: Path) -> Iterator[str]:
    """Dotted names of every module that a file imports, wherever in the file; the package itself is
    ``__init__``."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            yield from (
                "argosy.__init__" if alias.name == "argosy" else alias.name for alias in node.names
            )
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: write imports in full"
            names = [alias.name if alias.name in PARTS else "__init__" for alias in node.names]
            yield from (
                [f"argosy.{name}" for name in names]
                if node.module == "argosy"
                else [node.module or ""]
            )


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


def imported_at_run_time(file: Path) -> Iterator[str]:
    """Yield the dotted names of imported modules, without those that only annotations need."""
    hidden: set[ast.AST] = set()
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            hidden.update(inner for part in node.body for inner in ast.walk(part))
        if isinstance(node, ast.ImportFrom) and node not in hidden and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@each_file
def test_sub_packages_import_only_those_below(file: Path) -> None:
    here, *inside = file.relative_to(SOURCE).with_suffix("").parts
    rooms = ROOMS.get(here, ())
    if len(inside) < 2 or inside[0] not in rooms:
        return
    for name in imported_at_run_time(file):
        _, _, there = name.partition(f"argosy.{here}.")
        room = there.split(".")[0]
        if room in rooms:
            down = rooms.index(inside[0]) <= rooms.index(room)
            assert down, f"{here}.{inside[0]} imports {name}, which is not below it"


def test_every_sub_package_has_its_place() -> None:
    for part_name, rooms in ROOMS.items():
        folders = {file.parent.name for file in (SOURCE / part_name).glob("*/__init__.py")}
        assert folders == set(rooms), part_name


def test_no_folder_is_crowded() -> None:
    counts = Counter(file.parent for file in FILES)
    assert not [str(folder) for folder, count in counts.items() if count > MOST_MODULES]


def test_every_folder_opens_with_a_short_description() -> None:
    for file in FILES:
        if file.name == "__init__.py" and file.parent != SOURCE:
            opening = ast.get_docstring(tree(file)) or ""
            assert 0 < len(opening.splitlines()) <= MOST_ROOM_LINES, file


def test_public_class_names_are_unique() -> None:
    names = Counter(
        node.name
        for file in FILES
        for node in tree(file).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not {name for name, count in names.items() if count > 1}


@pytest.mark.parametrize("pair", ALLOWED, ids=" imports ".join)
def test_every_allowance_is_used(pair: tuple[str, str]) -> None:
    here, there = pair
    used = {
        name.split(".")[1]
        for file in FILES
        if part(file) == here
        for name in imported(file)
        if "argosy." in name
    }
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


def functions(file: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions of a file that are no kernels."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = {
                ast.unparse(decorator).split(".")[-1] for decorator in node.decorator_list
            }
            if decorators.isdisjoint(KERNELS):
                yield node


def name_of(file: Path, function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return the module and the name of a function."""
    module = file.relative_to(SOURCE).with_suffix("").as_posix().replace("/", ".")
    return f"{module}.{function.name}"


def test_functions_are_short() -> None:
    every = [(file, function) for file in FILES for function in functions(file)]
    long = {
        name_of(file, function)
        for file, function in every
        if (function.end_lineno or 0) - function.lineno + 1 > MOST_FUNCTION_LINES
    }
    assert not long


def test_functions_have_few_parameters() -> None:
    many = set()
    for file in FILES:
        for function in functions(file):
            given = function.args
            names = [arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            if sum(name not in ("self", "cls") for name in names) > MOST_PARAMETERS:
                many.add(name_of(file, function))
    assert many == set(MANY_PARAMETERS)


@each_file
def test_nothing_prints(file: Path) -> None:
    calls = [node for node in ast.walk(tree(file)) if isinstance(node, ast.Call)]
    assert not [
        call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"
    ]


def loaded_by(statement: str) -> set[str]:
    """Top-level packages in a fresh Python after a statement."""
    code = f"{statement}\nimport sys\nsys.stdout.write(' '.join({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return set(done.stdout.split())


def test_importing_argosy_loads_nothing_heavy() -> None:
    assert loaded_by("import argosy").isdisjoint({*HEAVY, "numpy", "pydantic", "scipy"})


def test_planning_and_simulating_load_no_torch() -> None:
    modules = [
        ".".join(("argosy", *file.relative_to(SOURCE).with_suffix("").parts)).removesuffix(
            ".__init__"
        )
        for file in FILES
        if not file.relative_to(SOURCE).as_posix().startswith(TORCH) and file.stem != "__main__"
    ]
    assert loaded_by(f"import {', '.join(modules)}").isdisjoint(HEAVY)


def test_helpers_of_tests_are_imported_by_their_folder() -> None:
    """Only ``tests`` is on the path: ``runtime.rank_pool``, not ``rank_pool``."""
    files = [file for file in TESTS.glob("*/*.py") if file.parent.name != "doors"]
    modules = {file.stem: file.parent.name for file in files}
    pattern = re.compile(rf"^\s*(?:from|import) ({'|'.join(modules)})\b(?=\s)", re.MULTILINE)
    bare = [
        f"{file.parent.name}/{file.name}: import {modules[name]}.{name}"
        for file in files
        for name in pattern.findall(file.read_text(encoding="utf-8"))
    ]
    assert not bare


def test_tests_stand_in_the_folder_of_what_they_test() -> None:
    """This file is about the whole package, so it alone stands outside."""
    assert [file.name for file in TESTS.glob("test_*.py")] == ["test_architecture.py"]
