"""What only a process of its own can show: imports, terminals, pipes."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from cli.command_result import PLAN

import argosy
from argosy.cli.terminal import write_file

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
    process = subprocess.Popen(
        [*ARGOSY, "devices", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 1


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_a_closed_stream_is_like_an_empty_one(closed: str) -> None:
    done = subprocess.run(
        f'"{sys.executable}" -m argosy devices {closed}',
        shell=True,
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert ("H200" in done.stdout) == ("1>&-" not in closed)


def test_questions_to_nobody_are_one_clear_line(tmp_path: Path) -> None:
    asked = f'"{sys.executable}" -m argosy init 0<&-'
    done = subprocess.run(
        asked, shell=True, check=False, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2
    assert done.stderr.endswith("Try --node and --name in place of answers.\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_output_that_has_no_room_is_one_clear_line(form: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*ARGOSY, "devices", *form], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2
    assert (
        done.stderr
        == 'error: Cannot write the output because the system reports "No space left on device". '
        "Try freeing space, or another disk.\n"
    )


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(tmp_path: Path) -> None:
    """Files of at most two blocks, as if the disk were full: the plan that is there is not lost to
    half of another."""
    kept = tmp_path / "timeline.json"
    kept.write_text("what was there")
    small = f'ulimit -f 2; "{sys.executable}" -m argosy simulate {PLAN} -q -o timeline.json'
    # Notes that a process takes of the lines it ran would meet the same limit.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")
    }
    done = subprocess.run(
        small,
        shell=True,
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 2
    assert done.stderr == (
        'error: Cannot write timeline.json because the system reports "File too large". '
        "Try another file.\n"
    )
    assert kept.read_text() == "what was there"
    assert [path.name for path in tmp_path.iterdir()] == ["timeline.json"]


def test_a_file_is_written_through_a_link_and_keeps_its_mode(tmp_path: Path) -> None:
    kept, link = tmp_path / "kept.json", tmp_path / "link.json"
    kept.write_text("what was there")
    kept.chmod(0o600)
    link.symlink_to(kept)
    write_file(link, b"new")
    assert (
        link.is_symlink() and kept.read_bytes() == b"new" and kept.stat().st_mode & 0o777 == 0o600
    )


def test_a_terminal_without_unicode_shows_something() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [*ARGOSY, "simulate", PLAN, "-q"], env=environment, capture_output=True, check=True
    )
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
