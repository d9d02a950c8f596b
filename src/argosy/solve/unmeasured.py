"""Find the measurements that would allow a plan, if none is found because times are missing, not
memory.

A search omits options for which a profile has no times. If it finds nothing, it is repeated under
profiles that are completed with times for

    (1)  any number of samples, at the tensor widths that were measured
    (2)  any tensor width, for the samples that were measured
    (3)  any of both, and any layer and dtype

for one kind of device after the other, then for all. The first of these under which a plan fits in
memory (``solve.feasible``) is the limit, and the times which that plan needs are those to measure.
Only memory counts in this check: the invented times share the samples of a stage of several kinds,
and mean nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from argosy.cluster.topology import Cluster
from argosy.solve.feasible import FittingPlan, batch_shapes, find_fit, quick_units
from argosy.solve.finalists.verdict import named, why_infeasible
from argosy.solve.settings import Settings, search_scope
from argosy.space.enumerate import with_splits
from argosy.space.price import Prices
from argosy.space.widths import node_widths
from argosy.units import counted
from argosy.workload.chain import Chain
from argosy.workload.profile import Profile, ProfileRow


@dataclass(frozen=True, kw_only=True)
class MissingTimes:
    """The times that a profile lacks for some plan."""

    kind: str
    """Kind of the devices."""
    tensor_width: int
    fewest: int
    """Fewest samples of a replica."""
    most: int
    layers: tuple[str, ...]
    """Layers without any time at this width, if others have some; named as in a profile."""

    def __str__(self) -> str:
        numbers = (
            f"{self.fewest} to {self.most} samples"
            if self.most > self.fewest
            else counted(self.most, "sample")
        )
        layers = f" of {', '.join(self.layers)}" if self.layers else ""
        return f"{self.kind}{layers} at tensor width {self.tensor_width} for {numbers}"


@dataclass(frozen=True, kw_only=True)
class Untimed:
    """A plan that fits in memory but was not considered, because times are missing."""

    fit: FittingPlan
    prices: Prices
    """Prices with completed profiles."""
    missing: tuple[MissingTimes, ...]

    @property
    def named(self) -> str:
        """Return a list such as ``RTX-A6000 at tensor width 1 for 4 samples and ...``."""
        return " and on ".join(map(str, self.missing))


def find_any_fit(prices: Prices, global_batch: int, settings: Settings) -> FittingPlan | None:
    """Return a plan that fits in memory, fast or not, at the finest granularity that is quick to
    check; one with groups across nodes if no other fits, as in a search."""
    units = quick_units(prices.pools, settings.units)
    scope = with_splits(search_scope(settings, prices.pools, units), prices)
    found = find_fit(prices, batch_shapes(global_batch, settings.schedules), scope)
    if found is None and settings.may_span and not scope.spanning:
        return find_any_fit(prices, global_batch, replace(settings, spanning=True))
    return found


def find_untimed(prices: Prices, global_batch: int, settings: Settings) -> Untimed | None:
    """Return a plan that more measurements would allow, by (1) to (3); None if times are not the
    reason."""
    profiles = prices.model.profiles or {}
    kinds = [kind for kind in dict.fromkeys(pool.name for pool in prices.pools) if kind in profiles]
    subsets = [(kind,) for kind in kinds] + ([tuple(kinds)] if len(kinds) > 1 else [])
    if (
        not kinds
        or find_any_fit(_with_times(prices, kinds, _more_of_all), global_batch, settings) is None
    ):
        return None  # nothing fits, even if everything were measured
    if find_any_fit(prices, global_batch, settings) is not None:
        return None
    for more in (_more_samples, _more_widths, _more_of_all):
        for subset in subsets:
            trial = _with_times(prices, subset, more)
            fit = find_any_fit(trial, global_batch, settings)
            if fit is not None:
                return Untimed(fit=fit, prices=trial, missing=tuple(_missing(fit, prices)))
    return None


def _with_times(
    prices: Prices, kinds: Sequence[str], more: Callable[[Prices, str], list[tuple[int, int]]]
) -> Prices:
    """Return prices with the profiles of some kinds completed."""
    filled = {kind: _filled(prices, _profile(prices, kind), more(prices, kind)) for kind in kinds}
    profiles = {**(prices.model.profiles or {}), **filled}
    return Prices(prices.chain, prices.pools, replace(prices.model, profiles=profiles))


def why_untimed(untimed: Untimed, prices: Prices, cluster: Cluster) -> str:
    """Return a message that names the plan that lacks times, the times that exist, and what to
    do."""
    chain, profiles = prices.chain, prices.model.profiles or {}
    kinds = dict.fromkeys(times.kind for times in untimed.missing)
    have = "; ".join(
        f"the profile of {profiles[kind].model} for {kind} has {_known(prices, kind)}"
        for kind in kinds
    )
    roofline = chain.forward_flop and all(_has_roofline(prices, kind) for kind in kinds)
    otherwise = ", or plan without the profile, by the roofline" if roofline else ""
    return (
        f"no plan of {named(chain)} on {cluster!r} because measured times are missing, not memory: "
        f"a plan fits that needs {chain.dtype} times on {untimed.named}, but {have}; "
        f"measure them (argosy profile){otherwise}"
    )


def why_no_device(chain: Chain, cluster: Cluster) -> str:
    """Return the reason why no device of a cluster can run a chain."""
    lost = all(device.speed.at(0) == 0 for device in cluster.devices)
    why = "is there at time 0" if lost else f"has {chain.dtype}, the dtype of {chain.name}"
    return f"no device of {cluster!r} {why}"


def why_no_plan(prices: Prices, cluster: Cluster, global_batch: int, settings: Settings) -> str:
    """Return the reason why nothing was found: times, memory, or a faster plan from another
    search."""
    if settings.ceiling < math.inf:
        return f"no plan of {prices.chain.name} is faster than that of another search"
    untimed = find_untimed(prices, global_batch, settings)
    if untimed is not None:
        return why_untimed(untimed, prices, cluster)
    return why_infeasible(prices, cluster, settings.offload)


def _missing(fit: FittingPlan, prices: Prices) -> Iterator[MissingTimes]:
    """Yield the times that the plan needs and the profiles lack, per kind and width."""
    ranges: dict[tuple[str, int], tuple[int, int]] = {}
    for part in (part for choice in fit.plan for part in choice.option.parts):
        known = prices.sample_range(part.pool, part.tensor_width)
        fewest, most = math.ceil(part.samples / part.context), math.ceil(part.most / part.context)
        if known is None or most > known[1] or (fewest < known[0] and part.context == 1):
            key = (prices.pools[part.pool].name, part.tensor_width)
            low, high = ranges.get(key, (fewest, most))
            ranges[key] = (min(low, fewest), max(high, most))
    for (kind, width), (fewest, most) in sorted(ranges.items()):
        layers = _untimed_layers(prices, kind, width)
        yield MissingTimes(kind=kind, tensor_width=width, fewest=fewest, most=most, layers=layers)


def _untimed_layers(prices: Prices, kind: str, width: int) -> tuple[str, ...]:
    """Return the layers without a time at this width, if others have one."""
    profile = _profile(prices, kind)
    names = _names(prices, profile)
    lacking = tuple(
        name for name in names if profile.sample_range(name, width, prices.chain.dtype) is None
    )
    return lacking if len(lacking) < len(names) else ()


def _known(prices: Prices, kind: str) -> str:
    """Return the widths and samples that all layers have, such as ``tensor width 1 for 8 to 16
    samples``."""
    texts = []
    for width, (fewest, most) in _ranges(prices, kind).items():
        samples = f"{fewest} to {most:.0f} samples" if most < math.inf else "any number of samples"
        texts.append(f"tensor width {width} for {samples}")
    return (
        ", ".join(texts)
        if texts
        else f"no tensor width with {prices.chain.dtype} times of every layer"
    )


def _profile(prices: Prices, kind: str) -> Profile:
    assert prices.model.profiles is not None
    return prices.model.profiles[kind]


def _ranges(prices: Prices, kind: str) -> dict[int, tuple[int, float]]:
    """Return the samples by tensor width, for widths at which all layers were measured."""
    pool = next(index for index, pool in enumerate(prices.pools) if pool.name == kind)
    widths = sorted({row.tensor_width for row in _profile(prices, kind).rows})
    ranges = {width: prices.sample_range(pool, width) for width in widths}
    return {width: known for width, known in ranges.items() if known is not None}


def _has_roofline(prices: Prices, kind: str) -> bool:
    """Return whether devices of a kind can be priced without their profile."""
    bare = replace(prices.model, profiles=None)
    return all(
        bare.can_run(prices.chain, pool.device) for pool in prices.pools if pool.name == kind
    )


def _more_samples(prices: Prices, kind: str) -> list[tuple[int, int]]:
    """Return the widths and samples to add for (1); one number of samples represents any."""
    return [(width, 1) for width in _ranges(prices, kind)]


def _more_widths(prices: Prices, kind: str) -> list[tuple[int, int]]:
    """Return the widths and samples to add for (2): the samples that any width was measured
    with."""
    known = _ranges(prices, kind)
    if not known:
        return []
    fewest, most = min(low for low, _ in known.values()), max(high for _, high in known.values())
    samples = (fewest, int(most)) if most < math.inf else (1,)
    return [
        (width, count) for width in _widths(prices, kind) if width not in known for count in samples
    ]


def _more_of_all(prices: Prices, kind: str) -> list[tuple[int, int]]:
    """Return the widths and samples to add for (3)."""
    return [(width, 1) for width in _widths(prices, kind)]


def _widths(prices: Prices, kind: str) -> list[int]:
    """Return the widths that groups of a kind may have."""
    most = prices.most_width
    return sorted(
        {width for pool in prices.pools if pool.name == kind for width in node_widths(pool, most)}
    )


def _names(prices: Prices, profile: Profile) -> list[str]:
    """Return the names of the layers, as the profile has them or should have them."""
    return list(
        dict.fromkeys(profile.row_name(layer) or layer.name for layer in prices.chain.layers)
    )


def _filled(prices: Prices, profile: Profile, measured: Sequence[tuple[int, int]]) -> Profile:
    """Return a profile with rows of all layers for these widths and samples, in place of its own at
    these widths."""
    dtype, widths = prices.chain.dtype, {width for width, _ in measured}
    rows = [row for row in profile.rows if row.tensor_width not in widths or row.dtype is not dtype]
    for name in _names(prices, profile):
        similar = next((row for row in profile.rows if row.layer == name), profile.rows[0])
        per_sample = similar.tensor_width / similar.micro_batch
        for width, samples in measured:
            times = per_sample * samples / width
            rows.append(
                ProfileRow(
                    layer=name,
                    micro_batch=samples,
                    tensor_width=width,
                    dtype=dtype,
                    forward_seconds=times * similar.forward_seconds,
                    backward_seconds=times * similar.backward_seconds,
                )
            )
    return replace(profile, rows=tuple(rows))
