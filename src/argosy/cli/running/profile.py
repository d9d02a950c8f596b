"""Run ``argosy profile``: measure the layers of a user's model, or of a preset."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from argosy.cli.options import Json, OptionalModel, Quiet, no_nan

if TYPE_CHECKING:
    from argosy.dtype import Dtype
    from argosy.workload.profile import Profile, ProfileRow


def profile(
    program: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE.py:build", help="A Python file and its function.", show_default=False
        ),
    ] = None,
    model: OptionalModel = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The profile to write; - is stdout.")
    ] = Path("profile.json"),
    kind: Annotated[
        str | None,
        typer.Option(
            "--kind", help="What the cluster file calls this device; by default its own name."
        ),
    ] = None,
    samples: Annotated[
        str, typer.Option("--samples", help="Sizes of micro-batches, such as 1,2,4,8.")
    ] = "1,2,4,8",
    widths: Annotated[
        str,
        typer.Option(
            "--widths",
            help="With --model: tensor-parallel widths, such as 1,2,4; each slice alone.",
        ),
    ] = "1",
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype", help="fp32, bf16 or fp16 (a program: mixed precision); with --model several."
        ),
    ] = "fp32",
    sequence_length: Annotated[
        int | None,
        typer.Option("--sequence-length", min=1, help="Tokens per sample; the model's own, or 1."),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option("--seconds", min=0.001, help="That each measurement takes.", callback=no_nan),
    ] = 0.3,
    compile_layers: Annotated[
        bool, typer.Option("--compile", help="Measure layers that torch.compile made one graph of.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the rows that the output has already.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure a model's layers on this device.

    A program is measured as it is: the result can be used as --model, because it describes the
    layers, and as --profile for its device kind. A preset or config (--model) is measured by its
    shape, also per tensor-parallel width. The file is written after every measurement; --resume
    continues from it.

    \b
    Example:
        argosy profile train.py:build --samples 1,2,4 -o profile.json
        argosy plan --model profile.json --profile profile.json \\
            --cluster cluster.toml
        argosy profile --model llama-2-7b --widths 1,2,4 \\
            --dtype bf16 --kind H200 -o llama.json
    """
    from argosy.cli.terminal import (
        STDOUT,
        check_output,
        needs,
        no_stdout,
        print_json,
        say_written,
        tell,
        write_file,
    )
    from argosy.errors import bad_input, refused
    from argosy.workload.profile_file import dump_profile, read_profile

    counts, dtypes = _counts("--samples", samples), _dtypes(dtype)
    if (program is None) == (model is None):
        raise refused("argosy profile needs either FILE.py:build or --model")
    if program is not None and len(dtypes) > 1:
        raise bad_input("one of fp32, bf16 and fp16 for a program", dtype, where="--dtype")
    check_output(output, model, (program or "").partition(":")[0], json=json)
    if resume:
        no_stdout(output, "a profile to resume")
    earlier = read_profile(output) if resume and output.exists() else None
    with needs("measuring needs torch", "torch"):
        from argosy.measure.profile import own_kind, profile_program
        from argosy.measure.profile_shape import Shapes, profile_shape

    def report(what: str) -> None:
        """Show what is measured."""
        tell(f"measuring {what}", quiet=quiet)

    def save(measured: Profile, *, is_all: bool = False) -> None:
        """Write the rows measured so far; only the complete profile goes to stdout."""
        if is_all or output != STDOUT:
            write_file(output, dump_profile(measured).encode())

    def known(name: str, tokens: int) -> tuple[ProfileRow, ...]:
        """Return the rows that an earlier measurement has."""
        if earlier is None:
            return ()
        return _same(
            earlier, output, name, kind or own_kind(), tokens, compiled=compile_layers
        ).rows

    if program is not None:
        tokens, stem = sequence_length or 1, Path(program.partition(":")[0]).stem
        measured = profile_program(
            program,
            kind=kind,
            samples=counts,
            dtype=dtypes[0],
            seconds=seconds,
            sequence_length=tokens,
            report=report,
            save=save,
            known=known(stem, tokens),
            is_compiled=compile_layers,
        )
    else:
        from argosy.workload.load import load_architecture, load_model

        assert model is not None
        chain = load_model(model, sequence_length=sequence_length)
        shapes = Shapes(
            samples=tuple(counts),
            widths=tuple(_counts("--widths", widths)),
            dtypes=tuple(dtypes),
            tokens=chain.sequence_length,
        )
        measured = profile_shape(
            chain.name,
            load_architecture(model),
            shapes,
            kind=kind,
            seconds=seconds,
            report=report,
            save=save,
            known=known(chain.name, chain.sequence_length),
            is_compiled=compile_layers,
        )
    save(measured, is_all=True)
    if json:
        content = {"file": str(output), "layers": len(measured.layers), "rows": len(measured.rows)}
        print_json("profile", {**content, "device": measured.device, "measured": measured.measured})
    else:
        of = f"{len(measured.layers)} layers" if measured.layers else measured.model
        say_written(f"wrote {output}: {of} on {measured.device}, {len(measured.rows)} rows", output)


def _same(
    earlier: Profile, output: Path, model: str, device: str, tokens: int, *, compiled: bool
) -> Profile:
    """Return a profile to continue from; raise ``InputError`` if it was measured for something
    else."""
    from argosy.errors import InputError, Problem

    pairs = (
        ("model", earlier.model, model),
        ("device", earlier.device, device),
        ("sequence_length", earlier.sequence_length, tokens),
        ("compiled", earlier.compiled, compiled),
    )
    problems = [
        Problem(
            file=str(output), path=name, found=str(found), expected=f"{wanted}, to go on from it"
        )
        for name, found, wanted in pairs
        if found != wanted
    ]
    if problems:
        raise InputError(problems)
    return earlier


def _counts(option: str, text: str) -> list[int]:
    """Parse whole numbers with commas between them."""
    from argosy.cli.inputs import whole_number
    from argosy.errors import bad_input

    counts = [count for part in text.split(",") if (count := whole_number(part))]
    if len(counts) < len(text.split(",")):
        raise bad_input("whole numbers such as 1,2,4,8", text, where=option)
    return counts


def _dtypes(text: str) -> list[Dtype]:
    """Parse dtypes with commas between them."""
    from argosy.dtype import Dtype
    from argosy.errors import bad_input

    parts = [part.strip() for part in text.split(",")]
    if not set(parts) <= {"fp32", "bf16", "fp16"}:
        raise bad_input("fp32, bf16 or fp16", text, where="--dtype")
    return [Dtype(part) for part in parts]
