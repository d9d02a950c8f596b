"""Share links fairly (4), and list the flows of collectives by (5) and (6)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from support.planner_oracle.plans import Stage
from support.planner_oracle.problem import Problem


@dataclass(frozen=True)
class Flow:
    links: tuple[str, ...]
    bytes: float
    latency: float


class Network:
    """The links of a problem: a bus in each node, and NICs on one switch that never blocks."""

    def __init__(self, problem: Problem) -> None:
        self.node_of = problem.node_of
        self.rates: dict[str, float] = {}
        for name, node in self.node_of.items():
            self.rates |= {f"{name} out": node.bus, f"{name} in": node.bus}
            self.rates |= {f"{node.name} out": node.nic, f"{node.name} in": node.nic}

    def flow(self, source: str, target: str, num_bytes: float) -> Flow:
        here, there = self.node_of[source], self.node_of[target]
        if here is there:
            return Flow((f"{source} out", f"{target} in"), num_bytes, here.bus_latency)
        latency = here.nic_latency + there.nic_latency
        return Flow((f"{here.name} out", f"{there.name} in"), num_bytes, latency)

    def shared(self, flows: Sequence[Flow]) -> list[float]:
        """Return max-min fair rates: fill all flows equally until a link is full, and repeat."""
        rates = [0.0] * len(flows)
        free, growing = dict(self.rates), set(range(len(flows)))
        while growing:
            users = {link: [at for at in growing if link in flows[at].links] for link in free}
            steps = {link: free[link] / len(at) for link, at in users.items() if at}
            step = min(steps.values())
            full = [link for link, room in steps.items() if room <= step * (1 + 1e-12)]
            for at in growing:
                rates[at] += step
                for link in flows[at].links:
                    free[link] -= step
            growing -= {at for link in full for at in users[link]}
        return rates

    def alone(self, flows: Sequence[Flow], rounds: int) -> float:
        """Return the seconds of flows that begin together, if each link divides its time."""
        load: dict[str, float] = {}
        for flow in flows:
            for link in flow.links:
                load[link] = load.get(link, 0.0) + flow.bytes / self.rates[link]
        ends = [max(load[link] for link in flow.links) + rounds * flow.latency for flow in flows]
        return max(ends, default=0.0)

    def around(
        self, devices: Sequence[str], num_bytes: float, algorithm: str
    ) -> tuple[list[Flow], int]:
        """Return the flows of one half of an all-reduce by (5) or (6), and its latencies."""
        nodes: dict[str, list[str]] = {}
        for name in devices:
            nodes.setdefault(self.node_of[name].name, []).append(name)
        ordered = [name for members in nodes.values() for name in members]
        pairs: dict[tuple[str, str], float] = {}

        def add(source: str, target: str, share: float) -> None:
            pairs[source, target] = pairs.get((source, target), 0.0) + share

        if algorithm != "ring" and len(nodes) > 1:
            for members in nodes.values():
                for left, right in itertools.pairwise(members):
                    add(left, right, 0.5)
                    add(right, left, 0.5)
            ordered = [members[0] for members in nodes.values()]
        count = len(ordered)
        if algorithm == "tree":
            for order in (ordered, ordered[::-1]):
                for child in range(1, count):
                    add(order[child], order[(child - 1) // 2], 0.25)
                    add(order[(child - 1) // 2], order[child], 0.25)
            rounds = int(math.log2(count))
        else:
            for at, name in enumerate(ordered):
                add(name, ordered[(at + 1) % count], (count - 1) / count)
            rounds = count - 1
        return [self.flow(*pair, share * num_bytes) for pair, share in pairs.items()], rounds

    def fastest(self, stage: Stage, num_bytes: float) -> str:
        """Return the algorithm that takes the least time without other traffic."""

        def seconds(algorithm: str) -> float:
            flows, rounds = self.around(stage.devices, 2 * num_bytes, algorithm)
            return round(self.alone(flows, 2 * rounds), 12)

        return min(("ring", "hierarchical", *(() if stage.zero else ("tree",))), key=seconds)
