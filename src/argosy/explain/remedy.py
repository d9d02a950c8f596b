"""What would make a plan fit: the smallest change of each kind, found by trying.

    (1)  a change of size n helps if some plan fits under it (``solve.feasible``)
    (2)  nearest change = the least n that helps, by doubling and bisection: more of it never hurts

(1) is exact at the granularity of the trial: single devices, unless there are so many that a coarser one is taken.
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

from argosy.cluster.file import build_cluster
from argosy.cluster.fitted import fitted
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.cost.memory import OPTIMIZER_BYTES
from argosy.document import Document
from argosy.dtype import Dtype
from argosy.errors import ArgosyError
from argosy.planner import Settings
from argosy.solve.feasible import Fit
from argosy.solve.unmeasured import Untimed, find_any_fit, find_untimed
from argosy.space.pool import Pool, able_pools
from argosy.space.price import Prices
from argosy.units import counted
from argosy.workload.chain import Chain

GIB = 2.0**30
_MOST_TIMES = 16
"""So many times the memory, nodes or samples are tried."""
_MOST_DEVICES = 4096
_STEP_TOKENS = 64

Reload = Callable[..., Chain]
"""The same model with another ``sequence_length``, ``dtype`` or ``optimizer``."""


class ChangeKind(StrEnum):
    MEMORY = "memory"
    DEVICES = "devices"
    SEQUENCE_LENGTH = "sequence_length"
    GLOBAL_BATCH = "global_batch"
    OPTIMIZER = "optimizer"
    DTYPE = "dtype"
    PROFILE = "profile"


@dataclass(frozen=True, kw_only=True)
class Change:
    """(2): one change with which a plan fits."""

    kind: ChangeKind
    sentence: str
    target: str
    """What is changed: a device kind, a group of nodes, the model."""
    value: float | str
    """GiB more per device, nodes more, tokens, samples, the name of an optimizer or dtype, or which times."""


@dataclass(frozen=True)
class Trial:
    """(1): an input, and whether a plan fits under it."""

    chain: Chain
    cluster: Cluster
    global_batch: int
    settings: Settings
    model: ComputeModel
    more: tuple[tuple[str, float], ...] = ()
    """Bytes more on each device of a kind."""
    factor: float = 1.0
    """Times the memory of every device."""

    @property
    def pools(self) -> tuple[Pool, ...]:
        more = dict(self.more)
        found = able_pools(self.chain, self.cluster, self.model)
        memory = [self.factor * (pool.device.kind.memory + more.get(pool.name, 0.0)) for pool in found]
        return tuple(
            replace(pool, device=replace(pool.device, kind=replace(pool.device.kind, memory=size)))
            for pool, size in zip(found, memory, strict=True)
        )

    @cached_property
    def untimed(self) -> Untimed | None:
        """What fits if profiles had more times."""
        prices = self.prices
        return find_untimed(prices, self.global_batch, self.settings) if prices.pools else None

    @property
    def prices(self) -> Prices:
        return Prices(self.chain, self.pools, self.model)

    def fit(self) -> Fit | None:
        prices = self.prices
        if not prices.pools:
            return None
        return find_any_fit(prices, self.global_batch, self.settings)


def nearest_changes(trial: Trial, reload: Reload | None) -> Iterator[Change]:
    """(2), one kind after the other."""
    yield from _more_times(trial)
    yield from _more_memory(trial)
    yield from _more_nodes(trial)
    yield from _more_samples(trial)
    if reload is not None:
        yield from _shorter(trial, reload)
        yield from _lighter(trial, reload)


def _least(fits: Callable[[int], bool], most: int) -> int | None:
    """The least whole number of at least 1 for which something fits, where more is never worse; None beyond
    ``most``."""
    low, high = 0, 1
    while not fits(high):
        if high >= most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _more_times(trial: Trial) -> Iterator[Change]:
    """Measurements that profiles lack."""
    if trial.untimed is not None:
        sentence = f"measured times of {trial.chain.name} on {trial.untimed.named}"
        kinds = ", ".join(dict.fromkeys(one.kind for one in trial.untimed.missing))
        yield Change(kind=ChangeKind.PROFILE, sentence=sentence, target=kinds, value=trial.untimed.named)


def _more_memory(trial: Trial) -> Iterator[Change]:
    memory = {pool.name: pool.device.kind.memory for pool in trial.pools}
    for kind, size in memory.items():
        most = math.ceil(_MOST_TIMES * size / GIB)
        least = _least(lambda more, kind=kind: replace(trial, more=((kind, more * GIB),)).fit() is not None, most)  # type: ignore[misc]
        if least is not None:
            sentence = f"{least} GiB more memory on each {kind}"
            yield Change(kind=ChangeKind.MEMORY, sentence=sentence, target=kind, value=least)


def _more_nodes(trial: Trial) -> Iterator[Change]:
    nodes = json.loads(trial.cluster.content).get("nodes", [])
    for index, node in enumerate(nodes):
        have = node.get("count", 1)
        with contextlib.suppress(ArgosyError):  # a file that names its nodes one by one may not take more of them
            size = sum(1 for device in trial.cluster.devices if device.node == f"{node['name']}0")
            most = min(_MOST_TIMES * have, (_MOST_DEVICES - len(trial.cluster.devices)) // size)
            least = _least(
                lambda more, index=index: (
                    replace(trial, cluster=with_more_nodes(trial.cluster, index, more)).fit()  # type: ignore[misc]
                    is not None
                ),
                max(1, most),
            )
            if least is not None:
                kinds = trial.cluster.device(f"{node['name']}0.0").kind.name
                each = counted(size, "device") if size > 1 else kinds
                sentence = f"{counted(least, 'more node')} like {node['name']}0, of {each} each"
                yield Change(kind=ChangeKind.DEVICES, sentence=sentence, target=node["name"], value=least)


def with_more_nodes(cluster: Cluster, index: int, more: int) -> Cluster:
    """The cluster with so many more of the nodes that one [[nodes]] entry of its file stands for."""
    content = json.loads(cluster.content)
    node = content["nodes"][index]
    content["nodes"][index] = {**node, "count": node.get("count", 1) + more}
    return fitted(build_cluster(Document(cluster.name, content, {}), folder=Path()), cluster.fit)


def _more_samples(trial: Trial) -> Iterator[Change]:
    """More samples can be shared by more replicas, which then share their state."""
    batch = trial.global_batch
    for size in (batch * times for times in (2, 4, 8, 16) if times <= _MOST_TIMES):
        if replace(trial, global_batch=size).fit() is not None:
            sentence = f"a global batch of {size}{'' if trial.model.profiles else ', which more replicas can share'}"
            yield Change(kind=ChangeKind.GLOBAL_BATCH, sentence=sentence, target="global_batch", value=size)
            return


def _shorter(trial: Trial, reload: Reload) -> Iterator[Change]:
    length = trial.chain.sequence_length
    if any(profile.sequence_length != 1 for profile in (trial.model.profiles or {}).values()):
        return  # times of one length only
    step = min(_STEP_TOKENS, max(1, length // 8))
    cuts = (length - 1) // step

    def fits(cut: int) -> bool:
        return replace(trial, chain=reload(sequence_length=step * (cuts + 1 - cut))).fit() is not None

    with contextlib.suppress(ArgosyError):  # a model of one length only
        least = _least(fits, cuts) if cuts else None
        if least is not None:
            tokens = step * (cuts + 1 - least)
            sentence = f"sequences of {tokens} tokens in place of {length}"
            yield Change(kind=ChangeKind.SEQUENCE_LENGTH, sentence=sentence, target=trial.chain.name, value=tokens)


def _lighter(trial: Trial, reload: Reload) -> Iterator[Change]:
    chain = trial.chain
    ranked = sorted(OPTIMIZER_BYTES, key=lambda name: (-OPTIMIZER_BYTES[name], name != "lion"))
    lighter = [name for name in ranked if OPTIMIZER_BYTES[name] < OPTIMIZER_BYTES[chain.optimizer]]
    for name in lighter:
        if replace(trial, chain=reload(optimizer=name)).fit() is not None:
            sentence = f"the optimizer {name} in place of {chain.optimizer}"
            yield Change(kind=ChangeKind.OPTIMIZER, sentence=sentence, target=chain.name, value=name)
            break
    for dtype in (Dtype.BF16, Dtype.FP16):
        with contextlib.suppress(ArgosyError):  # a model that was measured in one dtype
            if dtype is not chain.dtype and replace(trial, chain=reload(dtype=str(dtype))).fit() is not None:
                sentence = f"{dtype} in place of {chain.dtype}"
                yield Change(kind=ChangeKind.DTYPE, sentence=sentence, target=chain.name, value=str(dtype))
                return
