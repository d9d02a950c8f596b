"""Files are data: nothing in the source runs what a file says, but where the user names a program.

Every way in which Python runs a string or bytes is looked for in the source; the few places that
have one say why.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from argosy.cli import main

SOURCE = Path(__file__).parents[2] / "src" / "argosy"
RUNS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "import_module",
    "exec_module",
    "run_path",
    "run_module",
    "Unpickler",
    "mktemp",
}
"""Calls and base classes by their last name, whatever they are reached through."""
MODULES = {
    "marshal",
    "shelve",
    "joblib",
    "dill",
    "cloudpickle",
    "yaml",
    "runpy",
    "telnetlib",
    "code",
}
PAIRS = {
    ("pickle", "load"),
    ("pickle", "loads"),
    ("os", "system"),
    ("os", "popen"),
    ("dist", "all_gather_object"),
    ("dist", "gather_object"),
    ("dist", "broadcast_object_list"),
    ("dist", "scatter_object_list"),
    ("dist", "send_object_list"),
    ("dist", "recv_object_list"),
}

ALLOWED = {
    ("__init__.py", "import_module"): "names of our own modules, from a table in that file",
    (
        "runtime/job/program.py",
        "exec_module",
    ): "the program that the user names on the command line",
    (
        "runtime/state/reading.py",
        "Unpickler",
    ): "a subclass that builds torch's checkpoint records and nothing else",
    ("adapt/advisor.py", "pickle.load"): "from a process that this one started, over its pipe",
}


def name_of(node: ast.expr) -> str:
    """``a.b.c`` of what is called or derived from."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([*([node.id] if isinstance(node, ast.Name) else []), *reversed(parts)])


def dangers(file: Path) -> Iterator[tuple[str, int]]:
    """What in a file could run a file's content, and on which line."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
            )
            yield from (
                (module, node.lineno) for module in modules if module.split(".")[0] in MODULES
            )
        bases = (
            node.bases
            if isinstance(node, ast.ClassDef)
            else [node.func]
            if isinstance(node, ast.Call)
            else []
        )
        for name in map(name_of, bases):
            first, _, last = name.rpartition(".")
            if last in RUNS and not (last == "compile" and first in ("re", "torch")):
                yield last, node.lineno
            if (first.rpartition(".")[2], last) in PAIRS:
                yield name, node.lineno
        if isinstance(node, ast.Call):
            options = {keyword.arg: keyword.value for keyword in node.keywords}
            yield from _options(name_of(node.func), options, node.lineno)


def _options(
    name: str, options: dict[str | None, ast.expr], line: int
) -> Iterator[tuple[str, int]]:
    def is_true(option: str) -> bool:
        value = options.get(option)
        return isinstance(value, ast.Constant) and value.value is True

    if name in ("torch.load", "torch.jit.load") and not is_true("weights_only"):
        yield f"{name} without weights_only", line
    if is_true("shell") or name.startswith(("subprocess.getoutput", "subprocess.getstatusoutput")):
        yield "a shell", line
    if "allow_pickle" in options:
        yield "allow_pickle", line


def test_nothing_runs_what_a_file_says() -> None:
    found = {
        (file.relative_to(SOURCE).as_posix(), what): line
        for file in sorted(SOURCE.rglob("*.py"))
        for what, line in dangers(file)
    }
    assert set(found) == set(ALLOWED), {
        place: line for place, line in found.items() if place not in ALLOWED
    }


@pytest.mark.parametrize(
    "text",
    [
        "eval(x)",
        "builtins.exec(x)",
        "import yaml",
        "from dill import load",
        "pickle.loads(x)",
        "class U(pickle.Unpickler): pass",
        "torch.load(x)",
        "torch.load(x, weights_only=False)",
        "np.load(x, allow_pickle=True)",
        "subprocess.run(x, shell=True)",
        "os.system(x)",
        "dist.all_gather_object(a, b)",
    ],
)
def test_each_danger_would_be_seen(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(text)
    assert list(dangers(tmp_path / "x.py"))


def test_planning_simulating_and_reporting_open_no_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr("socket.socket.__init__", refuse)
    monkeypatch.chdir(tmp_path)
    for words in (
        (
            "plan",
            "-m",
            "gpt2",
            "-c",
            "two-cards",
            "-b",
            "8",
            "--dtype",
            "fp16",
            "-q",
            "-o",
            "plan.json",
        ),
        ("simulate", "plan.json", "-q"),
        ("report", "plan.json", "-q", "-o", "page.html"),
        ("explain", "plan.json", "-q"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 0, capsys.readouterr().err


def test_figures_of_a_run_are_served_on_loopback_alone() -> None:
    from argosy.runtime.job.metrics import Metrics, serve

    server = serve(Metrics(), 0)
    try:
        assert server.server_address[0] == "127.0.0.1"
    finally:
        server.shutdown()
        server.server_close()
