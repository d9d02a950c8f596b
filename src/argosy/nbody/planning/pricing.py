"""Price one force of a box on devices of a cluster, before anything runs there.

For a device with fp32 peak P, memory bandwidth H and efficiency e, a run of the curve with n
particles that take w interactions, p of N^3 mesh cells' planes, a box of N_p particles and cut-off
r_c:

    (1)  pairs = w x g x 40 FLOP / (a e P)    a of the peak is reached, g times w pairs are computed
    (2)  tree  = (s + n x t + halo x h) / e   sort, build, walk; s for launches and messages
    (3)  mesh  = p N^2 x c + n p / N x q      transforms; deposit and three interpolations
    (4)  halo  = min(N_p - n, N_p [(v^(1/3) + 2 r_c)^3 - v]) x 40 B,   v = n / N_p, r_c in boxes:
         what is fetched
    (5)  turn = 3 times 8 B for half the cells of the slab, all but the own part: what holders of
         the mesh exchange
    (6)  to and from the mesh: 24 B a particle, each way
    (7)  memory = n x 400 B + halo x 100 B + p N^2 x 48 B
    (8)  every byte of (4), (5) and (6) takes b seconds of the processor that sends it and of the
         one that receives it, beside the time of the link.

The constants differ between CPUs and GPUs. A CPU's mesh has a part that is limited by arithmetic,
so c and q are FLOP over P and seconds; a GPU's is limited by memory, so they are bytes over H. The
figures are those of ``benchmarks/results/2026-11-16-gravity.md`` and ``2026-11-18-gravity.md``.
What computes a phase depends on the company that a device has (``Company``):

- A device alone computes the whole force, without (4), (5), (6) and (8).
- GPUs among themselves compute tree, pairs and mesh one after the other, and exchange through their
  hosts, which sort the particles that change rank.
- A GPU beside CPUs sums pairs only. One core of its host grows and walks the tree, and another one
  computes its part of the mesh at the same time.
- A CPU beside others shares its core between tree, pairs and mesh.

Interactions along the curve
follow the clustering of matter: they are drawn from a log-normal density with a seed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from argosy.cluster.device import Device, DeviceKind
from argosy.dtype import Dtype
from argosy.errors import bad_input
from argosy.nbody.force.settings import DEFAULT
from argosy.nbody.particles import Floats

# FLOP of a pair (1).
PAIR_FLOP = 40.0
# Bytes per particle: position, momentum, force and share of the tree, including the copies that
# exist while particles move (7).
PARTICLE_BYTES = 400.0
# Bytes of memory per halo particle (7).
GHOST_BYTES = 100.0
# Bytes of memory per mesh cell (7).
CELL_BYTES = 48.0
# Bytes of the key, the id and the position of a particle that is fetched (4).
SENT_BYTES = 40.0
# Bytes of the position, momentum and id of a particle that changes rank.
STATE_BYTES = 56.0
# Bytes of a position or force (6).
POINT_BYTES = 24.0
# Bytes of a mode (5).
MODE_BYTES = 8.0

# Interactions per particle, with the leaves of a CPU and the default force error.
_INTERACTIONS = 990.0
# The standard deviation of the logarithm of the interactions per particle, over runs of the curve.
_SPREAD = 1.0
# The largest number of items of a box.
_ITEMS = 4096


@dataclass(frozen=True, kw_only=True)
class ProcessorRates:
    """The rates that the code reaches on a kind of processor."""

    peak_share: float
    """The share a of the peak that (1) reaches."""
    larger_leaves: float
    """The factor g of pairs in (1)."""
    tree_seconds: float
    """Seconds t per particle in (2)."""
    start_seconds: float
    """Seconds s in (2): launches of a GPU, messages between processes."""
    halo_seconds: float
    """Seconds h per fetched particle in (2)."""
    byte_seconds: float
    """Seconds b per byte in (8)."""
    cell_cost: float
    """The cost c of a mesh cell in (3): FLOP at the peak of a CPU, bytes of a GPU."""
    point_cost: float
    """The cost q of a particle on the mesh in (3), in the same units as ``cell_cost``."""
    cell_seconds: float = 0.0
    """The part of c that does not depend on the peak."""
    point_seconds: float = 0.0
    """The part of q that does not depend on the peak."""


class Company(StrEnum):
    """The devices among which a device computes its part of a force."""

    ALONE = "alone"
    GPUS = "gpus"
    MIXED = "mixed"


# Measured rates of a core alone and among others, of a GPU alone and among GPUs, and of a GPU among
# CPUs, whose tree and mesh are computed on two cores of its host.
CPU = ProcessorRates(
    peak_share=0.32,
    larger_leaves=1.0,
    tree_seconds=3.5e-7,
    start_seconds=0.0,
    halo_seconds=2.5e-7,
    byte_seconds=9e-10,
    cell_cost=2700.0,
    point_cost=23_000.0,
    cell_seconds=1.2e-8,
    point_seconds=1.2e-7,
)
CPU_AMONG_OTHERS = replace(CPU, start_seconds=5e-3)
GPU = ProcessorRates(
    peak_share=0.25,
    larger_leaves=2.83,
    tree_seconds=1.3e-8,
    start_seconds=0.058,
    halo_seconds=1.4e-8,
    byte_seconds=0.0,
    cell_cost=900.0,
    point_cost=0.0,
)
GPU_AMONG_GPUS = replace(GPU, tree_seconds=3.3e-7, byte_seconds=1.7e-9)
HOSTED_GPU = replace(
    GPU,
    tree_seconds=1.5e-6,
    start_seconds=0.0,
    halo_seconds=4e-7,
    byte_seconds=1e-9,
    cell_cost=0.0,
    cell_seconds=6.9e-8,
    point_seconds=4.5e-7,
)
_CPU_NAMES = re.compile(
    r"cpu|core|xeon|epyc|ryzen|threadripper|grace|graviton|altra|ampere-?one|power\d+",
    re.IGNORECASE,
)
"""Names of CPU kinds; a cluster file has no other information about what a device is."""


def is_cpu(kind: DeviceKind) -> bool:
    """Return whether a kind is a CPU, recognised by its name."""
    return _CPU_NAMES.search(kind.name) is not None


def company_of(devices: Sequence[Device]) -> Company:
    """Return the company that devices which share a box are to each other."""
    if len(devices) == 1:
        return Company.ALONE
    return Company.MIXED if any(is_cpu(device.kind) for device in devices) else Company.GPUS


def processor_rates(kind: DeviceKind, company: Company) -> ProcessorRates:
    """Return the measured rates of what computes the force of a device."""
    if is_cpu(kind):
        return CPU if company is Company.ALONE else CPU_AMONG_OTHERS
    return {
        Company.ALONE: GPU,
        Company.GPUS: GPU_AMONG_GPUS,
        Company.MIXED: HOSTED_GPU,
    }[company]


@dataclass(frozen=True, kw_only=True)
class BoxWork:
    """A box that is divided along its curve into items of equal particle count."""

    particles: int
    mesh_cells: int
    """Mesh cells per side."""
    cutoff: float
    """The cut-off r_c as a share of the box."""
    interactions: Floats
    """Interactions per item."""

    @property
    def per_item(self) -> float:
        """Return the particles per item."""
        return self.particles / len(self.interactions)


def typical_box(particles: int, *, mesh_cells: int | None = None, seed: int = 1) -> BoxWork:
    """Return a clustered box; by default its mesh has twice as many cells per side as particles."""
    if particles < 1000:
        raise bad_input("at least 1000 particles", particles, "particles")
    cells = mesh_cells or 2 * round(particles ** (1 / 3))
    items = min(_ITEMS, particles // 16)
    noise = np.random.default_rng(seed).standard_normal(items)
    # Neighbours along the curve are neighbours in the box: a few octaves of smoothed noise.
    twice = np.concatenate([noise, noise])
    field = np.sum(
        [np.convolve(twice, np.ones(2**k) / 2 ** (k / 2))[items : 2 * items] for k in range(6)],
        axis=0,
    )
    field = (field - field.mean()) / field.std() * _SPREAD
    weight = np.exp(field)
    interactions = weight / weight.mean() * _INTERACTIONS * particles / items
    return BoxWork(
        particles=particles,
        mesh_cells=cells,
        cutoff=DEFAULT.split_cells * DEFAULT.cutoff_scales / cells,
        interactions=interactions,
    )


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """The units per second that one device computes, per phase."""

    interactions: float
    particles: float
    cells: float
    start: float
    """Seconds before the first particle."""
    halo: float
    """Seconds per fetched particle."""
    byte: float
    """Seconds per byte that is sent or received."""
    mesh_beside: bool
    """Whether the mesh has a core of its own, beside tree and pairs."""


def rates(device: Device, per_cell: float, company: Company = Company.ALONE) -> DeviceRates:
    """Return the inverse of (1), (2) and (3) for a device in this company.

    ``per_cell`` is the number of particles per mesh cell.
    """
    kind, built = device.kind, processor_rates(device.kind, company)
    peak = device.efficiency * kind.peak(Dtype.FP32)
    limit = peak if is_cpu(kind) else device.efficiency * kind.memory_bandwidth
    cell = (built.cell_cost + per_cell * built.point_cost) / limit
    cell += (built.cell_seconds + per_cell * built.point_seconds) / device.efficiency
    return DeviceRates(
        interactions=built.peak_share * peak / (PAIR_FLOP * built.larger_leaves),
        particles=device.efficiency / built.tree_seconds,
        cells=1 / cell,
        start=built.start_seconds / device.efficiency,
        halo=built.halo_seconds / device.efficiency,
        byte=0.0 if company is Company.ALONE else built.byte_seconds / device.efficiency,
        mesh_beside=built is HOSTED_GPU,
    )


def halo_particles(box: BoxWork, particles: float) -> float:
    """Return the number of halo particles of (4)."""
    if particles <= 0:
        return 0.0
    share = particles / box.particles
    grown = (share ** (1 / 3) + 2 * box.cutoff) ** 3 - share
    return float(min(box.particles - particles, box.particles * grown))
