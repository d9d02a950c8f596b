"""Everything that reads a file, as a function of a folder in which valid files lie, one of them
changed.

A reader either returns or raises ``ArgosyError``. What it returns is used as its users use it:
shown, written and read back, checked. ``seeds/TARGET`` holds the valid files; those that are not
text are made here.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from fuzz.fuzz_commands import command_files, folder_files, run_command
from fuzz.fuzz_inputs import Files, mutated
from rich.console import Console

from argosy.calibrate.file import read_measured
from argosy.choose.scenario import moments
from argosy.cli.inputs import with_traces
from argosy.cluster.file import cluster_from_content, load_cluster
from argosy.cluster.imports.found import cluster_text
from argosy.cluster.imports.hosts import HostFacts, read_hostfile, read_topology
from argosy.cluster.imports.kinds import Kinds
from argosy.cluster.imports.node_view import read_nccl, read_nvidia_smi
from argosy.cluster.imports.slurm import read_slurm
from argosy.cluster.probe_notes import read_notes
from argosy.cluster.topology import Cluster
from argosy.cluster.tracefile import read_bamboo, read_columns, read_oboe
from argosy.cost.calibration_file import dumps_calibration, read_calibration
from argosy.document import parse_toml, read_text
from argosy.plan.check import check_plan
from argosy.plan.file import dumps_plan, load_plan, loads_plan
from argosy.report.clusters import change_table, cluster_to_dict, link_table, node_table
from argosy.report.decisions import event_in_a_line, read_decisions, tell_decisions
from argosy.report.gantt import gantt
from argosy.report.kineto import chrome_trace, encode
from argosy.runtime.processes.run_spec import dumps_run_spec, loads_run_spec, read_run_spec
from argosy.timeline.file import dumps_timeline, load_timeline, loads_timeline
from argosy.workload.imports.dapple import read_dapple
from argosy.workload.imports.sailor import read_sailor, read_sailor_bandwidths
from argosy.workload.imports.sailor_runs import read_sailor_measured
from argosy.workload.load import load_architecture, load_model
from argosy.workload.profile_file import dump_profile, parse_profile, read_profile
from benchmarks.cephalo_profiles import read_cephalo

SEEDS = Path(__file__).parent / "seeds"
GIVEN = HostFacts(kinds=Kinds(everywhere="A100-80GB"), per_host=8, intra=300e9, nic=12.5e9)


@dataclass(frozen=True)
class Target:
    """A reader, what it is given at first, and how much of a run's inputs it gets."""

    name: str
    read: Callable[[Path], object]
    files: Callable[[Random], Files]
    """Its files, one of them changed."""
    weight: float = 1.0
    may_crash: bool = False
    """Whether a library in C reads the bytes, so that a process may die of them."""


def changing(valid: Callable[[], Files]) -> Callable[[Random], Files]:
    """A way to draw inputs that are valid but for one file."""
    return lambda random: mutated(random, valid())


def valid_files(name: str) -> Files:
    """What a target reads where nothing is changed."""
    made = {
        "snapshot": snapshot_files,
        "restart": restart_files,
        "weights": weight_files,
        "checkpoint": checkpoint_files,
        "commands": folder_files,
    }
    return made.get(name, stored(name))()


def stored(name: str) -> Callable[[], Files]:
    """The files of ``seeds/NAME``."""
    return cache(lambda: _files_in(SEEDS / name))


def _shown(cluster: Cluster) -> None:
    console = Console(file=io.StringIO(), width=80)
    for table in (node_table(cluster), link_table(cluster), change_table(cluster)):
        console.print(table)
    cluster_to_dict(cluster)


def _cluster(folder: Path) -> None:
    cluster = load_cluster(folder / "cluster.toml")
    assert cluster_from_content(cluster.content).hash == cluster.hash
    moments(cluster, 60.0)
    _shown(cluster)


def _changes(folder: Path) -> None:
    _shown(with_traces(_calm(), [str(folder / "changes.toml")]))


@cache
def _calm() -> Cluster:
    return with_traces(load_cluster(SEEDS / "cluster" / "cluster.toml"), ["none"])


def _model(file: str) -> Callable[[Path], object]:
    def read(folder: Path) -> None:
        chain = load_model(folder / file)
        load_architecture(folder / file)
        repr(chain)

    return read


