"""A run as a shell script that is started on every host, and finds out itself which host it is
on."""

from __future__ import annotations

import shlex

from argosy.runtime.job.launch import Launch, commands, short_names
from argosy.runtime.processes.run_spec import RUN, RunSpec, dumps_run_spec


def dry_run(launch: Launch) -> str:
    """The script: the command of this host, by its name or by ``ARGOSY_HOST``; ``run.json``; the
    command started."""
    started = commands(launch)
    lines = ["#!/usr/bin/env bash", "set -euo pipefail"]
    if len(started) == 1:
        ((node, command),) = started
        lines += [comment(", ".join(node.devices)), f"command=({command})"]
    else:
        names = [launch.machine(node).name for node, _ in started]
        shorter = short_names(names)
        lines += [comment("Start this on every host; ARGOSY_HOST stands in for a host's name.")]
        lines += ['host="${ARGOSY_HOST:-$(hostname)}"', 'case "$host" in']
        for name, (node, command) in zip(names, started, strict=True):
            patterns = [name, *shorter.get(name, ()), *([] if "." in name else [f"{name}.*"])]
            described = comment(f"{node.name}: {', '.join(node.devices)}")
            lines += [f"{'|'.join(patterns)})  {described}", f"  command=({command}) ;;"]
        unknown = f"is none of the plan's hosts: {', '.join(names)}"
        lines += [f'*) echo "$host" {shlex.quote(unknown)} >&2; exit 2 ;;', "esac"]
    return "\n".join([*lines, writing(launch.spec), '"${command[@]}"'])


def writing(spec: RunSpec) -> str:
    """The shell commands that write ``run.json``, whole at once, though every host may write it
    into one folder.

    No line of JSON can be the one that ends it. What a run writes is not for other users.
    """
    folder, file = (shlex.quote(str(path)) for path in (spec.folder, spec.folder / RUN))
    draft = f'{file}."$(hostname).$$"'
    return f"umask o=\nmkdir -p {folder}\ncat > {draft} <<'END'\n{dumps_run_spec(spec)}END\nmv -f {draft} {file}"


def comment(text: str) -> str:
    """A line of a script that says something, whatever a file has for names: what follows it is not
    part of it.

    >>> comment("gpt\\nrm -r /")
    '# gpt rm -r /'
    """
    return f"# {' '.join(text.split())}"
