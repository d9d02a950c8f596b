"""Build the links and the cluster on which the bundles of a plan run (``sim.fold``)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from argosy.cluster.topology import Cluster, Link, Node, Route
from argosy.cluster.trace import total
from argosy.sim.bundles import NOWHERE, Bundle, sites_of
from argosy.sim.tasks.known import Known


def folded_cluster(cluster: Cluster, bundles: Sequence[Bundle]) -> Cluster:
    """Build the cluster on which bundles run, by (1) to (3) of ``sim.fold``."""
    builder = FoldedLinks(cluster, Known())
    sites = sites_of(bundles)
    routes: dict[tuple[str, str], tuple[Route, ...]] = {}
    for source, target in itertools.product(bundles, repeat=2):
        route = builder.between(source, target, sites)
        if route is not None:
            routes[source.name, target.name] = (route,)
    devices = []
    for bundle in bundles:
        devices.append(
            replace(cluster.device(bundle.devices[0]), name=bundle.name, node=bundle.name)
        )
        devices.append(replace(devices[-1], name=f"{bundle.name}.inside"))
        inside = builder.inside(bundle)
        if inside is not None:
            routes[bundle.name, f"{bundle.name}.inside"] = (inside,)
    nodes = tuple(Node(name=device.name, devices=(device.name,)) for device in devices)
    folded = Cluster(
        name=cluster.name, nodes=nodes, devices=tuple(devices), links=tuple(builder.links)
    )
    return folded.with_routes(routes)


class FoldedLinks:
    """The links of a folded cluster, which are built when a route first needs them."""

    def __init__(self, cluster: Cluster, known: Known) -> None:
        self.cluster = cluster
        self.known = known
        self.nodes = {node.name: node for node in cluster.nodes}
        self.nics = {link for node in cluster.nodes for link in node.nic or ()}
        self.links: list[Link] = []
        self.numbers: dict[tuple[object, ...], int] = {}

    @property
    def capacity(self) -> list[float]:
        """Return the bytes/s of each link at time 0."""
        return [link.bandwidth.at(0) for link in self.links]

    def between(
        self, source: Bundle, target: Bundle, sites: dict[str, frozenset[str]]
    ) -> Route | None:
        """Return the route from any node of a bundle to a different node of another (1), (3).

        Returns None if all their devices are in one node.
        """
        node_of = self.cluster.node_names
        ends = ((a, b) for a in source.devices for b in target.devices if node_of[a] != node_of[b])
        pair = next(ends, None)
        if pair is None:
            return None
        links = self.cluster.routes(*pair)[0].links
        out, into = sites[source.name], sites[target.name]
        folded = []
        for link in links:
            if link not in self.nics:
                folded.append(self._link(("real", link), partial(list, (link,))))
            elif link == links[0]:
                folded.append(self._link(("out", out), partial(self._nics, out, 0)))
            else:
                folded.append(self._link(("in", into), partial(self._nics, into, 1)))
        return Route("folded", tuple(folded))

    def _nics(self, nodes: Iterable[str], direction: int) -> list[int]:
        """Return the links of the nodes' NICs: outgoing if ``direction`` is 0, incoming if it is
        1."""
        nics = [self.nodes[node].nic for node in sorted(nodes)]
        return [nic[direction] for nic in nics if nic is not None]

    def inside(self, bundle: Bundle) -> Route | None:
        """Return the route between the devices of a bundle inside their nodes (2); None if there is
        none."""
        members = tuple(link for link in bundle.run.inside if link != NOWHERE)
        key = ("inside", *members)
        return Route("inside", (self._link(key, lambda: members),)) if members else None

    def _link(self, key: tuple[object, ...], members: Callable[[], Sequence[int]]) -> int:
        """Return the number of a link with the total capacity of ``members``."""
        if key not in self.numbers:
            self.numbers[key] = len(self.links)
            self.links.append(self.known.of([], key, lambda: self._joined(members())))
        return self.numbers[key]

    def _joined(self, members: Sequence[int]) -> Link:
        """Return one link with the capacity of several."""
        real = [self.cluster.links[member] for member in members]
        return replace(real[0], bandwidth=total(link.bandwidth for link in real))
