"""A command line that cannot be read is told in one line: which option, what was found, what was
expected."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import typer
from cli.command_result import PLAN, Run
from cli.test_every_command import COMMANDS

from argosy.cli.usage import as_input_error

KINDS = "torchtitan, megatron, deepspeed, flagscale, torch, torchrun, jobset, kubeflow, skypilot, sailor"
CASES = {
    ("simulate", PLAN, "--k", "x"): '--k: found "x", expected a whole number',
    ("simulate", PLAN, "--k=2.5"): "--k: found 2.5, expected a whole number",
    ("plan", "--level", "3"): "--level: found 3, expected a whole number from 1 to 2",
    (
        "plan",
        "--max-width",
        "9" * 30,
    ): f"--max-width: found {'9' * 30}, expected a whole number from 1 to 65,536",
    (
        "nbody",
        "plan",
        "--mesh",
        "9999999",
    ): "--mesh: found 9999999, expected a whole number from 4 to 65,536",
    ("run", "-n0"): "--steps: found 0, expected a whole number of at least 1",
    (
        "calibrate",
        "runs.json",
        "--share",
        "2",
    ): "--share: found 2, expected a number from 0.05 to 0.95",
    (
        "nbody",
        "run",
        "--snapshot",
        "1",
        "--snapshot",
        "y",
    ): '--snapshot: found "y", expected a number',
    ("export", PLAN, "--to", "jax"): f'--to: found "jax", expected one of {KINDS}',
    ("export", PLAN): f"--to: found nothing, expected one of {KINDS}; see argosy export --help",
    ("completion", "tcsh"): 'SHELL: found "tcsh", expected one of bash, zsh, fish',
    (
        "plan",
    ): "--cluster: found nothing, expected a cluster file, or a bundled name; see argosy plan --help",
    ("simulate",): "PLAN: found nothing, expected a plan.json, or the name of a bundled plan; "
    "see argosy simulate --help",
    ("plan", "-c"): "-c: found nothing, expected a value",
    ("models", "--json=yes"): '--json: found "yes", expected no value',
    (
        "plan",
        "--leve",
        "2",
    ): 'argosy plan: found "--leve", expected one of its options; did you mean "--level"?',
    (
        "devices",
        "--frob",
    ): 'argosy devices: found "--frob", expected one of its options; see argosy devices --help',
    ("devices", "A100", "[x]"): 'argosy devices: found "A100 [x]", expected no more arguments; '
    "see argosy devices --help",
    (
        "nbody",
        "picures",
    ): 'argosy nbody: found "picures", expected one of the commands ic, run, plan, power, halos, '
    'picture, movie; did you mean "picture"?',
}


@pytest.mark.parametrize("arguments", CASES, ids=" ".join)
def test_what_was_found_and_what_was_expected(run: Run, arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.err == f"error: {CASES[arguments]}\n"
    assert result.code == 2
    assert result.out == ""


def checked_options() -> Iterator[tuple[str, Any]]:
    """Every command's options that take a number or one of several words."""
    for command, found in COMMANDS.items():
        hints = get_type_hints(getattr(found.callback, "__wrapped__", found.callback))
        for parameter in found.params:
            kinds = {part for kind in get_args(hints.get(parameter.name)) or (hints.get(parameter.name),)
                     for part in (kind, *get_args(kind))}  # fmt: skip
            words = any(isinstance(kind, type) and issubclass(kind, StrEnum) for kind in kinds)
            if parameter.param_type_name == "option" and (words or kinds & {int, float}):
                yield command, parameter


def test_every_option_says_what_it_found() -> None:
    seen = 0
    for command, parameter in checked_options():
        error: Any = typer.BadParameter("no", param=parameter)
        error.ctx = SimpleNamespace(command=COMMANDS[command], command_path=f"argosy {command}")
        option = parameter.opts[0]
        told = str(as_input_error(error, [*command.split(), option, "½ [x]"]))
        assert re.match(
            rf'{option}: found "½ \[x\]", expected (one of |a whole number|a number)', told
        )
        seen += 1
    assert seen > 50


def test_a_group_without_a_command_shows_its_help(run: Run) -> None:
    result = run("nbody")
    assert "Usage: argosy nbody" in result.out + result.err
    assert "error" not in result.out + result.err
