"""Choose the devices of a stage by DAPPLE's three policies, as numbers of devices of each machine.

Source: Fan et al., "DAPPLE: a pipelined data parallel approach for training large models"
(PPoPP'21), and its public planner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Counts = tuple[int, ...]
"""Number of devices of every machine."""
Policy = Callable[[Sequence[int], Sequence[int], int], Counts]
"""A function from the sizes of the machines, the numbers of their devices in use, and the number of
devices to take (enough are free) to the devices taken of each."""


def fresh_first(sizes: Sequence[int], used: Sequence[int], count: int) -> Counts:
    """Take untouched machines first, which keeps the gradients of a stage inside a machine.

    >>> fresh_first((4, 4), (1, 0), 5)
    (1, 4)
    """
    return _filled(sizes, used, count, sorted(range(len(sizes)), key=lambda at: (used[at] > 0, at)))


def append_first(sizes: Sequence[int], used: Sequence[int], count: int) -> Counts:
    """Take machines first that are partly in use.

    >>> append_first((4, 4), (1, 0), 5)
    (3, 2)
    """
    return _filled(
        sizes, used, count, sorted(range(len(sizes)), key=lambda at: (used[at] == 0, at))
    )


def scatter_first(sizes: Sequence[int], used: Sequence[int], count: int) -> Counts:
    """Take one device of every machine in turn.

    >>> scatter_first((4, 4), (1, 0), 5)
    (3, 2)
    >>> scatter_first((4, 4), (0, 0), 2)
    (1, 1)
    """
    taken = [0] * len(sizes)
    while count:
        for at, size in enumerate(sizes):
            if count and used[at] + taken[at] < size:
                taken[at] += 1
                count -= 1
    return tuple(taken)


def _filled(sizes: Sequence[int], used: Sequence[int], count: int, order: Sequence[int]) -> Counts:
    taken = [0] * len(sizes)
    for at in order:
        taken[at] = min(sizes[at] - used[at], count)
        count -= taken[at]
    return tuple(taken)


# DAPPLE's three policies, in the order in which it tries them.
POLICIES: tuple[Policy, ...] = (fresh_first, append_first, scatter_first)


def placements(
    sizes: Sequence[int], used: Sequence[int], count: int, chunk: int = 1
) -> list[Counts]:
    """Return the distinct results of the policies; none if there are too few devices.

    Devices are taken ``chunk`` at a time; all these numbers are multiples of it.

    >>> placements((4, 4), (0, 0), 4, chunk=2)
    [(4, 0), (2, 2)]
    """
    if count > sum(sizes) - sum(used):
        return []
    parts = (
        [number // chunk for number in sizes],
        [number // chunk for number in used],
        count // chunk,
    )
    choices = dict.fromkeys(policy(*parts) for policy in POLICIES)
    return [tuple(number * chunk for number in taken) for taken in choices]
