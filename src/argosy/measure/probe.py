"""Measure this rank's device and, with others, the links between all ranks.

    (1)  FLOP/s        2 n^3 over the mean time of an n x n product, for several n and dtypes
    (2)  memory        2 N over the mean time of copying N bytes
    (3)  latency       half of the least round trip of a small message
    (4)  bandwidth     N over the time of N bytes, less (3)
    (5)  of a host     if it sends to all other hosts at once, or they to it, b_f bytes in flow f
                       until t_f:
                       max over flows g of (sum of b_f - sum of r_f (t_f - t_g) over the flows that
                       end after g) / t_g, r_f being (4) of the flow alone: no more than the mean of
                       all flows together until t_g

All devices are measured at the same time, because devices that share a host or a card are slower
together. Links are measured one pair at a time: a rate is that of an empty network. Each takes
about ``seconds``.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.cluster.probe_notes import ProbeNotes, device_of, read_notes
from argosy.cluster.probed import ProbedDevice, ProbedHost, ProbedLink
from argosy.dtype import Dtype
from argosy.measure.cards import card_facts
from argosy.runtime.processes.world import gather_texts
from argosy.units import MIB

_DTYPES = {Dtype.FP32: torch.float32, Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16}
"""Dtypes of products that are measured."""
_SIZES = {"cpu": (256, 512, 1024), "cuda": (1024, 2048, 4096, 8192)}
"""Sizes n of products by type of device; the best rate of all counts."""
# Elements of a message whose time is all latency.
_SMALL = 8
# Bytes of the largest message, which bounds the memory of a probe.
_MOST_BYTES = 64 * MIB
Report = Callable[[str], None]
"""A function that is called with what is measured next."""


def probe_device(*, seconds: float = 0.3, rank: int = 0) -> ProbedDevice:
    """Measure (1) and (2) on this process's device."""
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    rows = [
        (dtype, size, _product_rate(size, kind, device, seconds))
        for dtype, kind in _DTYPES.items()
        if device.type == "cuda" or dtype is not Dtype.FP16
        for size in _SIZES[device.type]
    ]
    best = {
        dtype: max(rate for measured_dtype, _, rate in rows if measured_dtype is dtype)
        for dtype, _, _ in rows
    }
    return ProbedDevice(
        rank=rank,
        host=_host_name(),
        kind=torch.cuda.get_device_name() if device.type == "cuda" else f"CPU-{platform.machine()}",
        memory=_memory(device),
        memory_bandwidth=_copy_rate(device, seconds),
        flops=tuple(sorted(best.items())),
        by_size=tuple(rows),
        facts=card_facts(torch.cuda.current_device()) if device.type == "cuda" else "",
    )


def _host_name() -> str:
    """Return this host's name; in a lab, the emulated host's."""
    emulated = os.environ.get("ARGOSY_DEVICE")
    return socket.gethostname() if emulated is None else emulated.split(".")[0]


