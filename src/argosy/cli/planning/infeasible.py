"""Print what would fit if no plan does, each with a command that can be pasted into a shell."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from argosy.cli.terminal import print_json, stdout_console
from argosy.errors import impossible
from argosy.workload.chain import Chain

if TYPE_CHECKING:
    from argosy.explain.infeasible import Infeasibility
    from argosy.explain.remedy import Change

_REPLACED_BY = {"--lora": ("--train",)}
"""Options that mean the same as another one."""


def show_infeasibility(
    why: Infeasibility,
    context: typer.Context,
    *,
    json: bool,
    width: int | None,
    output: Path | None = None,
) -> None:
    """Print the plan that comes closest, and the changes that would help.

    The reason itself is the message of the error.
    """
    from argosy.report.infeasible import change_lines, infeasibility_to_dict, need_table
    from argosy.report.plan import plan_title

    if json:
        print_json("plan", {"infeasible": infeasibility_to_dict(why)})
        return
    console = stdout_console(width, beside=output)
    if why.plan is not None:
        console.print(f"closest: {plan_title(why.plan)}; GiB per device\n")
        console.print(need_table(why))
        console.print()
    for line in change_lines(why, lambda change: pasted_command(context, change)):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def with_optimizer(chain: Chain, **changes: str) -> Chain:
    """Return the chain of a captured program with another optimizer.

    Raises ``InputError`` for other changes, because the program itself decides them.
    """
    if set(changes) != {"optimizer"}:
        names = ", ".join(changes)
        raise impossible(f"change {names}", f"{chain.name} sets it", "editing the program")
    return replace(chain, optimizer=changes["optimizer"])


def pasted_command(context: typer.Context, change: Change) -> str | None:
    """Return the command that plans with a change; None if no option or edit of the cluster file
    does."""
    from argosy.explain.remedy import ChangeKind

    if change.kind is ChangeKind.CARD:
        return _with_other_card(context, change.target, str(change.value))
    return changed_command(context, dict(change.options)) if change.options else None


def changed_command(context: typer.Context, options: dict[str, str]) -> str:
    """Return the current command with its options replaced by these."""
    dropped = {*options, *(replaced for name in options for replaced in _REPLACED_BY.get(name, ()))}
    words = context.command_path.split()
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        named = next((name for name in parameter.opts if name.startswith("--")), "")
        if named not in dropped and value is not None and value != parameter.default:
            words += _words(named, value)
    for name, text in options.items():
        words += [name, text]
    return shlex.join(words)


def _words(name: str, value: Any) -> list[str]:
    """Return an option and its values as words of a command line."""
    if isinstance(value, bool):
        return [name] if value else []
    values = value if isinstance(value, (list, tuple)) else [value]
    return [word for item in values for word in ((name, str(item)) if name else (str(item),))]


def _with_other_card(context: typer.Context, old: str, new: str) -> str | None:
    """Return the command that copies the cluster file with another card and plans for it.

    Returns None for a bundled cluster.
    """
    file = str(context.params.get("cluster") or "")
    text = _text(file) if file.endswith(".toml") else ""
    if old not in text:
        return None
    copy = str(Path(file).with_name(f"{Path(file).stem}-{new}.toml"))
    is_alone = text.count(old) == text.count(f'"{old}"')  # and not a part of another card's name
    edit = shlex.join(["sed", f"s/{old}/{new}/g" if is_alone else f's/"{old}"/"{new}"/g', file])
    return f"{edit} > {shlex.quote(copy)} && {changed_command(context, {'--cluster': copy})}"


def _text(file: str) -> str:
    """Return the content of a file; empty if it cannot be read."""
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError:
        return ""
