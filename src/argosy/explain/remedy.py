"""Find the smallest change of each kind with which a plan fits, by trial.

    (1)  a change of size n helps if some plan fits under it (``solve.feasible``)
    (2)  nearest change = the least n that helps, by doubling and bisection: a larger change is
         never worse
    (3)  its step time is that of the plan which the planner finds under it

(1) is exact at the granularity of the trial: single devices, or coarser if there are too many.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from argosy.cluster.catalogue import catalogue
from argosy.cluster.file import build_cluster
from argosy.cluster.fitted import fitted
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.document import Document
from argosy.errors import ArgosyError
from argosy.planner import Settings, find_plan
from argosy.solve.even import EvenSearch
from argosy.solve.feasible import FittingPlan
from argosy.solve.settings import for_target
from argosy.solve.unmeasured import Untimed, find_any_fit, find_untimed
from argosy.space.pool import Pool, able_pools
from argosy.space.price import Prices
from argosy.units import GIB, counted
from argosy.workload.chain import Chain

# The largest factor of memory, nodes or samples that is tried.
_MOST_TIMES = 16
# The largest number of devices of a cluster with more nodes.
_MOST_DEVICES = 4096
# The largest number of device kinds of the catalogue that are tried instead of one kind.
_MOST_CARDS = 8

# The CPU seconds of the search for (3).
_SECONDS = 1.5


class ChangeKind(StrEnum):
    """The kinds of changes that may make a plan fit."""

    MEMORY = "memory"
    DEVICES = "devices"
    SEQUENCE_LENGTH = "sequence_length"
    GLOBAL_BATCH = "global_batch"
    OPTIMIZER = "optimizer"
    OFFLOAD = "offload"
    TUNING = "tuning"
    CARD = "card"
    SEVERAL = "several"
    DTYPE = "dtype"
    PROFILE = "profile"


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change with which a plan fits (2)."""

    kind: ChangeKind
    sentence: str
    target: str
    """The changed object: a device kind, a group of nodes, the model."""
    value: float | str
    """The new value: GiB more per device, more nodes, tokens, samples, the name of an optimizer,
    dtype or card, the weights that are trained, or the measured times."""
    options: tuple[tuple[str, str], ...] = ()
    """Options of ``argosy plan`` that make the change."""
    seconds: float | None = None
    """The step time in seconds (3); None if it was not planned."""


@dataclass(frozen=True)
class RemedyTrial:
    """An input for which it can be tested whether a plan fits (1)."""

    chain: Chain
    cluster: Cluster
    global_batch: int
    settings: Settings
    model: ComputeModel
    more: tuple[tuple[str, float], ...] = ()
    """Bytes more on each device of a kind."""
    factor: float = 1.0
    """The factor by which the memory of every device is multiplied."""

    @property
    def pools(self) -> tuple[Pool, ...]:
        """Return the pools of usable devices with the changed memory."""
        more = dict(self.more)
        pools = able_pools(self.chain, self.cluster, self.model)
        memory = [
            self.factor * (pool.device.kind.memory + more.get(pool.name, 0.0)) for pool in pools
        ]
        return tuple(
            replace(pool, device=replace(pool.device, kind=replace(pool.device.kind, memory=size)))
            for pool, size in zip(pools, memory, strict=True)
        )

    @cached_property
    def untimed(self) -> Untimed | None:
        """Return a plan that would fit if profiles had more times; None if there is none."""
        prices = self.prices
        return find_untimed(prices, self.global_batch, self.settings) if prices.pools else None

    @property
    def prices(self) -> Prices:
        """Return the prices of the model on the changed pools."""
        return Prices(self.chain, self.pools, self.model)

    @cached_property
    def seconds(self) -> float | None:
        """Return the step time in seconds (3); None if the planner finds no plan."""
        settings = replace(
            self.settings,
            level=1,
            time_budget=min(self.settings.time_budget, _SECONDS),
            progress=None,
        )
        if self.more or self.factor != 1.0:
            return None
        try:
            plan = find_plan(
                self.chain,
                self.cluster,
                global_batch=self.global_batch,
                settings=settings,
                model=self.model,
            )
        except ArgosyError:
            return None
        return None if plan.predicted is None else plan.predicted.iteration_seconds

    def fit(self) -> FittingPlan | None:
        """Return a plan that fits; None if there is none (1)."""
        prices = self.prices
        if not prices.pools:
            return None
        fits = (find_any_fit(prices, self.global_batch, each) for each in self.searches())
        return next((fit for fit in fits if fit is not None), None)

    def searches(self) -> Iterator[Settings]:
        """Yield the settings of every search that the planner makes for this input: several for a
        system whose stages have equal grids."""
        settings = for_target(self.settings, self.chain)
        if settings.target is None and not settings.even_shares:
            yield settings
            return
        job = (self.chain, self.cluster, self.global_batch, settings, self.model)
        yield from EvenSearch(*job).variants()


def hardware_changes(trial: RemedyTrial) -> Iterator[Change]:
    """Yield the nearest changes of devices, measurements and the batch (2)."""
    yield from _more_times(trial)
    for change in _more_memory(trial):
        yield change
        yield from _larger_card(trial, change)
    yield from _more_nodes(trial)
    yield from _more_samples(trial)


def least_that_fits(fits: Callable[[int], bool], most: int) -> int | None:
    """Return the smallest number from 1 to ``most`` that fits; None if none does.

    A larger number must never be worse.
    """
    low, high = 0, 1
    while not fits(high):
        if high >= most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _more_times(trial: RemedyTrial) -> Iterator[Change]:
    """Yield the measurements that profiles lack."""
    if trial.untimed is not None:
        sentence = f"measured times of {trial.chain.name} on {trial.untimed.named}"
        kinds = ", ".join(dict.fromkeys(untimed.kind for untimed in trial.untimed.missing))
        yield Change(
            kind=ChangeKind.PROFILE, sentence=sentence, target=kinds, value=trial.untimed.named
        )


