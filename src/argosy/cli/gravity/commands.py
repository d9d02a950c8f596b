"""Run the commands of ``argosy nbody``: create, evolve, plan and analyse boxes of matter."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from argosy.cli.command import takes_options
from argosy.cli.gravity.plan import plan
from argosy.cli.gravity.run import run
from argosy.cli.names import known_name
from argosy.cli.options import Json, MeshCells, Quiet, Width
from argosy.cli.terminal import (
    check_output,
    needs,
    no_stdout,
    print_json,
    progress,
    stdout_console,
    write_file,
)
from argosy.errors import excluded, impossible

if TYPE_CHECKING:
    from rich.table import Table

    from argosy.nbody.analysis.power import PowerSpectrum
    from argosy.nbody.cosmology import Cosmology
    from argosy.nbody.initial.spectrum_table import SpectrumTable
    from argosy.nbody.particles import Box

nbody_app = typer.Typer(
    help="Gravity in a periodic box, on the same clusters.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

SnapshotFile = Annotated[
    Path, typer.Argument(metavar="SNAPSHOT", help="A GADGET HDF5 file.", show_default=False)
]
Output = Annotated[
    Path, typer.Option("--output", "-o", help="The file to write; none that exists is overwritten.")
]


def needs_extra() -> AbstractContextManager[None]:
    """Name the packages to install if numba, scipy or h5py is missing."""
    return needs("gravity needs more packages", "nbody")


@dataclass(frozen=True, kw_only=True)
class InitialConditionsOptions:
    """The options that ``argosy nbody ic`` takes."""

    output: Output
    box: Annotated[float, typer.Option("--box", help="Side of the box, Mpc/h.")] = 100.0
    per_side: Annotated[int, typer.Option("--per-side", help="Particles per side of the box.")] = 64
    redshift: Annotated[float, typer.Option("--redshift", "-z", help="Where to start.")] = 49.0
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the random field.")] = 1
    order: Annotated[str, typer.Option("--order", help="zeldovich or 2lpt.")] = "2lpt"
    load: Annotated[str, typer.Option("--load", help="What is displaced: grid or glass.")] = "grid"
    matter: Annotated[
        float, typer.Option("--matter", help="Density of matter; the vacuum has the rest.")
    ] = 0.308
    baryons: Annotated[float, typer.Option("--baryons", help="Density of baryons.")] = 0.0482
    hubble: Annotated[float, typer.Option("--hubble", help="h.")] = 0.678
    sigma8: Annotated[
        float | None,
        typer.Option("--sigma8", help="Amplitude in spheres of 8 Mpc/h today; by default 0.83."),
    ] = None
    amplitude: Annotated[
        float | None,
        typer.Option("--as", help="A_s, in place of --sigma8.", metavar="A_S", show_default=False),
    ] = None
    spectrum: Annotated[
        Path | None,
        typer.Option(
            "--spectrum", help="A table of k (h/Mpc) and P ((Mpc/h)^3) today, from CAMB or CLASS."
        ),
    ] = None
    index: Annotated[float, typer.Option("--index", help="Of the primordial spectrum.")] = 0.96
    json: Json = False
    quiet: Quiet = False


@takes_options
def ic(options: InitialConditionsOptions) -> None:
    """Make initial conditions.

    A lattice or a glass, displaced after Eisenstein and Hu's spectrum, or one of --spectrum.

    \b
    Example:
        argosy nbody ic --box 100 --per-side 64 -o ic.hdf5
    """
    _check_new(options.output, "an HDF5 file")
    with needs_extra():
        from argosy.nbody.cosmology import Cosmology
        from argosy.nbody.files.snapshot import write_snapshot
        from argosy.nbody.initial.conditions import Order, ParticleLoad, initial_conditions
    chosen = Order(known_name("--order", options.order, Order))
    unperturbed = ParticleLoad(known_name("--load", options.load, ParticleLoad))
    cosmology = Cosmology(
        matter=options.matter,
        vacuum=1 - options.matter,
        hubble=options.hubble,
        baryons=options.baryons,
        index=options.index,
    )
    cosmology, table = _amplitude(cosmology, options.sigma8, options.amplitude, options.spectrum)
    with progress(f"displacing {options.per_side}^3 particles", quiet=options.quiet):
        created = initial_conditions(
            box=options.box,
            per_side=options.per_side,
            redshift=options.redshift,
            seed=options.seed,
            cosmology=cosmology,
            order=chosen,
            table=table,
            load=unperturbed,
        )
        write_snapshot(options.output, created)
    if options.json:
        print_json(
            "nbody ic",
            {
                "file": str(options.output),
                "particles": options.per_side**3,
                "box": options.box,
                "redshift": options.redshift,
            },
        )
        return
    stdout_console().print(f"{options.output}: {created!r}")


def _amplitude(
    cosmology: Cosmology, sigma8: float | None, amplitude: float | None, file: Path | None
) -> tuple[Cosmology, SpectrumTable | None]:
    """Return the cosmology with its sigma8, and the table, scaled to sigma8 if that was given."""
    from dataclasses import replace

    from argosy.nbody.initial.spectrum import sigma8_of
    from argosy.nbody.initial.spectrum_table import read_spectrum

    if amplitude is not None and (sigma8 is not None or file is not None):
        option = "--sigma8" if sigma8 is not None else "--spectrum"
        raise excluded("--as", option)
    if amplitude is not None:
        return replace(cosmology, sigma8=sigma8_of(cosmology, amplitude)), None
    if file is None:
        return cosmology if sigma8 is None else replace(cosmology, sigma8=sigma8), None
    table = read_spectrum(file)
    scaled = table if sigma8 is None else table.scaled_to(sigma8)
    return replace(cosmology, sigma8=scaled.sigma8), scaled


@dataclass(frozen=True, kw_only=True)
class PowerOptions:
    """The options that ``argosy nbody power`` takes."""

    snapshot: SnapshotFile
    mesh: MeshCells = None
    keep_shot_noise: Annotated[
        bool,
        typer.Option("--keep-shot-noise", help="For a lattice that has hardly moved: it has none."),
    ] = False
    json: Json = False
    width: Width = None
    quiet: Quiet = False


@takes_options
def power(options: PowerOptions) -> None:
    """Measure the power spectrum of a snapshot, beside linear theory.

    \b
    Example:
        argosy nbody power run/snapshot_000.hdf5
    """
    box = _read(options.snapshot)
    from argosy.nbody.analysis.power import power_spectrum
    from argosy.nbody.initial.spectrum import linear_power

    cells = options.mesh or 2 * round(len(box.particles) ** (1 / 3))
    with progress(f"measuring {box!r}", quiet=options.quiet):
        spectrum = power_spectrum(
            box.particles.positions,
            box.size,
            cells,
            subtract_shot_noise=not options.keep_shot_noise,
        )
    known = box.cosmology.sigma8 is not None
    linear = (
        linear_power(box.cosmology, spectrum.k) * box.cosmology.growth(box.expansion) ** 2
        if known
        else None
    )
    if options.json:
        content = {
            "redshift": box.redshift,
            "shot_noise": spectrum.shot_noise,
            "k": spectrum.k.tolist(),
            "power": spectrum.power.tolist(),
            "modes": spectrum.modes.tolist(),
            "linear": None if linear is None else linear.tolist(),
        }
        print_json("nbody power", content)
        return
    stdout_console(options.width).print(_power_table(spectrum, linear))


def _power_table(spectrum: PowerSpectrum, linear: Any) -> Table:
    """Return a measured power spectrum beside the linear one, which may be unknown."""
    from argosy.report.tables import plain_table

    table = plain_table(">k, h/Mpc", ">P, (Mpc/h)^3", ">linear", ">modes")
    lines = (
        ["unknown"] * len(spectrum.k) if linear is None else [f"{value:.4g}" for value in linear]
    )
    for k, value, line, modes in zip(
        spectrum.k, spectrum.power, lines, spectrum.modes, strict=True
    ):
        table.add_row(f"{k:.4f}", f"{value:.4g}", line, f"{modes:.0f}")
    return table


@dataclass(frozen=True, kw_only=True)
class HaloOptions:
    """The options that ``argosy nbody halos`` takes."""

    snapshot: SnapshotFile
    linking: Annotated[float, typer.Option("--linking", help="Length, in mean separations.")] = 0.2
    least: Annotated[
        int, typer.Option("--least", min=1, help="Particles of the smallest halo.")
    ] = 32
    most_shown: Annotated[int, typer.Option("--show", min=0, help="Rows of the table.")] = 20
    json: Json = False
    width: Width = None
    quiet: Quiet = False


@takes_options
def halos(options: HaloOptions) -> None:
    """Find the halos of a snapshot, by friends of friends.

    \b
    Example:
        argosy nbody halos run/snapshot_000.hdf5 --show 5
    """
    from argosy.report.tables import plain_table

    box = _read(options.snapshot)
    from argosy.nbody.analysis.halos import find_halos

    with progress(f"linking {box!r}", quiet=options.quiet):
        groups = find_halos(
            box.particles.positions, box.size, linking=options.linking, least=options.least
        )
    mass = box.cosmology.particle_mass(box.size, len(box.particles))
    if options.json:
        rows = {"sizes": groups.sizes.tolist(), "centres": groups.centres.tolist()}
        print_json("nbody halos", {"redshift": box.redshift, "particle_mass_1e10": mass, **rows})
        return
    console = stdout_console(options.width)
    console.print(
        f"{len(groups)} halos of at least {options.least} particles at z = {box.redshift:.3g}"
    )
    table = plain_table(">particles", ">mass, Msun/h", "centre, Mpc/h")
    for size, centre in list(zip(groups.sizes, groups.centres, strict=True))[: options.most_shown]:
        table.add_row(
            str(size), f"{size * mass * 1e10:.3g}", " ".join(f"{value:8.3f}" for value in centre)
        )
    console.print(table)


SliceAxis = Annotated[
    int, typer.Option("--axis", min=0, max=2, help="Along which to look: 0, 1 or 2.")
]
SliceBegin = Annotated[
    float, typer.Option("--begin", help="Where the slice begins, as a part of the box.")
]
SliceDepth = Annotated[float, typer.Option("--depth", help="How deep it is, as a part of the box.")]


@dataclass(frozen=True, kw_only=True)
class PictureOptions:
    """The options that ``argosy nbody picture`` takes."""

    snapshot: SnapshotFile
    output: Output
    pixels: Annotated[int, typer.Option("--pixels", help="Per side.")] = 1000
    axis: SliceAxis = 2
    begin: SliceBegin = 0.0
    depth: SliceDepth = 0.2
    json: Json = False
    quiet: Quiet = False


@takes_options
def picture(options: PictureOptions) -> None:
    """Draw the density in a slice of a snapshot as a PNG.

    \b
    Example:
        argosy nbody picture run/snapshot_000.hdf5 -o web.png
    """
    _check_new(options.output, "a PNG file")
    box = _read(options.snapshot)
    from argosy.nbody.analysis.picture import Slice, density_picture, png

    with progress(f"drawing {box!r}", quiet=options.quiet):
        part = Slice(axis=options.axis, begin=options.begin, depth=options.depth)
        image = density_picture(box.particles.positions, box.size, pixels=options.pixels, part=part)
        write_file(options.output, png(image))
    if options.json:
        print_json(
            "nbody picture",
            {"file": str(options.output), "pixels": options.pixels, "redshift": box.redshift},
        )
        return
    stdout_console().print(
        f"{options.output}: {options.pixels} x {options.pixels} pixels, z = {box.redshift:.3g}"
    )


@dataclass(frozen=True, kw_only=True)
class MovieOptions:
    """The options that ``argosy nbody movie`` takes."""

    snapshots: Annotated[
        list[Path], typer.Argument(metavar="SNAPSHOT...", help="Of one run.", show_default=False)
    ]
    output: Output
    frames: Annotated[
        int, typer.Option("--frames", help="Those between snapshots are interpolated.")
    ] = 48
    seconds: Annotated[float, typer.Option("--seconds", help="How long it plays.")] = 6.0
    pixels: Annotated[int, typer.Option("--pixels", help="Per side.")] = 400
    axis: SliceAxis = 2
    begin: SliceBegin = 0.0
    depth: SliceDepth = 0.2
    json: Json = False
    quiet: Quiet = False


@takes_options
def movie(options: MovieOptions) -> None:
    """Draw the density in a slice through time as an animated PNG.

    \b
    Example:
        argosy nbody movie run/snapshot_*.hdf5 -o web.png
    """
    _check_new(options.output, "a PNG file")
    boxes = [_read(path) for path in options.snapshots]
    from argosy.nbody.analysis.movie import movie as animated
    from argosy.nbody.analysis.picture import Slice

    with progress(f"drawing {options.frames} frames", quiet=options.quiet):
        part = Slice(axis=options.axis, begin=options.begin, depth=options.depth)
        write_file(
            options.output,
            animated(
                boxes,
                frames=options.frames,
                pixels=options.pixels,
                seconds=options.seconds,
                part=part,
            ),
        )
    if options.json:
        print_json(
            "nbody movie",
            {
                "file": str(options.output),
                "pixels": options.pixels,
                "frames": options.frames,
                "seconds": options.seconds,
            },
        )
        return
    stdout_console().print(
        f"{options.output}: {options.frames} frames of {options.pixels} x {options.pixels} pixels"
    )


def _check_new(output: Path, kind: str) -> None:
    """Raise ``InputError``, before anything is computed, if a file exists or cannot be written."""
    no_stdout(output, kind)
    if output.exists():
        raise impossible(f"write {output}", "a file of this name exists", "another name")
    check_output(output)


def _read(path: Path) -> Box:
    """Read a snapshot."""
    with needs_extra():
        from argosy.nbody.files.snapshot import read_snapshot
    return read_snapshot(path)


for command in (ic, run, plan, power, halos, picture, movie):
    nbody_app.command()(command)
