"""A command line that cannot be read is reported in one line, which names the option and the help."""

from __future__ import annotations

import pytest
from cli.command_result import PLAN, Run

CASES = {
    ("simulate", PLAN, "--k", "x"): ("--k", "argosy simulate"),
    ("plan", "--level", "3"): ("--level", "argosy plan"),
    ("run", "-n0"): ("--steps", "argosy run"),
    ("nbody", "run", "--snapshot", "1", "--snapshot", "y"): ("--snapshot", "argosy nbody run"),
    ("export", PLAN, "--to", "jax"): ("jax", "argosy export"),
    ("export", PLAN): ("--to", "argosy export"),
    ("completion", "tcsh"): ("tcsh", "argosy completion"),
    ("plan",): ("--cluster", "argosy plan"),
    ("simulate",): ("PLAN", "argosy simulate"),
    ("plan", "-c"): ("-c", "argosy"),
    ("models", "--json=yes"): ("--json", "argosy"),
    ("plan", "--leve", "2"): ("--level", "argosy plan"),
    ("devices", "--frob"): ("--frob", "argosy devices"),
    ("devices", "A100", "[x]"): ("A100 [x]", "argosy devices"),
    ("nbody", "picures"): ("picture", "argosy nbody"),
}


@pytest.mark.parametrize("arguments", CASES, ids=" ".join)
def test_one_line_names_the_option_and_the_help(run: Run, arguments: tuple[str, ...]) -> None:
    named, command = CASES[arguments]
    result = run(*arguments)
    assert result.err.startswith("error: ")
    assert result.err.endswith(f"; see {command} --help\n")
    assert named in result.err
    assert result.err.count("\n") == 1
    assert result.code == 2
    assert result.out == ""


def test_a_group_without_a_command_shows_its_help(run: Run) -> None:
    result = run("nbody")
    assert "Usage: argosy nbody" in result.out + result.err
    assert "error" not in result.out + result.err
