"""Write a commented cluster file from measurements of devices and links.

Devices of one host and kind form a group; nearly equal hosts form a ``[[nodes]]`` entry. A
measurement between two hosts shows the narrower of two NICs; the rate between a host and all others
at once shows whether its own NIC carries more. So a host's NIC is

    (1)  nic_h = max( rate(h, g) over other hosts g, min(what h sends to all at once, what all send
         to h at once) )

A pair that is slower than both NICs by more than a quarter has a link of its own in between. A NIC
that is wider than all others together is measured as wide as they are, because nothing can fill it.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from argosy.dtype import Dtype
from argosy.units import COMPUTE, RATE, SIZE, TIME

# Largest relative difference of figures between hosts that share an entry.
_MOST_DIFFERENCE = 0.1
# Share of the narrower NIC's rate below which a pair of hosts gets a link of its own.
_SLOW_PAIR_SHARE = 0.75
# Share of the best device of a kind from which on a device counts as equal to it.
_EQUAL_SHARE = 0.97


@dataclass(frozen=True, kw_only=True)
class ProbedDevice:
    """A device that was measured."""

    rank: int
    host: str
    kind: str
    """Name that its driver reports."""
    memory: float
    """Bytes."""
    memory_bandwidth: float
    """Bytes/s of a copy, read and written."""
    flops: tuple[tuple[Dtype, float], ...]
    """FLOP/s of the best size of square matrix product, per dtype."""
    by_size: tuple[tuple[Dtype, int, float], ...] = ()
    """Dtype, size and FLOP/s of every product that was measured."""
    facts: str = ""
    """Other facts that its driver reports: version, bus, links."""


@dataclass(frozen=True, kw_only=True)
class ProbedLink:
    """A direction between two ranks that was measured alone on the network."""

    source: int
    target: int
    bandwidth: float
    """Bytes/s of a large message."""
    latency: float
    """Seconds: half a round trip of a small message."""


@dataclass(frozen=True, kw_only=True)
class ProbedHost:
    """A host that was measured with all others at the same time."""

    host: str
    out: float
    """Bytes/s that it sends."""
    into: float
    """Bytes/s that it receives."""


@dataclass(frozen=True)
class _Host:
    devices: tuple[ProbedDevice, ...]
    intra: tuple[float, float] | None
    """Bytes/s and seconds between two of its devices."""
    nic: tuple[float, float] | None
    """Bytes/s and seconds of its NIC; None with a single host."""

    def is_like(self, host: _Host) -> bool:
        own, theirs = self._figures, host._figures
        if [d.kind for d in self.devices] != [d.kind for d in host.devices] or len(own) != len(
            theirs
        ):
            return False
        return all(
            abs(a - b) <= _MOST_DIFFERENCE * max(a, b) for a, b in zip(own, theirs, strict=True)
        )

    @property
    def _figures(self) -> list[float]:
        return [
            *map(_speed, self.devices),
            *(pair[0] for pair in (self.intra, self.nic) if pair is not None),
        ]


def cluster_toml(
    name: str,
    devices: Sequence[ProbedDevice],
    links: Iterable[ProbedLink],
    together: Iterable[ProbedHost] = (),
    *,
    measured: str = "measured",
) -> str:
    """Return the text of a cluster file; ``measured`` is a comment about the time and tool of the
    measurement."""
    at_once = {host.host: min(host.out, host.into) for host in together}
    pairs = {(link.source, link.target): link for link in links}
    ranks = {
        host: [d.rank for d in devices if d.host == host]
        for host in dict.fromkeys(d.host for d in devices)
    }
    hosts = {host: _host(host, devices, ranks, pairs, at_once.get(host, 0.0)) for host in ranks}
    groups: list[list[str]] = []
    for host in hosts:
        similar = next((group for group in groups if hosts[group[0]].is_like(hosts[host])), None)
        if similar is None:
            groups.append([host])
        else:
            similar.append(host)
    text = [f"# {measured}", f'name = "{name}"', ""]
    kinds = dict.fromkeys(
        _kind_name(device) for group in groups for device in hosts[group[0]].devices
    )
    text += [
        line
        for kind in kinds
        for line in _kind(kind, [d for d in devices if _kind_name(d) == kind])
    ]
    best = {kind: max(_speed(d) for d in devices if _kind_name(d) == kind) for kind in kinds}
    names: dict[str, str] = {}
    for index, group in enumerate(groups):
        letter = chr(ord("a") + index) if index < 26 else f"n{index}x"
        names |= {host: f"{letter}{at}" for at, host in enumerate(group)}
        text += _nodes(letter, group, [hosts[host] for host in group], best)
    for first, second in itertools.product(ranks, ranks):
        if first < second:
            text += _slow_pair(first, second, hosts, ranks, pairs, names)
    return "\n".join(text).rstrip() + "\n"


def _host(
    host: str,
    devices: Sequence[ProbedDevice],
    ranks: dict[str, list[int]],
    pairs: dict[tuple[int, int], ProbedLink],
    at_once: float,
) -> _Host:
    mine = set(ranks[host])
    inside = [link for (a, b), link in pairs.items() if a in mine and b in mine]
    outside = [link for (a, b), link in pairs.items() if (a in mine) != (b in mine)]
    nic = None
    if outside:
        nic = (
            max(at_once, *(link.bandwidth for link in outside)),
            min(link.latency for link in outside) / 2,
        )  # (1)
    return _Host(
        devices=tuple(device for device in devices if device.host == host),
        intra=_typical(inside) if inside else None,
        nic=nic,
    )


def _speed(device: ProbedDevice) -> float:
    """Return the FLOP/s by which devices of a kind are compared."""
    return dict(device.flops)[min(dict(device.flops))]


def _typical(links: Sequence[ProbedLink]) -> tuple[float, float]:
    return statistics.median(link.bandwidth for link in links), statistics.median(
        link.latency for link in links
    )


def _kind_name(device: ProbedDevice) -> str:
    kept = "".join(part if part.isalnum() or part in "-_" else "-" for part in device.kind.strip())
    return "-".join(part for part in kept.split("-") if part) or "device"


def _kind(name: str, devices: Sequence[ProbedDevice]) -> list[str]:
    """Return a ``[[kinds]]`` entry with the best of each rate; a slower device of the kind gets an
    efficiency below 1."""
    best = {
        dtype: max(dict(d.flops).get(dtype, 0.0) for d in devices) for dtype, _ in devices[0].flops
    }
    rates = ", ".join(f'{dtype} = "{COMPUTE.format(rate)}"' for dtype, rate in sorted(best.items()))
    lines = [
        "[[kinds]]",
        f'name = "{name}"',
        f'memory = "{SIZE.format(min(d.memory for d in devices))}"',
    ]
    lines += [f'memory_bandwidth = "{RATE.format(max(d.memory_bandwidth for d in devices))}"']
    lines += [f"flops = {{ {rates} }}", 'source = "measured: square matrix products and copies"']
    lines += [
        f"# {facts}" for facts in dict.fromkeys(device.facts for device in devices if device.facts)
    ]
    for dtype in best:
        sizes = [
            (size, rate) for d in devices[:1] for kind, size, rate in d.by_size if kind is dtype
        ]
        if sizes:
            lines.append(
                f"# {dtype}: " + ", ".join(f"{size}: {COMPUTE.short(rate)}" for size, rate in sizes)
            )
    return [*lines, ""]


def _nodes(
    letter: str, group: Sequence[str], hosts: Sequence[_Host], best: Mapping[str, float]
) -> list[str]:
    host = hosts[0]
    lines = ["[[nodes]]", f'name = "{letter}"', f"hosts = {json.dumps(list(group))}"]
    lines.append(f"devices = [{', '.join(_groups(hosts, best))}]")
    if len(host.devices) > 1:
        rate, latency = host.intra or (host.devices[0].memory_bandwidth, 0.0)
        lines.append(f'intra = [{{ medium = "local", {_pair(rate, latency)} }}]')
    if host.nic is not None:
        nics = [member.nic for member in hosts if member.nic is not None]
        rate = statistics.median(nic[0] for nic in nics)
        latency = statistics.median(nic[1] for nic in nics)
        lines.append(f"nic = {{ {_pair(rate, latency)} }}")
    return [*lines, ""]


def _groups(hosts: Sequence[_Host], best: Mapping[str, float]) -> list[str]:
    """Return runs of equal devices, each with its efficiency relative to the best of its kind."""
    rows: list[tuple[str, int]] = []
    for at, device in enumerate(hosts[0].devices):
        kind = _kind_name(device)
        efficiency = round(
            statistics.mean(_speed(host.devices[at]) for host in hosts) / best[kind], 2
        )
        row = f'kind = "{kind}"' + (
            f", efficiency = {max(efficiency, 0.01)}" if efficiency < _EQUAL_SHARE else ""
        )
        if rows and rows[-1][0] == row:
            rows[-1] = (row, rows[-1][1] + 1)
        else:
            rows.append((row, 1))
    return [f"{{ {row}{f', count = {count}' if count > 1 else ''} }}" for row, count in rows]


def _pair(rate: float, latency: float) -> str:
    return f'bandwidth = "{RATE.format(rate)}", latency = "{TIME.short(latency)}"'


def _slow_pair(
    first: str,
    second: str,
    hosts: dict[str, _Host],
    ranks: dict[str, list[int]],
    pairs: dict[tuple[int, int], ProbedLink],
    names: dict[str, str],
) -> list[str]:
    between = [pairs[a, b] for a in ranks[first] for b in ranks[second] if (a, b) in pairs]
    nics = [nic[0] for nic in (hosts[first].nic, hosts[second].nic) if nic is not None]
    if not between or len(nics) < 2:
        return []
    rate, latency = _typical(between)
    if rate >= _SLOW_PAIR_SHARE * min(nics):
        return []
    return [
        "[[links]]  # slower than both NICs",
        f'between = ["{names[first]}", "{names[second]}"]',
        f'name = "{names[first]}-{names[second]}"',
        *_pair(rate, latency).split(", "),
        "",
    ]
