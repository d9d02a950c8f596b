"""List the widths of the tensor-parallel groups that the devices of a pool can be divided into.

A group is inside a node, or fills any number of nodes: a part of a cluster can have any number of
them, and all plans of a part are plans of the cluster.
"""

from __future__ import annotations

from collections.abc import Iterator

from argosy.space.pool import Pool


def node_widths(pool: Pool, most: int) -> Iterator[int]:
    """Yield the widths of tensor-parallel groups inside a node: all divisors of its size, and
    powers of two, so that a node with one device more has every option of the smaller node."""
    for width in range(1, min(pool.per_node, most) + 1):
        if pool.per_node % width == 0 or width & (width - 1) == 0:
            yield width


def spanning_widths(pool: Pool, most: int) -> Iterator[int]:
    """Yield the widths of tensor-parallel groups that fill several nodes."""
    nodes = len(pool.nodes) if pool.nic_bandwidth else 1
    for number in range(2, min(nodes, most // pool.per_node) + 1):
        yield number * pool.per_node


def tensor_widths(pool: Pool, devices: int, most: int, *, spanning: bool = False) -> Iterator[int]:
    """Yield the widths that divide ``devices`` devices of a pool; over several nodes only widths
    that divide a node or, with ``spanning``, fill several."""
    for width in node_widths(pool, min(devices, most)):
        if devices % width == 0 and (pool.per_node % width == 0 or devices <= pool.per_node):
            yield width
    for width in spanning_widths(pool, min(devices, most)) if spanning else ():
        if devices % width == 0:
            yield width


def devices_in_groups(pool: Pool, width: int) -> int:
    """Return the most devices of a pool that groups of this width can have in all, however many
    stages they form."""
    if width <= pool.per_node:
        return len(pool.nodes) * (pool.per_node - pool.per_node % width)
    return pool.count - pool.count % width
