"""``argosy completion``: the tab key in bash, zsh and fish."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from argosy.cli import COMPLETING
from argosy.cli.options import Json


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(
    shell: Annotated[Shell, typer.Argument(help="The shell to write it for.", show_default=False)],
    json: Json = False,
) -> None:
    """Tab completion for bash, zsh or fish.

    Prints what a shell has to read. Commands, options, and names of models, clusters, plans and
    profiles complete.

    \b
    Examples:
        argosy completion bash >> ~/.bashrc
        argosy completion zsh > ~/.zfunc/_argosy
        argosy completion fish > ~/.config/fish/completions/argosy.fish
    """
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    from argosy.cli.terminal import print_json

    script = get_completion_script(prog_name="argosy", complete_var=COMPLETING, shell=shell)
    if json:
        print_json("completion", {"shell": str(shell), "script": script})
    else:
        typer.echo(script)


def listen() -> None:
    """Let the command line answer a shell that asks."""
    from typer.completion import completion_init  # type: ignore[attr-defined]

    completion_init()
