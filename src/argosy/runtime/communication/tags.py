"""List the tags of messages inside a process group; tags of micro-batches are smaller."""

from __future__ import annotations

from enum import IntEnum, unique


@unique
class Tag(IntEnum):
    """A tag that keeps one sort of message apart from all others on gloo."""

    INSIDE_NODE = 2**29
    """Parts of a sum or a gather, between a member and the first one of its node."""
    FILL = 2**29 + 1
    SCATTER = 2**29 + 2
    RING_BLOCKS = 2**29 + 3
    """Keys and values."""
    RING_GRADIENTS = 2**29 + 4
    TREES = 2**29 + 16
    """The first of four tags of the messages of two trees, up and down."""