def _memory(device: torch.device) -> float:
    """Return the bytes that this rank may use: its card's, or its share of the host's."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return whole / int(os.environ.get("WORLD_SIZE", "1"))


def _product_rate(size: int, dtype: torch.dtype, device: torch.device, seconds: float) -> float:
    matrix = torch.randn(size, size, dtype=dtype, device=device)
    return 2 * size**3 / _sustained_seconds(lambda: matrix @ matrix, device, seconds)


def _copy_rate(device: torch.device, seconds: float) -> float:
    source = torch.zeros(
        2**26 if device.type == "cuda" else 2**23, dtype=torch.float32, device=device
    )
    target = torch.empty_like(source)
    return 8 * source.numel() / _sustained_seconds(lambda: target.copy_(source), device, seconds)


def _sustained_seconds(work: Callable[[], Tensor], device: torch.device, seconds: float) -> float:
    """Return the mean seconds of a call. The mean is used, not the median, because a throttled
    device does nothing for part of every period."""

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    work()
    finish()
    began, count = time.perf_counter(), 0
    while (taken := time.perf_counter() - began) < seconds or count < 2:
        work()
        finish()
        count += 1
    return taken / count


def probe_links(notes: ProbeNotes, *, seconds: float, report: Report) -> Iterator[ProbedLink]:
    """Yield (3) and (4) for every ordered pair of ranks that is not in the notes, each measured
    alone; every rank must iterate."""
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    for source in range(world):
        for target in range(world):
            if source == target or notes.link(source, target) is not None:
                continue
            report(f"link {source} to {target}, {len(notes.links) + 1} of {world * (world - 1)}")
            result = torch.zeros(2, dtype=torch.float64, device=device)
            if rank == source:
                result = torch.tensor(
                    _measure_as_source(target, device, seconds), dtype=torch.float64, device=device
                )
            elif rank == target:
                _answer_as_target(source, device)
            dist.broadcast(result, source)
            bandwidth, latency = result.tolist()
            yield ProbedLink(source=source, target=target, bandwidth=bandwidth, latency=latency)


def _measure_as_source(target: int, device: torch.device, seconds: float) -> tuple[float, float]:
    """Return bandwidth and latency to a target: announce the size of each message, send it, and
    wait for the answer."""
    small = min(_exchange(target, _SMALL, device) for _ in range(6))
    count = 16 * 1024
    taken = _exchange(target, count, device)
    while taken < seconds and 4 * count < _MOST_BYTES:
        count *= 4 if taken < seconds / 8 else 2
        taken = _exchange(target, count, device)
    _announce(target, 0, device)
    return 4 * count / max(taken - small, 1e-9), small / 2


def _exchange(target: int, count: int, device: torch.device) -> float:
    _announce(target, count, device)
    message, answer = torch.zeros(count, device=device), torch.zeros(1, device=device)
    began = time.perf_counter()
    dist.send(message, target)
    dist.recv(answer, target)
    answer.item()
    return time.perf_counter() - began


def _announce(target: int, count: int, device: torch.device) -> None:
    dist.send(torch.tensor([count], dtype=torch.int64, device=device), target)
    dist.recv(torch.zeros(1, device=device), target)


def _answer_as_target(source: int, device: torch.device) -> None:
    while True:
        size = torch.zeros(1, dtype=torch.int64, device=device)
        dist.recv(size, source)
        count = int(size.item())
        message = torch.empty(count, device=device)
        dist.send(torch.zeros(1, device=device), source)
        if not count:
            return
        dist.recv(message, source)
        dist.send(torch.zeros(1, device=device), source)


def probe_hosts(notes: ProbeNotes, *, seconds: float, report: Report) -> Iterator[ProbedHost]:
    """Yield (5) for every host that is not in the notes; every rank must iterate. With two hosts it
    equals (4), and is not measured again."""
    devices = notes.devices
    ranks: dict[str, list[int]] = {}
    for device in devices:
        ranks.setdefault(device.host, []).append(device.rank)
    rates = {(link.source, link.target): link.bandwidth for link in notes.links}
    for host, mine in ranks.items() if len(ranks) > 2 else ():
        if notes.host(host) is not None:
            continue
        report(f"{host} with all others at once")
        others = [there for name, there in ranks.items() if name != host]
        pairs = [(mine[at % len(mine)], there[0]) for at, there in enumerate(others)]
        out, into = (
            {pair: rates[pair] for pair in way} for way in (pairs, [(b, a) for a, b in pairs])
        )
        yield ProbedHost(host=host, out=_together(out, seconds), into=_together(into, seconds))


def _together(rates: Mapping[tuple[int, int], float], seconds: float) -> float:
    """Measure (5), each flow with as many bytes as take ``seconds`` alone."""
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    rank = dist.get_rank()
    counts = [max(_SMALL, int(min(_MOST_BYTES, rate * seconds)) // 4) for rate in rates.values()]
    transfers, coming = [], []
    for at, ((source, target), count) in enumerate(zip(rates, counts, strict=True)):
        if rank == source:
            transfers.append(dist.P2POp(dist.isend, torch.zeros(count, device=device), target))
        elif rank == target:
            coming.append((at, len(transfers)))
            transfers.append(dist.P2POp(dist.irecv, torch.empty(count, device=device), source))
    ends = torch.zeros(len(rates), dtype=torch.float64)
    dist.barrier()
    began = time.perf_counter()
    works = dist.batch_isend_irecv(transfers) if transfers else []

    def wait(at: int, place: int) -> None:
        works[min(place, len(works) - 1)].wait()  # NCCL has one handle for all
        if device.type == "cuda":
            torch.cuda.synchronize()
        ends[at] = time.perf_counter() - began

    # Flows end in an unknown order, so each has a thread that waits for it.
    waiting = [threading.Thread(target=wait, args=pair) for pair in coming]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join()
    for work in works if not coming else ():
        work.wait()
    ends = ends.to(device)
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    return _total([4 * count for count in counts], list(rates.values()), ends.tolist())


def _total(sizes: Sequence[float], rates: Sequence[float], ends: Sequence[float]) -> float:
    """Return the rate (5) in bytes/s.

    >>> _total([40, 40], [40, 40], [1.0, 1.0]), _total([40, 40], [40, 40], [1.2, 1.5])
    (80.0, 56.66666666666667)
    >>> _total([1, 1], [1, 1], [2, 2])
    1.0
    """
    flows = list(zip(rates, ends, strict=True))
    return max((sum(sizes) - sum(r * (t - end) for r, t in flows if t > end)) / end for end in ends)


def probe_all(
    notes: ProbeNotes, *, seconds: float = 0.3, report: Report = lambda text: None
) -> None:
    """Measure every rank's device, all at the same time, then every link, then every host's links,
    into ``notes``, equally on all ranks; what they already contain is not measured again."""
    if not dist.is_initialized():
        notes.keep_if_made_by([_host_name()])
        if not notes.devices:
            report("this machine's device")
            notes.devices = [probe_device(seconds=seconds)]
            notes.save()
        return
    where = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    known = read_notes(gather_texts(notes.text(), where)[0])
    notes.devices, notes.links, notes.hosts = known.devices, known.links, known.hosts
    notes.keep_if_made_by(gather_texts(_host_name(), where))
    if not notes.devices:
        report(f"{dist.get_world_size()} devices, all at once")
        dist.barrier()
        mine = probe_device(seconds=seconds, rank=dist.get_rank())
        notes.devices = [device_of(text) for text in gather_texts(json.dumps(asdict(mine)), where)]
        notes.save()
    for link in probe_links(notes, seconds=seconds, report=report):
        notes.links.append(link)
        notes.save()
    for host in probe_hosts(notes, seconds=seconds, report=report):
        notes.hosts.append(host)
        notes.save()
