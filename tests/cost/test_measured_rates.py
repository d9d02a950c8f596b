"""Groups of devices whose collectives were measured: bytes over the rates, by hand."""

from __future__ import annotations

import pytest

from argosy.cost.group import CollectiveMethod, CollectiveRates, DeviceGroup, GroupCollective

MEASURED = CollectiveRates(
    all_gather=8e9,
    grouped_all_gather=5e9,
    all_reduce=4e9,
    reduce_scatter=7e9,
    grouped_reduce_scatter=6e9,
    all_to_all=2e9,
)


def test_measured_rates_take_the_place_of_the_closed_forms() -> None:
    """Bytes over bytes/s, of padded collectives four times the largest shard; the quicker way of
    two."""
    group = DeviceGroup(
        names=("a", "b", "c", "d"),
        flops=(1e9,) * 4,
        memory_bandwidths=(1e9,) * 4,
        bandwidth=1.0,
        latency=1.0,
        rates=MEASURED,
    )
    even, uneven = (0.25,) * 4, (0.7, 0.1, 0.1, 0.1)
    assert group.transfer_seconds(GroupCollective.ALL_REDUCE, 8e9, uneven) == (
        2.0,
        CollectiveMethod.MEASURED,
    )
    assert group.transfer_seconds(GroupCollective.ALL_TO_ALL, 8e9, even) == (
        4.0,
        CollectiveMethod.MEASURED,
    )
    assert group.transfer_seconds(GroupCollective.ALL_TO_ALL, 8e9, uneven) == (
        pytest.approx(4 * 2.8),
        CollectiveMethod.MEASURED,
    )
    assert group.transfer_seconds(GroupCollective.ALL_GATHER, 8e9, even) == (
        1.0,
        CollectiveMethod.PADDED,
    )
    assert group.transfer_seconds(GroupCollective.ALL_GATHER, 8e9, uneven) == (
        1.6,
        CollectiveMethod.GROUPED,
    )
    assert group.transfer_seconds(GroupCollective.REDUCE_SCATTER, 42e9, even) == (
        6.0,
        CollectiveMethod.PADDED,
    )
    assert group.transfer_seconds(GroupCollective.REDUCE_SCATTER, 42e9, uneven) == (
        7.0,
        CollectiveMethod.GROUPED,
    )
    assert group.transfer_seconds(GroupCollective.SLICE, 8e9, even) == (0.0, CollectiveMethod.LOCAL)
    # a quarter of the whole goes from the first to the others, as an all-to-all of even shards
    # would
