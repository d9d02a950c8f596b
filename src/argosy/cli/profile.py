"""``argosy profile``: measure the layers of a user's model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from argosy.cli.options import Json, Quiet


def profile(
    program: Annotated[
        str, typer.Argument(metavar="FILE.py:build", help="A Python file and its function.", show_default=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The profile to write.")] = Path("profile.json"),
    kind: Annotated[
        str | None, typer.Option("--kind", help="What the cluster file calls this device; by default its own name.")
    ] = None,
    samples: Annotated[str, typer.Option("--samples", help="Sizes of micro-batches, such as 1,2,4,8.")] = "1,2,4,8",
    dtype: Annotated[str, typer.Option("--dtype", help="fp32, or bf16 or fp16 for mixed precision.")] = "fp32",
    sequence_length: Annotated[int, typer.Option("--sequence-length", min=1, help="Tokens per sample.")] = 1,
    seconds: Annotated[float, typer.Option("--seconds", min=0.001, help="That each measurement takes.")] = 0.3,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure a model's layers on this device.

    The result can be planned with: as --model, because it describes the layers, and as --profile for its device kind.

    \b
    Example:
        argosy profile train.py:build --samples 1,2,4 -o profile.json
        argosy plan --model profile.json --profile profile.json --cluster cluster.toml
    """
    import sys

    from argosy.cli.terminal import print_json, write_file
    from argosy.dtype import Dtype
    from argosy.errors import RunError, bad_input
    from argosy.workload.profile_file import dump_profile

    counts = _counts(samples)
    if dtype not in ("fp32", "bf16", "fp16"):
        raise bad_input("fp32, bf16 or fp16", dtype, where="--dtype")
    try:
        from argosy.runtime.profile import profile_program
    except ModuleNotFoundError as error:
        raise RunError(f"measuring needs torch ({error}); pip install 'argosy[torch]'") from None

    def tell(layer: str, count: int) -> None:
        if not quiet:
            sys.stderr.write(f"measuring {layer} with {count} sample{'' if count == 1 else 's'}\n")

    measured = profile_program(
        program,
        kind=kind,
        samples=counts,
        dtype=Dtype(dtype),
        seconds=seconds,
        sequence_length=sequence_length,
        report=tell,
    )
    write_file(output, dump_profile(measured).encode())
    if json:
        print_json("profile", {"file": str(output), "layers": len(measured.layers), "rows": len(measured.rows)})
    else:
        typer.echo(f"wrote {output}: {len(measured.layers)} layers on {measured.device}, {len(measured.rows)} rows")


def _counts(text: str) -> list[int]:
    from argosy.errors import bad_input

    parts = text.split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise bad_input("whole numbers such as 1,2,4,8", text, where="--samples")
    return [int(part) for part in parts]
