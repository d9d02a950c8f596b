"""Write a run as one shell script that is started on every host and selects the command of that
host."""

from __future__ import annotations

import shlex

from argosy.runtime.job.launch import Launch, commands, short_names
from argosy.runtime.processes.run_spec import RUN, RunSpec, dumps_run_spec


def dry_run(launch: Launch) -> str:
    """Return the script: it selects this host's command by the host name or ``ARGOSY_HOST``, writes
    ``run.json`` and starts the command."""
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
    """Return the shell commands that write ``run.json`` atomically, since every host may write it
    into a shared folder.

    No line of JSON equals the end mark of the here-document. Other users cannot read what a run
    writes.
    """
    folder, file = (shlex.quote(str(path)) for path in (spec.folder, spec.folder / RUN))
    draft = f'{file}."$(hostname).$$"'
    return (
        f"umask o=\nmkdir -p {folder}\ncat > {draft} <<'END'\n"
        f"{dumps_run_spec(spec)}END\nmv -f {draft} {file}"
    )


def comment(text: str) -> str:
    """Return a text as one comment line of a script; line breaks in names become spaces, so that
    nothing after them is executed.

    >>> comment("gpt\\nrm -r /")
    '# gpt rm -r /'
    """
    return f"# {' '.join(text.split())}"
