"""Every option of a sub-problem: the vectors of devices that a stage may take, and the ways to run on each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from argosy.plan.plan import Recompute
from argosy.plan.runnable import RECOMPUTE, TENSOR_WIDTH, ZERO
from argosy.space.option import Option, Part, Vector, share_samples, tensor_widths
from argosy.space.pool import Pool
from argosy.space.price import Prices, widest
from argosy.space.prune import Counters, fits_nowhere, without_dominated


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Which plans are searched; a certificate states it."""

    units: Vector
    """Devices of each pool that are taken together."""
    mixed: bool = True
    """Whether a stage may mix pools."""
    recompute: tuple[Recompute, ...] = (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)
    zero: tuple[int, ...] = (1, 0, 2, 3)
    """For stages with several replicas; a single replica has nothing to share."""
    widths: tuple[int, ...] | None = None
    """Tensor-parallel groups of these sizes only; by default of every size that a node and the layers allow."""
    prune: bool = True

    def counts(self, pools: Sequence[Pool]) -> Vector:
        """Units in each pool; what is left over is not used at this granularity."""
        return tuple(pool.count // unit for pool, unit in zip(pools, self.units, strict=True))

    def describe(self, pools: Sequence[Pool]) -> str:
        """For a certificate: ``stages of multiples of 8x A100-80GB, 8x T4, of one kind each, ...``."""
        units = ", ".join(f"{unit}x {pool.name}" for unit, pool in zip(self.units, pools, strict=True))
        kinds = "" if self.mixed or len(pools) == 1 else ", of one kind each"
        recompute = "/".join(self.recompute)
        zero = "/".join(map(str, sorted(self.zero)))
        width = f", tensor width {'/'.join(map(str, self.widths))}" if self.widths is not None else ""
        return f"stages of multiples of {units}{kinds}, recompute {recompute}, ZeRO {zero}{width}"

    def allows_width(self, width: int) -> bool:
        return self.widths is None or width in self.widths


def only_runnable(scope: Scope) -> Scope:
    """What of a scope our runtime executes."""
    return replace(
        scope,
        recompute=tuple(recompute for recompute in scope.recompute if str(recompute) in RECOMPUTE.runs),
        zero=tuple(zero for zero in scope.zero if zero in ZERO.runs),
        widths=tuple(int(width) for width in TENSOR_WIDTH.runs),
    )


def vectors(pools: Sequence[Pool], scope: Scope) -> Iterator[Vector]:
    """In units: any number from one pool; from two; and, of more than two pools, all there is."""
    counts = scope.counts(pools)
    empty = (0,) * len(pools)
    for index, count in enumerate(counts):
        for number in range(1, count + 1):
            yield (*empty[:index], number, *empty[index + 1 :])
    if not scope.mixed:
        return
    for (one, most), (other, at_most) in itertools.combinations(enumerate(counts), 2):
        for number, partner in itertools.product(range(1, most + 1), range(1, at_most + 1)):
            vector = list(empty)
            vector[one], vector[other] = number, partner
            yield tuple(vector)
    if sum(count > 0 for count in counts) > 2:
        yield counts


def stage_options(prices: Prices, micro_batch: int, scope: Scope, counters: Counters) -> dict[Vector, list[Option]]:
    """All options by vector, less what the rules remove; vectors without options are left out."""
    most = widest(prices.chain.layers)
    result: dict[Vector, list[Option]] = {}
    for vector in vectors(prices.pools, scope):
        devices = tuple(number * unit for number, unit in zip(vector, scope.units, strict=True))
        found = list(_options_of(prices, micro_batch, devices, most, scope, counters))
        if scope.prune:
            found = without_dominated(found, counters)
        if found:
            result[vector] = found
    return result


def _options_of(
    prices: Prices, micro_batch: int, devices: Vector, most: int, scope: Scope, counters: Counters
) -> Iterator[Option]:
    taken = [(pool, number) for pool, number in enumerate(devices) if number]
    widths = [
        [width for width in tensor_widths(prices.pools[pool], number, most) if scope.allows_width(width)]
        for pool, number in taken
    ]
    for choice in itertools.product(*widths):
        groups = [(pool, width, number // width) for (pool, number), width in zip(taken, choice, strict=True)]
        for recompute in scope.recompute:
            parts = share_samples(prices, groups, micro_batch, recompute)
            if parts is None:
                counters.add("divisibility")
                break
            yield from _with_zero(prices, devices, parts, recompute, scope, counters)


def _with_zero(
    prices: Prices, devices: Vector, parts: tuple[Part, ...], recompute: Recompute, scope: Scope, counters: Counters
) -> Iterator[Option]:
    alone = sum(part.replicas for part in parts) == 1
    for zero in (0,) if alone else scope.zero:
        option = Option(prices=prices, vector=devices, parts=parts, recompute=recompute, zero=zero)
        if scope.prune and fits_nowhere(option):
            counters.add("memory")
        else:
            yield option
