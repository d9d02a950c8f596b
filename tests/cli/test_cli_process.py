"""What only a process of its own can show: imports, terminals, pipes."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from command_result import PLAN

import argosy

ARGOSY = (sys.executable, "-m", "argosy")


def test_import_is_light() -> None:
    program = (
        "import sys, argosy; heavy = {'numpy', 'pydantic', 'torch', 'typer', 'rich', 'click'};"
        "assert not heavy & {name.partition('.')[0] for name in sys.modules}"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_commands_import_no_torch() -> None:
    program = (
        "import sys; from argosy.cli import main\n"
        f"try: main(['simulate', '{PLAN}', '-q'])\n"
        "except SystemExit: assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


def test_every_public_name_exists() -> None:
    assert all(getattr(argosy, name) is not None for name in argosy.__all__)
    assert set(dir(argosy)) == set(argosy.__all__)
    with pytest.raises(AttributeError, match="no attribute 'sail'"):
        argosy.sail  # noqa: B018


def test_version_is_the_project_s() -> None:
    project = Path(__file__).parents[2] / "pyproject.toml"
    assert tomllib.loads(project.read_text())["project"]["version"] == argosy.__version__


@pytest.mark.parametrize("no_color", [True, False])
def test_colour_on_a_terminal_unless_no_color(no_color: bool) -> None:
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80"}
    environment.pop("NO_COLOR", None)
    if no_color:
        environment["NO_COLOR"] = "1"
    output = on_a_terminal([*ARGOSY, "simulate", PLAN], environment)
    assert b"F forward" in output or not no_color
    assert (b"\x1b" in output) is not no_color


def test_a_reader_that_leaves_early_is_no_error_message() -> None:
    process = subprocess.Popen([*ARGOSY, "devices", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 1


def test_a_terminal_without_unicode_shows_something() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*ARGOSY, "simulate", PLAN, "-q"], env=environment, capture_output=True, check=True)
    assert done.stderr == b""
    assert b"v0.nic" in done.stdout


def on_a_terminal(command: list[str], environment: dict[str, str]) -> bytes:
    """What a command writes to a terminal, stdout and stderr together."""
    controller, terminal = pty.openpty()
    with subprocess.Popen(command, stdout=terminal, stderr=terminal, env=environment) as process:
        os.close(terminal)
        output = b""
        while True:
            try:
                part = os.read(controller, 65536)
            except OSError:  # Linux says so when the other end is closed
                break
            if not part:
                break
            output += part
        assert process.wait() == 0
    os.close(controller)
    return output
