"""Compute the whole force on a GPU: keys, sort, tree, walk, mesh and pairs.

    positions -> device -> keys, sort -> [ tree -> walk -> pairs and nodes ] + mesh
    -> forces -> host

Several processes with a GPU each divide tree and mesh (``gpu.shared``). If some have none, all
share a tree that is built on their hosts (``domain``), and those with a GPU sum their pairs there.
This works on any torch device; kernels in Triton need a GPU.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from argosy.errors import bad_input, impossible
from argosy.nbody.force.gravity import (
    Package,
    TreeForce,
    check_positions,
    list_packages,
    mesh_shape,
)
from argosy.nbody.force.settings import GravitySettings
from argosy.nbody.force.split import ForceSplit
from argosy.nbody.force.tasks import Flags
from argosy.nbody.force.tree import MEASURED, Integers, Tree
from argosy.nbody.gpu.mesh import mesh_on_device
from argosy.nbody.gpu.sums import count_pairs, sum_on_device
from argosy.nbody.gpu.tree import (
    DeviceTasks,
    DeviceTree,
    device_keys,
    grow_on_device,
    walk_on_device,
)
from argosy.nbody.motion.evolve import LocalGravity
from argosy.nbody.particles import Floats, Particles

# Particles of a leaf on a GPU; large leaves give fewer tasks to list and more pairs to sum.
LEAF_SIZE = 128


@dataclass(frozen=True, kw_only=True)
class GpuForces:
    """A force, and the seconds that each of its phases took."""

    total: Floats
    pairs: float
    """The number of pairs and nodes that were summed."""
    seconds: dict[str, float]
    """copy: to the device and back; sort: keys and order; tree, walk, pairs, mesh; all."""


class _Watch:
    """A clock that measures phases, each after all earlier work of the device is done."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, dict[str, float]()
        self.begin = self.last = time.perf_counter()

    def mark(self, phase: str) -> None:
        """End a phase and record its seconds."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.last
        self.seconds["all"] = now - self.begin
        self.last = now


def gpu_forces(
    positions: Floats, box: float, mass: float, settings: GravitySettings, device: str = "cuda"
) -> GpuForces:
    """Return the force on particles of one mass, as ``gravity.compute_forces`` does."""
    check_positions(positions, box)
    split = settings.split(box)
    where = torch.device(device)
    watch = _Watch(where)
    on_device = _to_device(positions, where)
    watch.mark("copy")
    order, along, tree = _grown(on_device, box, settings, watch)
    tasks = walk_on_device(tree, box, split, settings.tolerance)
    watch.mark("walk")
    force = sum_on_device(tree, along, tasks, box, split)
    watch.mark("pairs")
    force += mesh_on_device(along, mesh_shape(box, settings))
    watch.mark("mesh")
    total = torch.empty_like(force)
    total[order] = mass * force
    host_total = _to_host(total)
    watch.mark("copy")
    return GpuForces(
        total=host_total, pairs=float(count_pairs(tree, tasks).sum()), seconds=watch.seconds
    )


def _to_device(values: Floats, device: torch.device) -> Tensor:
    """Copy through pinned memory, which a GPU reads several times as fast."""
    if device.type != "cuda":
        return torch.from_numpy(values).to(device)
    staged = _staging(values.shape)
    np.copyto(staged.numpy(), values)
    return staged.to(device, non_blocking=True)


def _to_host(values: Tensor) -> Floats:
    """Copy a tensor to the host, through pinned memory."""
    if not values.is_cuda:
        return values.numpy()
    staged = _staging(tuple(values.shape))
    staged.copy_(values)
    return staged.numpy().copy()


@lru_cache(maxsize=1)
def _staging(shape: tuple[int, ...]) -> Tensor:
    """Return a pinned buffer of a shape."""
    return torch.empty(shape, dtype=torch.float64, pin_memory=True)


def _grown(
    positions: Tensor, box: float, settings: GravitySettings, watch: _Watch | None = None
) -> tuple[Tensor, Tensor, DeviceTree]:
    """Return the order of the curve, positions in it, and the tree over them."""
    keys, order = torch.sort(device_keys(positions, box), stable=True)
    along = positions[order]
    if watch is not None:
        watch.mark("sort")
    tree = grow_on_device(keys, along, leaf_size=settings.leaf_size)
    if watch is not None:
        watch.mark("tree")
    return order, along, tree


@dataclass(frozen=True)
class GpuTree:
    """A replacement of ``gravity.tree_force`` that sums pairs on a device; the tree is the
    host's."""

    device: str

    def __call__(
        self,
        tree: Tree,
        cells: Integers,
        positions: Floats,
        box: float,
        split: ForceSplit,
        settings: GravitySettings,
        _pool: object,
        wanted: Flags | None = None,
    ) -> TreeForce:
        wanted = np.ones(len(tree.leaves), bool) if wanted is None else wanted
        begin = time.perf_counter()
        packages = list(list_packages(tree, cells, wanted, split.lengths(box), settings.tolerance))
        walked = time.perf_counter()
        where = torch.device(self.device)
        device_tree, tasks = _tree_to(where, tree), _tasks_to(where, packages, len(tree.leaves))
        summed = sum_on_device(
            device_tree, torch.from_numpy(positions).to(where), tasks, box, split
        )
        force: Floats = summed.cpu().numpy()
        work: Floats = count_pairs(device_tree, tasks).double().cpu().numpy()
        seconds = time.perf_counter() - walked
        return TreeForce(
            force=force,
            work=work,
            walk_seconds=walked - begin,
            pair_seconds=seconds,
            potential=np.zeros(0),
        )


