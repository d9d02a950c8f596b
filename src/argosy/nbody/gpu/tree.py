"""Build and walk the tree on a device, in torch, a level at a time.

It does the work of ``hilbert``, ``tree`` and ``tasks``:

    keys -> sort -> split runs of the curve, all of a level at once -> leaves' moments -> merge,
    from the last level up -> walk: all pairs of a target leaf and a source node of a level at once,
    from the root down

Nodes are the same as on a CPU; they are numbered level by level. Targets are leaves, so a node that
a CPU accepts for a whole cell is tested once for each of its leaves: there are more tests, each the
same arithmetic on every lane.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from argosy.nbody.force.hilbert import BITS, KEY_BITS
from argosy.nbody.force.split import ForceSplit
from argosy.nbody.force.tasks import FAR, FEWEST, NEAR, NEAREST, NODE

# The number of target leaves that are walked together.
_CHUNK = 1 << 18


def device_keys(positions: Tensor, box: float) -> Tensor:
    """Return ``hilbert.hilbert_keys`` of every row."""
    if positions.is_cuda:
        from argosy.nbody.gpu.kernels import keys_on_device

        return keys_on_device(positions, box, BITS)
    cells = 1 << BITS
    place = [(positions[:, d] / box * cells).to(torch.int64).clamp(max=cells - 1) for d in range(3)]
    bit = cells >> 1
    while bit > 1:
        below = bit - 1
        for d in range(3):
            inverted = (place[d] & bit) != 0
            swap = torch.where(inverted, 0, (place[0] ^ place[d]) & below)
            place[0] = place[0] ^ torch.where(inverted, below, swap)
            if d:
                place[d] = place[d] ^ swap
        bit >>= 1
    place[1] = place[1] ^ place[0]
    place[2] = place[2] ^ place[1]
    turn = torch.zeros_like(place[0])
    bit = cells >> 1
    while bit > 1:
        turn = torch.where((place[2] & bit) != 0, turn ^ (bit - 1), turn)
        bit >>= 1
    key = torch.zeros_like(place[0])
    for level in range(BITS - 1, -1, -1):
        for d in range(3):
            key = (key << 1) | (((place[d] ^ turn) >> level) & 1)
    return key


@dataclass(frozen=True)
class DeviceTree:
    """A ``tree.Tree`` that consists of tensors; node 0 is the root."""

    start: Tensor
    end: Tensor
    left: Tensor
    right: Tensor
    leaves: Tensor
    """The nodes that are leaves, along the curve."""
    middle: Tensor
    half: Tensor
    mass: Tensor
    centre: Tensor
    moments: Tensor
    reach: Tensor
    skew: Tensor


def grow_on_device(
    keys: Tensor, positions: Tensor, *, leaf_size: int, least_bits: int = 6
) -> DeviceTree:
    """Build the tree over sorted keys and their particles."""
    start, end, left, right, levels = _structure(keys, leaf_size, least_bits)
    leaves = torch.nonzero(left < 0).flatten()
    leaves = leaves[torch.argsort(start[leaves])]
    count, kind = len(start), positions.dtype
    tree = DeviceTree(
        start=start,
        end=end,
        left=left,
        right=right,
        leaves=leaves,
        middle=torch.zeros((count, 3), dtype=kind, device=keys.device),
        half=torch.zeros((count, 3), dtype=kind, device=keys.device),
        mass=(end - start).to(kind),
        centre=torch.zeros((count, 3), dtype=kind, device=keys.device),
        moments=torch.zeros((count, 6), dtype=kind, device=keys.device),
        reach=torch.zeros(count, dtype=kind, device=keys.device),
        skew=torch.zeros(count, dtype=kind, device=keys.device),
    )
    for part in torch.split(leaves, _CHUNK):
        _fill_leaves(tree, part, positions)
    for first, last in reversed(levels):
        inner = torch.arange(first, last, device=keys.device)
        _merge(tree, inner[tree.left[first:last] >= 0])
    away = tree.half + (tree.centre - tree.middle).abs()
    tree.reach.copy_(away.square().sum(dim=1).sqrt())
    tree.skew.copy_(tree.reach * tree.moments[:, :3].sum(dim=1) / tree.mass)
    return tree


def _structure(
    keys: Tensor, leaf_size: int, least_bits: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[tuple[int, int]]]:
    """Return runs, children, and the nodes of each level, from the root down."""
    device = keys.device
    begin = torch.zeros(1, dtype=torch.int64, device=device)
    stop = torch.full((1,), len(keys), device=device)
    rows: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    levels: list[tuple[int, int]] = []
    count = 0
    while len(begin):
        levels.append((count, count + len(begin)))
        last = keys[stop - 1]
        bit = _highest_bit(keys[begin] ^ last)
        split = (bit >= 0) & ((stop - begin > leaf_size) | (bit >= KEY_BITS - least_bits))
        at = torch.searchsorted(keys, (last >> bit.clamp(min=0)) << bit.clamp(min=0))
        number = count + len(begin) + 2 * (torch.cumsum(split.to(torch.int64), 0) - 1)
        left, right = torch.where(split, number, -1), torch.where(split, number + 1, -1)
        rows.append((begin, stop, left, right))
        count += len(begin)
        inner = torch.nonzero(split).flatten()
        begin, stop = (
            torch.stack([low[inner], high[inner]], dim=1).flatten()
            for low, high in ((begin, at), (at, stop))
        )
    start, end, left, right = (torch.cat(column) for column in zip(*rows, strict=True))
    return start, end, left, right, levels


def _highest_bit(values: Tensor) -> Tensor:
    """Return the position of the highest set bit; -1 for 0. Halves of 32 bits are exact as
    floats."""
    high, low = values >> 32, values & 0xFFFFFFFF
    upper, lower = torch.frexp(high.double())[1] + 31, torch.frexp(low.double())[1] - 1
    place = torch.where(high > 0, upper, lower).to(torch.int64)
    return torch.where(values > 0, place, -1)


def _fill_leaves(tree: DeviceTree, leaves: Tensor, positions: Tensor) -> None:
    """Compute boxes and moments of leaves, with particles in rows as long as the longest leaf."""
    start, size = tree.start[leaves], tree.end[leaves] - tree.start[leaves]
    lane = torch.arange(int(size.max()), device=leaves.device)
    held = lane < size[:, None]
    # The first particle of a leaf fills the rest of its row.
    rows = positions[torch.where(held, start[:, None] + lane, start[:, None])]
    low, high = rows.amin(dim=1), rows.amax(dim=1)
    weight = held[..., None].to(rows.dtype)
    centre = (rows * weight).sum(dim=1) / size[:, None]
    away = (rows - centre[:, None]) * weight
    tree.middle[leaves], tree.half[leaves], tree.centre[leaves] = (
        (low + high) / 2,
        (high - low) / 2,
        centre,
    )
    products = [away[..., i] * away[..., j] for i, j in _PAIRS]
    tree.moments[leaves] = torch.stack(products, dim=-1).sum(dim=1)


# The axes of each second moment.
_PAIRS = ((0, 0), (1, 1), (2, 2), (0, 1), (0, 2), (1, 2))


def _merge(tree: DeviceTree, nodes: Tensor) -> None:
    """Compute (1) of ``tree`` for nodes whose children are known."""
    left, right = tree.left[nodes], tree.right[nodes]
    low = torch.minimum(tree.middle[left] - tree.half[left], tree.middle[right] - tree.half[right])
    high = torch.maximum(tree.middle[left] + tree.half[left], tree.middle[right] + tree.half[right])
    left_mass, right_mass = tree.mass[left, None], tree.mass[right, None]
    mass = left_mass + right_mass
    shift = tree.centre[right] - tree.centre[left]
    tree.middle[nodes], tree.half[nodes] = (low + high) / 2, (high - low) / 2
    tree.centre[nodes] = (left_mass * tree.centre[left] + right_mass * tree.centre[right]) / mass
    between = left_mass * right_mass / mass
    products = torch.stack([shift[:, i] * shift[:, j] for i, j in _PAIRS], dim=-1)
    tree.moments[nodes] = tree.moments[left] + tree.moments[right] + between * products


@dataclass(frozen=True)
class DeviceTasks:
    """The sorted tasks of all leaves, which are arranged as by ``pairs.sort_tasks``."""

    starts: Tensor
    """Tasks of leaf l and kind k begin at ``starts[3 l + k]``."""
    sources: Tensor
    """The source nodes."""


def walk_on_device(
    tree: DeviceTree, box: float, split: ForceSplit, tolerance: float, wanted: Tensor | None = None
) -> DeviceTasks:
    """List the tasks of every leaf, or every ``wanted`` one, by (1) to (4) of ``tasks``."""
    cutoff, softened = split.cutoff, split.spline
    everyone = torch.arange(len(tree.leaves), device=tree.leaves.device)
    slots, sources = [], []
    for part in torch.split(everyone if wanted is None else everyone[wanted], _CHUNK):
        number = part
        source = torch.zeros_like(number)
        while len(number):
            target = tree.leaves[number]
            gap, apart = _distances(tree, target, source, box)
            within = gap < cutoff * cutoff
            accepted = within & (tree.mass[source] > FEWEST) & (gap >= softened * softened)
            accepted &= tree.reach[source] ** 2 < NEAREST * apart
            accepted &= tree.skew[source] ** 2 < tolerance**2 * apart**3
            leaf = tree.left[source] < 0
            done = within & (accepted | leaf)
            kind = torch.where(accepted, NODE, torch.where(gap < softened * softened, NEAR, FAR))
            slots.append((3 * number + kind)[done])
            sources.append(source[done])
            opened = torch.nonzero(within & ~done).flatten()
            number, source = number[opened].repeat(2), source[opened]
            source = torch.cat([tree.left[source], tree.right[source]])
    slot, order = torch.sort(torch.cat(slots), stable=True)
    starts = torch.searchsorted(slot, torch.arange(3 * len(tree.leaves) + 1, device=slot.device))
    return DeviceTasks(starts=starts, sources=torch.cat(sources)[order])


def _distances(
    tree: DeviceTree, target: Tensor, source: Tensor, box: float
) -> tuple[Tensor, Tensor]:
    """Return the squared gap between the boxes, and the squared distance to the source's centre of
    mass.

    The latter is measured from the target's box.
    """
    half, middle = tree.half[target], tree.middle[target]
    away = (tree.middle[source] - middle).abs()
    away = (torch.minimum(away, box - away) - half - tree.half[source]).clamp(min=0)
    apart = (tree.centre[source] - middle).abs()
    apart = (torch.minimum(apart, box - apart) - half).clamp(min=0)
    return away.square().sum(dim=1), apart.square().sum(dim=1)
