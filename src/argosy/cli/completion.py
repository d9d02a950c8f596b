"""Print the completion scripts of ``argosy completion`` for bash, zsh and fish."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from argosy.cli import COMPLETING
from argosy.cli.options import Json


class Shell(StrEnum):
    """The shells that a completion script can be printed for."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(
    shell: Annotated[Shell, typer.Argument(help="The shell to write it for.", show_default=False)],
    json: Json = False,
) -> None:
    """Print a script for tab completion in bash, zsh or fish.

    A shell that has read the script completes commands, options, and the names of models, clusters,
    plans and profiles.

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
    """Let the command line answer a shell's request for completions."""
    from typer.completion import completion_init  # type: ignore[attr-defined]

    completion_init()
