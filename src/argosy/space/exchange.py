"""Price the exchange between the devices of a stage before they are placed: a lower bound in
seconds.

A replica has W devices of a pool, n samples, tensor width t, a sequence in c parts and experts over
e holders; a node has k of the pool's devices and so at most h = k / t holders. i is the bandwidth
inside a node (of a device, or of all together if they share it) and b the bandwidth out of a node.
Per layer and pass:

    (1)  reductions       2 (t-1)/t n/c reduced bytes / i, or by a tree
                          shared link: all W devices send over i
                          t > k, N = t / k nodes: over NICs, (t-1)/t by a ring or the load of a
                          tree of N, of 2 n/c reduced bytes / b; instead over the links of a node,
                          (t-1)/t or at most 1 by the chains of a tree, / i, if that is longer for
                          any number of bytes. Latencies are those of the same links
    (2)  keys and values  (c-1) n/W of their bytes / i, if parts share a node
                          shared link: all devices of a node send over i
                          (c-1) n/c of their bytes / (c b / nodes), if W is several nodes: t devices
                          of each node send to another one
    (3)  routed inputs    x = (e-1)/e n/c routed bytes of a holder
                          e <= h:  x / (t i + b), because a group may lie in one node or be spread
                                   over several;  shared link: t = 1
                          e > h:   min(1, h (e-h) / (e-1)) x / b: a node with m holders of a group
                                   sends m (e-m) / e of a holder's routed bytes to other nodes,
                                   which is least for m = 1 or m = h

Latencies are those of ``sim.tasks.exchange``. Real placements reach (1) and (2) exactly if nothing
else uses the links. They reach (3) if a group lies in one node or has nodes to itself;
``routed_crowding`` gives what a full node adds to it.
"""

from __future__ import annotations

from typing import NamedTuple

from argosy.cost.collective import tree_depth, tree_load
from argosy.cost.communicate import num_reductions
from argosy.space.pool import Pool
from argosy.workload.chain import Layer


class Split(NamedTuple):
    """A way to split the work of a replica: over its devices, parts of the sequence and experts."""

    width: int
    """Devices of a replica."""
    context: int = 1
    expert: int = 1

    @property
    def tensor_width(self) -> int:
        return self.width // self.context


def reduction_seconds(pool: Pool, layer: Layer, split: Split, samples: int) -> float:
    """Return the seconds that a forward, or a backward, of a layer spends on reductions (1)."""
    width = split.tensor_width
    if width < 2 or not layer.reduced_bytes:
        return 0.0
    payload = 2 * layer.reduced_bytes * samples / split.context
    bandwidth = pool.intra_bandwidth / (
        min(split.width, pool.per_node) if pool.intra_is_shared else 1
    )
    rounds = 2 * num_reductions(layer)
    if width > pool.per_node:
        return _spanning_seconds(pool, width, payload, rounds)
    latency = pool.intra_latency * rounds
    ring = payload * (width - 1) / width / bandwidth + (width - 1) * latency
    return min(ring, payload * tree_load(width) / bandwidth + tree_depth(width) * latency)


def _spanning_seconds(pool: Pool, width: int, payload: float, rounds: int) -> float:
    """Return the seconds of reductions in a group that fills several nodes (1).

    The links that take longest are those with the least rate for every layer, because a range of
    layers reduces everything at once: the largest of two sums may be less than the sum of the
    larger ones.
    """
    size, nodes = pool.per_node, width // pool.per_node
    around = (width - 1) / width
    # Devices in the middle of a chain send in both directions.
    chain = 0.5 if size == 2 and not pool.intra_is_shared else 1.0
    senders = size - 1 if pool.intra_is_shared else min(size - 1, 1)
    algorithms = ((around, around, width - 1), (tree_load(nodes), chain, tree_depth(nodes)))
    seconds = []
    for leaving, inside, steps in algorithms:
        over_nic = leaving / pool.nic_bandwidth, pool.nic_latency
        within = senders * inside / pool.intra_bandwidth, pool.intra_latency
        per_byte, latency = max(over_nic, within)
        seconds.append(payload * per_byte + steps * rounds * latency)
    return min(seconds)


def key_value_seconds(pool: Pool, layer: Layer, split: Split, samples: int) -> float:
    """Return the seconds that one pass of a layer spends on sending keys and values (2)."""
    if split.context < 2 or not layer.key_value_bytes:
        return 0.0
    bytes_sent = samples * layer.key_value_bytes / split.width * (split.context - 1)
    steps = split.context - 1
    seconds = 0.0
    inside = min(split.width, pool.per_node)
    if inside > split.tensor_width:
        crowd = 1
        if pool.intra_is_shared:  # the last part of each node sends to another node
            crowd = inside if split.width <= pool.per_node else inside - split.tensor_width
        seconds = crowd * bytes_sent / pool.intra_bandwidth + steps * pool.intra_latency
    if split.width > pool.per_node:
        seconds = max(
            seconds, split.tensor_width * bytes_sent / pool.nic_bandwidth + steps * pool.nic_latency
        )
    return seconds


def routed_seconds(pool: Pool, layer: Layer, split: Split, samples: int) -> float:
    """Return the seconds that one pass of a layer needs to route inputs to experts, one way (3)."""
    expert = split.expert
    if expert < 2 or not layer.routed_bytes:
        return 0.0
    holder = samples * layer.routed_bytes / split.context * (expert - 1) / expert
    most = pool.per_node // split.tensor_width
    if expert <= most or not pool.nic_bandwidth:
        lanes = 1 if pool.intra_is_shared else split.tensor_width
        latency = (
            min(pool.intra_latency, pool.nic_latency) if pool.nic_bandwidth else pool.intra_latency
        )
        return holder / (lanes * pool.intra_bandwidth + pool.nic_bandwidth) + latency
    leaving = min(1.0, most * (expert - most) / (expert - 1))
    return leaving * holder / pool.nic_bandwidth + pool.nic_latency


def routed_crowding(pool: Pool, split: Split, replicas: int) -> float:
    """Return the seconds per routed byte of a sample that a node full of holders adds to (3)."""
    expert = split.expert
    most = pool.per_node // split.tensor_width
    holders = min(most, replicas * split.context)
    if expert <= most or not pool.nic_bandwidth:
        if not pool.intra_is_shared:
            return 0.0
        return (holders - 1) * (expert - 1) / expert / split.context / pool.intra_bandwidth
    leaving = min(1.0, most * (expert - most) / (expert - 1))
    return (
        (most * (expert - most) / (expert - 1) - leaving)
        * (expert - 1)
        / expert
        / split.context
        / pool.nic_bandwidth
    )