def _profile(folder: Path) -> None:
    profile = read_profile(folder / "profile.json")
    assert parse_profile(dump_profile(profile), file="again") == profile
    profile.chain(optimizer="adamw")
    profile.forward_seconds("one", 2, 1)


def _plan(folder: Path) -> None:
    plan = load_plan(folder / "plan.json")
    assert loads_plan(dumps_plan(plan)) == plan
    ref = plan.model
    chain = load_model(
        ref.name, sequence_length=ref.sequence_length, dtype=ref.dtype, optimizer=ref.optimizer
    )
    check_plan(plan, chain, cluster_from_content(plan.cluster.content))


def _timeline(folder: Path) -> None:
    timeline = load_timeline(folder / "timeline.json")
    assert loads_timeline(dumps_timeline(timeline)) == timeline
    timeline.peak_memory()
    gantt(timeline, width=80, transfers=True)
    encode(chrome_trace(timeline))


def _decisions(folder: Path) -> None:
    events = read_decisions(folder / "decisions.jsonl")
    tell_decisions(events)
    for event in events:
        event_in_a_line(event)


def _calibration(folder: Path) -> None:
    dumps_calibration(read_calibration(folder / "calibration.json"))


def _run(folder: Path) -> None:
    spec = read_run_spec(folder / "run.json")
    assert loads_run_spec(dumps_run_spec(spec)) == spec


def _imported(folder: Path) -> None:
    """Whatever lies in the folder, by its name, through to the cluster that the importer writes."""
    (path,) = folder.iterdir()
    text = read_text(path)
    switches = None
    match folder.name:
        case "hostfile":
            nodes = read_hostfile(text, path.name, GIVEN)
        case "slurm":
            nodes = read_slurm(text, path.name, GIVEN)
        case "topology":
            nodes, switches = read_topology(text, path.name, GIVEN, 5e9)
        case "nccl":
            nodes = [read_nccl(text, path.name, host="h", kind=None)]
        case _:
            nodes = [read_nvidia_smi(text, path.name, host="h", kind=None, nic=1e9)]
    written = cluster_text("x", nodes, switches or (), source=path.name)
    from argosy.cluster.file import build_cluster

    build_cluster(parse_toml(written, file="written"), folder=folder)


def _notes(folder: Path) -> None:
    path = folder / "probe.partial.json"
    read_notes(read_text(path), path).text()


def _snapshot(folder: Path) -> None:
    from argosy.nbody.files.snapshot import num_particles, read_snapshot

    num_particles(folder / "box.hdf5")
    box = read_snapshot(folder / "box.hdf5")
    assert len(box.particles.positions) == len(box.particles.momenta) == len(box.particles.ids)


def _restart(folder: Path) -> None:
    from argosy.nbody.files.restart import read_restart

    for rank in range(2):
        read_restart(folder, rank, 2)


def _gravity(folder: Path) -> None:
    from argosy.document import read_json
    from argosy.nbody.planning.plan_file import gravity_plan_from_document

    gravity_plan_from_document(read_json(folder / "plan.json"))


def _checkpoint(folder: Path) -> None:
    """As it is, and with a manifest that fits what was changed, as whoever prepares a checkpoint
    would write it."""
    from argosy.errors import InputError
    from argosy.runtime.processes.manifest import MANIFEST, facts_of, write_manifest
    from argosy.runtime.state.checkpoint import read_state_dict

    try:
        read_state_dict(folder)
    except InputError:
        files = [path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST]
        about = {"steps": 3, "scale": 1.0, "aliases": {"weight": ["head.weight"]}}
        write_manifest(folder, about, {path.name: facts_of(path) for path in files})
        read_state_dict(folder)


def _weights(folder: Path) -> None:
    from argosy.runtime.state.reading import read_weights

    read_weights(folder / "weights.pt")


@cache
def weight_files() -> Files:
    """A state dict."""
    import torch

    stream = io.BytesIO()
    torch.save({"weight": torch.ones(3, 2), "bias": torch.zeros(3)}, stream)
    return {"weights.pt": stream.getvalue()}


@cache
def snapshot_files() -> Files:
    """A box of 27 particles."""
    import numpy as np

    from argosy.nbody.cosmology import Cosmology
    from argosy.nbody.files.snapshot import write_snapshot
    from argosy.nbody.particles import Box, Particles

    grid = np.stack(np.meshgrid(*[np.arange(3.0)] * 3), axis=-1).reshape(-1, 3)
    particles = Particles(positions=grid, momenta=grid / 100, ids=np.arange(27))
    with TemporaryDirectory() as folder:
        write_snapshot(
            Path(folder) / "box.hdf5",
            Box(size=3.0, expansion=0.5, cosmology=Cosmology(), particles=particles),
        )
        return _files_in(Path(folder))


