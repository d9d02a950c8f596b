"""Run ``argosy profile``: measure the layers of a user's model, or of a preset."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from argosy.cli.command import takes_options
from argosy.cli.inputs import whole_number
from argosy.cli.options import Json, OptionalModel, Quiet, no_nan
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
from argosy.dtype import Dtype
from argosy.errors import Problem, bad_input, raise_any, refused
from argosy.workload.load import load_architecture, load_model
from argosy.workload.profile import Profile
from argosy.workload.profile_file import dump_profile, read_profile


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """The options that ``argosy profile`` takes."""

    program: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE.py:build", help="A Python file and its function.", show_default=False
        ),
    ] = None
    model: OptionalModel = None
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The profile to write; - is stdout.")
    ] = Path("profile.json")
    kind: Annotated[
        str | None,
        typer.Option(
            "--kind", help="What the cluster file calls this device; by default its own name."
        ),
    ] = None
    samples: Annotated[
        str, typer.Option("--samples", help="Sizes of micro-batches, such as 1,2,4,8.")
    ] = "1,2,4,8"
    widths: Annotated[
        str,
        typer.Option(
            "--widths",
            help="With --model: tensor-parallel widths, such as 1,2,4; each slice alone.",
        ),
    ] = "1"
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype", help="fp32, bf16 or fp16 (a program: mixed precision); with --model several."
        ),
    ] = "fp32"
    sequence_length: Annotated[
        int | None,
        typer.Option("--sequence-length", min=1, help="Tokens per sample; the model's own, or 1."),
    ] = None
    seconds: Annotated[
        float,
        typer.Option("--seconds", min=0.001, help="That each measurement takes.", callback=no_nan),
    ] = 0.3
    compile_layers: Annotated[
        bool, typer.Option("--compile", help="Measure layers that torch.compile made one graph of.")
    ] = False
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the rows that the output has already.")
    ] = False
    json: Json = False
    quiet: Quiet = False


@takes_options
def profile(options: ProfileOptions) -> None:
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
    counts, dtypes = _counts("--samples", options.samples), _dtypes(options.dtype)
    if (options.program is None) == (options.model is None):
        raise refused("argosy profile needs either FILE.py:build or --model")
    if options.program is not None and len(dtypes) > 1:
        raise bad_input("one of fp32, bf16 and fp16 for a program", options.dtype, "--dtype")
    check_output(
        options.output, options.model, (options.program or "").partition(":")[0], json=options.json
    )
    if options.resume:
        no_stdout(options.output, "a profile to resume")

    def save(measured: Profile) -> None:
        """Write the rows measured so far; only the complete profile goes to stdout."""
        if options.output != STDOUT:
            write_file(options.output, dump_profile(measured).encode())

    measured = _measured(options, counts, dtypes, save)
    write_file(options.output, dump_profile(measured).encode())
    _conclude(measured, options)


def _measured(
    options: ProfileOptions, counts: list[int], dtypes: list[Dtype], save: Callable[[Profile], None]
) -> Profile:
    """Measure the program or the model; continue from the output file with ``--resume``."""
    earlier = read_profile(options.output) if options.resume and options.output.exists() else None
    with needs("measuring needs torch", "torch"):
        from argosy.measure.profile import ProfileSettings, own_kind, profile_program
        from argosy.measure.profile_shape import Shapes, profile_shape

    def settings(name: str, tokens: int) -> ProfileSettings:
        """Return the settings of a measurement of ``tokens`` per sample."""
        kind = options.kind or own_kind()
        if earlier is not None:
            _check_same(earlier, name, kind, tokens, options)
        return ProfileSettings(
            name=name,
            kind=kind,
            samples=counts,
            dtype=dtypes[0],
            seconds=options.seconds,
            sequence_length=tokens,
            known=() if earlier is None else earlier.rows,
            is_compiled=options.compile_layers,
            report=lambda text: tell(f"measuring {text}", quiet=options.quiet),
            save=save,
        )

    if options.program is not None:
        name = Path(options.program.partition(":")[0]).stem
        return profile_program(options.program, settings(name, options.sequence_length or 1))

    assert options.model is not None
    chain = load_model(options.model, sequence_length=options.sequence_length)
    shapes = Shapes(
        samples=tuple(counts),
        widths=tuple(_counts("--widths", options.widths)),
        dtypes=tuple(dtypes),
        tokens=chain.sequence_length,
    )
    architecture = load_architecture(options.model)
    return profile_shape(architecture, shapes, settings(chain.name, chain.sequence_length))


def _conclude(measured: Profile, options: ProfileOptions) -> None:
    """Print which file was written."""
    if options.json:
        content = {
            "file": str(options.output),
            "layers": len(measured.layers),
            "rows": len(measured.rows),
        }
        print_json("profile", {**content, "device": measured.device, "measured": measured.measured})
        return
    of = f"{len(measured.layers)} layers" if measured.layers else measured.model
    text = f"wrote {options.output}: {of} on {measured.device}, {len(measured.rows)} rows"
    say_written(text, options.output)


def _check_same(
    earlier: Profile, model: str, device: str, tokens: int, options: ProfileOptions
) -> None:
    """Raise ``InputError`` if a profile to continue from was measured for something else."""
    pairs = (
        ("model", earlier.model, model),
        ("device", earlier.device, device),
        ("sequence_length", earlier.sequence_length, tokens),
        ("compiled", earlier.compiled, options.compile_layers),
    )
    problems = [
        Problem(name, str(value), f"{wanted}, to go on from it", file=str(options.output))
        for name, value, wanted in pairs
        if value != wanted
    ]
    raise_any(problems)


def _counts(option: str, text: str) -> list[int]:
    """Parse whole numbers with commas between them."""
    counts = [count for part in text.split(",") if (count := whole_number(part))]
    if len(counts) < len(text.split(",")):
        raise bad_input("whole numbers such as 1,2,4,8", text, option)
    return counts


def _dtypes(text: str) -> list[Dtype]:
    """Parse dtypes with commas between them."""
    parts = [part.strip() for part in text.split(",")]
    if not set(parts) <= {"fp32", "bf16", "fp16"}:
        raise bad_input("fp32, bf16 or fp16", text, "--dtype")
    return [Dtype(part) for part in parts]
