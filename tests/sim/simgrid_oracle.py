"""Finish times of flows according to SimGrid: JSON networks on standard input, JSON times on
standard output.

Run by the interpreter that has SimGrid's Python module. All networks are played in one engine, side
by side: they have no link in common. A network is {"links": [[[seconds, bytes/s], ...], ...],
"flows": [[start, bytes, [link, ...]], ...]}.
"""

import json
import sys

from simgrid import Actor, Comm, Engine, LinkInRoute, NetZone, this_actor

PURE_MAX_MIN = [
    "network/model:CM02",
    "network/crosstraffic:0",
    "network/TCP-gamma:0",
    "network/bandwidth-factor:1",
    "network/latency-factor:1",
    "network/weight-S:0",
    "maxmin/precision:1e-12",
    "surf/precision:1e-12",
]
FAST = 1e15


class Director:
    """The only actor: changes links and starts flows at their moments, and writes down when the
    flows end."""

    def __init__(self, networks):
        self.zone = NetZone.create_full_zone("all")
        self.agenda = []
        """(seconds, 0 for a change and 1 for a start, what)."""
        self.bandwidth = []
        """Per link, the bandwidth that holds now."""
        self.links = []
        self.finish = [[None] * len(network["flows"]) for network in networks]
        for number, network in enumerate(networks):
            self.add(number, network)
        self.agenda.sort(key=lambda entry: entry[:2])
        self.zone.seal()

    def add(self, number, network):
        first = len(self.links)
        for steps in network["links"]:
            link = self.zone.create_link(f"link{len(self.links)}", steps[0][1])
            link.set_latency(0.0)
            self.agenda += [(time, 0, (len(self.links), value)) for time, value in steps[1:]]
            self.links.append(link.seal())
            self.bandwidth.append(steps[0][1])
        for at, (start, size, route) in enumerate(network["flows"]):
            ends = [
                self.zone.create_host(f"{number}-{at}-{end}", 1e9).seal()
                for end in ("source", "target")
            ]
            source, target = (host.netpoint for host in ends)
            path = [first + index for index in route]
            self.zone.add_route(
                source, target, None, None, [LinkInRoute(self.links[at]) for at in path], False
            )
            self.agenda.append((start, 1, (ends, size, path, (number, at))))

    def play(self):
        flows = []
        for time, is_start, what in self.agenda:
            if time > Engine.clock:
                this_actor.sleep_until(time)
            if is_start:
                ends, size, path, place = what
                flows.append((place, self.start(ends, size, path)))
            else:
                index, self.bandwidth[index] = what
                self.links[index].set_bandwidth(self.bandwidth[index])
        for (number, at), flow in flows:
            flow.wait()
            self.finish[number][at] = flow.finish_time

    def start(self, ends, size, path):
        """SimGrid keeps a flow below the bandwidth that its links had when it began, also when they
        become faster. So they are fast for that instant."""
        for index in path:
            self.links[index].set_bandwidth(FAST)
        flow = Comm.sendto_async(*ends, size)
        for index in path:
            self.links[index].set_bandwidth(self.bandwidth[index])
        return flow


def main():
    networks = json.load(sys.stdin)
    engine = Engine(
        ["oracle", "--log=root.thres:error", *(f"--cfg={option}" for option in PURE_MAX_MIN)]
    )
    director = Director(networks)
    Actor.create("director", engine.all_hosts[0], director.play)
    engine.run()
    json.dump(director.finish, sys.stdout)


if __name__ == "__main__":
    main()