@cache
def restart_files() -> Files:
    """What two processes left behind."""
    import numpy as np

    from argosy.nbody.files.restart import write_restart
    from argosy.nbody.particles import Particles

    with TemporaryDirectory() as folder:
        for rank in (1, 0):
            particles = Particles(
                positions=np.ones((4, 3)), momenta=np.ones((4, 3)), ids=np.arange(4) + 4 * rank
            )
            write_restart(
                Path(folder), particles, step=3, rank=rank, processes=2, wait_for_all=lambda: None
            )
        return _files_in(Path(folder))


@cache
def checkpoint_files() -> Files:
    """A checkpoint of a small layer, in the form that ``runtime.state.checkpoint`` writes."""
    import warnings

    import torch
    from torch.distributed.checkpoint.state_dict_saver import save

    from argosy.runtime.processes.manifest import facts_of, write_manifest

    state = {
        "model.weight": torch.ones(3, 2),
        "model.bias": torch.zeros(3),
        "optimizer.weight.step": torch.tensor(3.0),
    }
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, checkpoint_id=folder, no_dist=True)
        about = {"steps": 3, "scale": 1.0, "aliases": {"weight": ["head.weight"]}}
        write_manifest(
            Path(folder), about, {path.name: facts_of(path) for path in Path(folder).iterdir()}
        )
        return _files_in(Path(folder))


def _files_in(folder: Path) -> Files:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


_READERS: dict[str, Callable[[Path], object]] = {
    "cluster": _cluster,
    "changes": _changes,
    "trace": lambda folder: read_columns(folder / "trace.csv").traces(bandwidth=1e9, latency=1e-3),
    "speed": lambda folder: read_columns(folder / "trace.csv").traces(),
    "oboe": lambda folder: read_oboe(folder / "oboe.txt"),
    "bamboo": lambda folder: read_bamboo(folder / "bamboo.csv"),
    "preset": _model("model.toml"),
    "llama": _model("config.json"),
    "mixtral": _model("config.json"),
    "t5": _model("config.json"),
    "vit": _model("config.json"),
    "bert": _model("config.json"),
    "profile": _profile,
    "plan": _plan,
    "timeline": _timeline,
    "decisions": _decisions,
    "calibration": _calibration,
    "run": _run,
    "runs": lambda folder: read_measured(folder / "runs.json"),
    "vtrain": lambda folder: read_measured(folder / "vtrain.csv"),
    "hostfile": _imported,
    "slurm": _imported,
    "topology": _imported,
    "nccl": _imported,
    "smi": _imported,
    "sailor": lambda folder: (read_sailor(folder, "toy"), read_sailor_bandwidths(folder)),
    "sailor-run": lambda folder: read_sailor_measured(folder / "run.json"),
    "cephalo": lambda folder: read_cephalo(folder, "toy"),
    "dapple": lambda folder: read_dapple(folder / "toy-4-pbs-2.txt"),
    "probe-notes": _notes,
    "gravity-plan": _gravity,
}

_WEIGHTS = dict.fromkeys(
    ("trace", "speed", "oboe", "bamboo", "dapple", "probe-notes", "hostfile", "slurm", "smi"), 4.0
)
_WEIGHTS |= dict.fromkeys(
    ("preset", "llama", "bert", "profile", "plan", "runs", "gravity-plan"), 0.4
)
"""So that all get about as much processor time; 1 where nothing is said."""

TARGETS = (
    *(
        Target(name, read, changing(stored(name)), weight=_WEIGHTS.get(name, 1.0))
        for name, read in _READERS.items()
    ),
    Target("snapshot", _snapshot, changing(snapshot_files), weight=0.4, may_crash=True),
    Target("restart", _restart, changing(restart_files), weight=0.4, may_crash=True),
    Target("commands", run_command, command_files, weight=0.2),
    Target("weights", _weights, changing(weight_files), weight=0.2, may_crash=True),
    Target("checkpoint", _checkpoint, changing(checkpoint_files), weight=0.1, may_crash=True),
)
BY_NAME = {target.name: target for target in TARGETS}
