"""``argosy probe``: what this machine, a lab or a cluster really has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from argosy.cli.options import Quiet


def probe(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The cluster file to write.")] = None,
    name: Annotated[str, typer.Option("--name", help="What the cluster is called in the file.")] = "probed",
    lab: Annotated[str | None, typer.Option("--lab", help="Measure the devices and links of a lab that is up.")] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0.01, help="That each measurement takes, roughly.")] = 0.3,
    quiet: Quiet = False,
) -> None:
    """Measure devices and links, and write them as a cluster file.

    By itself it measures this machine's device; under torchrun, every rank's device and every link between ranks.

    \b
    Example:
        argosy probe -o cluster.toml
        torchrun --nnodes 4 ... -m argosy probe -o cluster.toml
    """
    from argosy.cli.terminal import progress, write_file

    with progress("measuring devices and links", quiet=quiet):
        text = _in_lab(lab, name, seconds) if lab is not None else _here(name, seconds)
    if text is None:  # another rank writes the file
        return
    if output is None:
        typer.echo(text, nl=False)
    else:
        write_file(output, text.encode())
        typer.echo(f"wrote {output}")


def _here(name: str, seconds: float) -> str | None:
    try:
        from argosy.runtime.probe_worker import measure
    except ModuleNotFoundError as error:
        from argosy.errors import RunError

        raise RunError(f"measuring needs torch ({error}); pip install 'argosy[torch]'") from None
    return measure(name, seconds=seconds)


def _in_lab(lab: str, name: str, seconds: float) -> str:
    import sys
    import tempfile

    from argosy.lab.lab import open_lab

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.toml"
        worker = [sys.executable, "-m", "argosy.runtime.probe_worker", name, str(seconds), str(path)]
        open_lab(lab).run(worker, timeout=600)
        return path.read_text(encoding="utf-8")
