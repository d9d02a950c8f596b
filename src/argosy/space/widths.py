"""List the widths of the tensor-parallel groups that the devices of a pool can be divided into.

A group is inside a node or fills several nodes: a power of two of them, or all nodes of its pool.
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
    for number in range(2, nodes + 1):
        if number * pool.per_node <= most and (number == nodes or number & (number - 1) == 0):
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