def _more_memory(trial: RemedyTrial) -> Iterator[Change]:
    """Yield the least additional memory of each device kind with which a plan fits."""
    memory = {pool.name: pool.device.kind.memory for pool in trial.pools}
    for kind, size in memory.items():
        most = math.ceil(_MOST_TIMES * size / GIB)

        def fits(more: int, kind: str = kind) -> bool:
            return replace(trial, more=((kind, float(more * GIB)),)).fit() is not None

        least = least_that_fits(fits, most)
        if least is not None:
            sentence = f"{least} GiB more memory on each {kind}"
            yield Change(kind=ChangeKind.MEMORY, sentence=sentence, target=kind, value=least)


def _larger_card(trial: RemedyTrial, change: Change) -> Iterator[Change]:
    """Yield the smallest card of the catalogue that has the missing memory, instead of each of a
    kind."""
    pool = next(pool for pool in trial.pools if pool.name == change.target)
    least = pool.device.kind.memory + float(change.value) * GIB
    able = [
        kind
        for kind in catalogue()
        if trial.chain.dtype in dict(kind.flops) and kind.memory >= least
    ]
    same = [kind for kind in able if kind.vendor == pool.device.kind.vendor]
    for kind in sorted(same, key=lambda kind: (kind.memory, kind.peak(trial.chain.dtype)))[
        :_MOST_CARDS
    ]:
        # A device kind of the user's own may not occur in the file.
        with contextlib.suppress(ArgosyError):
            changed = replace(trial, cluster=with_kind(trial.cluster, change.target, kind.name))
            if changed.fit() is not None:
                sentence = f"{kind.name} in place of each {change.target}"
                target, seconds = change.target, changed.seconds
                yield Change(
                    kind=ChangeKind.CARD,
                    sentence=sentence,
                    target=target,
                    value=kind.name,
                    seconds=seconds,
                )
                return


def _content_at_start(cluster: Cluster) -> dict[str, Any]:
    """Return the content of a cluster with the first value of every change: remedies are tried at
    time 0, and traces may have millions of values."""
    content: dict[str, Any] = json.loads(cluster.content)
    for change in content.get("changes", ()):
        for key in change.keys() & {"steps", "latency_steps"}:
            change[key] = change[key][:1]
    return content


def with_kind(cluster: Cluster, old: str, new: str) -> Cluster:
    """Return the cluster with each device of a kind replaced by a device of another kind."""
    content = _content_at_start(cluster)
    for node in content["nodes"]:
        devices = node["devices"] if isinstance(node["devices"], list) else [node["devices"]]
        node["devices"] = [
            {**device, "kind": new} if device["kind"].lower() == old.lower() else device
            for device in devices
        ]
    return fitted(build_cluster(Document(cluster.name, content, {}), folder=Path()), cluster.fit)


def _more_nodes(trial: RemedyTrial) -> Iterator[Change]:
    """Yield the smallest number of additional nodes of each group with which a plan fits."""
    nodes = json.loads(trial.cluster.content).get("nodes", [])
    for index, node in enumerate(nodes):
        have = node.get("count", 1)
        # A file that names its nodes one by one may not allow more of them.
        with contextlib.suppress(ArgosyError):
            size = sum(1 for device in trial.cluster.devices if device.node == f"{node['name']}0")
            most = min(_MOST_TIMES * have, (_MOST_DEVICES - len(trial.cluster.devices)) // size)

            def fits(more: int, index: int = index) -> bool:
                larger = with_more_nodes(trial.cluster, index, more)
                return replace(trial, cluster=larger).fit() is not None

            least = least_that_fits(fits, max(1, most))
            if least is not None:
                kinds = trial.cluster.device(f"{node['name']}0.0").kind.name
                per_node = counted(size, "device") if size > 1 else kinds
                sentence = f"{counted(least, 'more node')} like {node['name']}0, of {per_node} each"
                seconds = replace(
                    trial, cluster=with_more_nodes(trial.cluster, index, least)
                ).seconds
                kind, target = ChangeKind.DEVICES, node["name"]
                yield Change(
                    kind=kind, sentence=sentence, target=target, value=least, seconds=seconds
                )


def with_more_nodes(cluster: Cluster, index: int, more: int) -> Cluster:
    """Return the cluster with ``more`` nodes of the [[nodes]] entry with this index in its file."""
    content = _content_at_start(cluster)
    node = content["nodes"][index]
    content["nodes"][index] = {**node, "count": node.get("count", 1) + more}
    return fitted(build_cluster(Document(cluster.name, content, {}), folder=Path()), cluster.fit)


def _more_samples(trial: RemedyTrial) -> Iterator[Change]:
    """Yield the smallest larger global batch that fits: more replicas can divide it and share
    state."""
    batch = trial.global_batch
    for size in (batch * times for times in (2, 4, 8, 16) if times <= _MOST_TIMES):
        changed = replace(trial, global_batch=size)
        if changed.fit() is not None:
            reason = "" if trial.model.profiles else ", which more replicas can share"
            sentence = f"a global batch of {size}{reason}"
            yield Change(
                kind=ChangeKind.GLOBAL_BATCH,
                sentence=sentence,
                target="global_batch",
                value=size,
                options=(("--global-batch", str(size)),),
                seconds=changed.seconds,
            )
            return