def _tree_to(device: torch.device, tree: Tree) -> DeviceTree:
    """Copy a tree to a device."""
    links = {
        name: torch.from_numpy(getattr(tree, name).astype(np.int64)).to(device) for name in _LINKS
    }
    measured = {name: torch.from_numpy(getattr(tree, name)).to(device) for name in MEASURED}
    return DeviceTree(**links, **measured)


# The fields of a tree that are indices.
_LINKS = ("start", "end", "left", "right", "leaves")


def _tasks_to(device: torch.device, packages: list[Package], num_leaves: int) -> DeviceTasks:
    """Copy the packages of a host's walk to a device as one list."""
    counts = np.zeros(3 * num_leaves + 1, np.int64)
    for package in packages:
        counts[3 * package.first + 1 : 3 * package.last + 1] = np.diff(package.starts)
    sources = np.concatenate(
        [np.zeros(0, np.int64), *(package.order for package in packages)]
    ).astype(np.int64)
    return DeviceTasks(
        starts=torch.from_numpy(np.cumsum(counts)).to(device),
        sources=torch.from_numpy(sources).to(device),
    )


@dataclass(frozen=True, kw_only=True)
class GpuGravity(LocalGravity):
    """An engine that computes forces within this process, on a device."""

    device: str

    def forces(self, particles: Particles) -> tuple[Particles, Floats]:
        forces = gpu_forces(
            particles.positions, self.size, self.strength, self.settings, self.device
        )
        return particles, forces.total

    def short(self, particles: Particles, active: Flags) -> Floats:
        on_device = torch.from_numpy(particles.positions).to(self.device)
        order, along, tree = _grown(on_device, self.size, self.settings)
        split = self.settings.split(self.size)
        flags = torch.from_numpy(active).to(self.device)[order]
        before = torch.cumsum(torch.cat([flags.new_zeros(1), flags]).to(torch.int64), 0)
        wanted = before[tree.end[tree.leaves]] > before[tree.start[tree.leaves]]
        tasks = walk_on_device(tree, self.size, split, self.settings.tolerance, wanted)
        total = torch.empty_like(along)
        total[order] = self.strength * sum_on_device(tree, along, tasks, self.size, split)
        return total.cpu().numpy()

    def smooth(self, particles: Particles) -> Floats:
        on_device = torch.from_numpy(particles.positions).to(self.device)
        device_force = mesh_on_device(on_device, mesh_shape(self.size, self.settings))
        force: Floats = device_force.cpu().numpy()
        return self.strength * force


def usable_device(name: str, place: int) -> str:
    """Return the torch device of this name; raise ``InputError`` if it cannot be used.

    ``place`` is the number of the process on its machine.
    """
    try:
        where = torch.device(name)
    except RuntimeError:
        raise bad_input("cpu, cuda, or cuda and a number", name, "--device") from None
    if where.type == "cuda" and not torch.cuda.is_available():
        raise impossible(f"use --device {name}", "torch finds no CUDA card", "--device cpu")
    if where.type == "cuda" and where.index is None:
        return f"cuda:{place % torch.cuda.device_count()}"
    return name


def for_gpu(settings: GravitySettings) -> GravitySettings:
    """Return settings of the same accuracy with leaves that suit a GPU."""
    return replace(settings, leaf_size=LEAF_SIZE, cell_size=8 * LEAF_SIZE)
