"""Islands on real processes equal the same algorithm in one process, whatever plan each island has
inside."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runtime.island_cases import IslandCase, catch_up_alone, train_alone, train_islands
from runtime.rank_pool import RankPool
from runtime.small_models import build
from runtime.training_cases import Case

from argosy.adapt.sync import SyncLimits, next_sync_every
from argosy.plan.islands import Compression
from argosy.runtime.islands.codec import decode, encode, encoded_size

PIPELINE = Case(shares=((2,), (2,)), num_micro_batches=3)
REPLICAS = Case(shares=((3, 1),), num_micro_batches=1)
SHARDED = Case(shares=((1, 1),), num_micro_batches=2, zero=1)
ALONE = Case(shares=((1,),), num_micro_batches=2)


def largest_difference(case: IslandCase, outcomes: list[dict[str, Any]]) -> float:
    """Between weights that ranks hold and those of one process; and between losses."""
    shared, losses = train_alone(case)
    worst = 0.0
    for outcome in outcomes:
        island = outcome["island"]
        worst = max(worst, float(np.abs(np.array(outcome["losses"]) - losses[island]).max()))
        for (name, begin), values in outcome["weights"].items():
            window = tuple(
                slice(first, first + size) for first, size in zip(begin, values.shape, strict=True)
            )
            worst = max(
                worst, float(np.abs(shared[name].numpy()[window] - values).max(initial=0.0))
            )
    return worst


CASES = {
    "pipeline and replicas": IslandCase(islands=(PIPELINE, REPLICAS), every=3, steps=7),
    "three islands": IslandCase(islands=(PIPELINE, SHARDED, ALONE), every=2, steps=5),
    "fragments": IslandCase(islands=(PIPELINE, REPLICAS), every=4, fragments=2, steps=9),
    "overlapped": IslandCase(
        islands=(PIPELINE, SHARDED), every=6, fragments=2, overlap=2, steps=14
    ),
    "three overlapped": IslandCase(
        islands=(REPLICAS, PIPELINE, ALONE), every=3, overlap=1, steps=7, mixing=0.25
    ),
    "heavy ball": IslandCase(islands=(SHARDED, PIPELINE), every=2, steps=6, nesterov=False),
}


@pytest.mark.parametrize("name", CASES)
def test_any_number_of_steps_equals_one_process(ranks: RankPool, name: str) -> None:
    case = CASES[name]
    outcomes = ranks(case.num_ranks, train_islands, case)
    assert largest_difference(case, outcomes) < 1e-6


def test_an_exchange_after_every_step_with_a_plain_mean_is_synchronous_data_parallelism(
    ranks: RankPool,
) -> None:
    """Against one model that trains on the whole global batch, by the mean loss over it."""
    case = IslandCase(
        islands=(PIPELINE, REPLICAS), every=1, steps=4, rate=1.0, momentum=0.0, inner="sgd"
    )
    outcomes = ranks(case.num_ranks, train_islands, case)
    torch.manual_seed(0)
    model, loss_fn, _ = build("gpt", sum(case.shares), tied=False, dtype=torch.float64)
    optimizer = case.optimizer(model.parameters())
    losses = []
    for step in range(case.steps):
        loss = loss_fn(model, case.batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = {name: value.detach().numpy() for name, value in model.named_parameters()}
    for outcome in outcomes:
        for (name, begin), values in outcome["weights"].items():
            window = tuple(
                slice(first, first + size) for first, size in zip(begin, values.shape, strict=True)
            )
            assert np.abs(weights[name][window] - values).max(initial=0.0) < 1e-6, name
    by_island = {outcome["island"]: outcome["losses"] for outcome in outcomes}
    means = [sum(share * loss for share, loss in zip(case.shares, step, strict=True)) / sum(case.shares)
             for step in zip(by_island[0], by_island[1], strict=True)]  # fmt: skip
    assert means == pytest.approx(losses, abs=1e-6)


@pytest.mark.parametrize("compression", [Compression.BF16, Compression.INT8])
def test_islands_stay_equal_when_they_exchange_fewer_bits(
    ranks: RankPool, compression: Compression
) -> None:
    """All islands end with the same bits; and near to what they get with all of them."""
    case = IslandCase(
        islands=(REPLICAS, PIPELINE, ALONE), every=2, steps=4, compression=compression
    )
    outcomes = ranks(case.num_ranks, train_islands, case)
    whole: dict[str, dict[int, Any]] = {}
    for outcome in outcomes:
        for (name, begin), values in outcome["weights"].items():
            whole.setdefault(f"{name} {begin}", {})[outcome["island"]] = values
    for values in whole.values():
        first, *others = values.values()
        assert all(np.array_equal(first, other) for other in others)
    assert 0 < largest_difference(case, outcomes) < 0.02


def test_what_is_exchanged_is_counted_once(ranks: RankPool) -> None:
    case = CASES["fragments"]
    outcomes = ranks(case.num_ranks, train_islands, case)
    lines = [
        line
        for outcome in outcomes
        if outcome["lines"]
        for line in outcome["lines"]
        if "exchange" in line
    ]
    for fragment in range(2):
        for island in (0, 1):
            rows = {
                line["exchange"]: line["samples"][island]
                for line in lines
                if line["fragment"] == fragment
            }
            assert sum(rows.values()) == case.steps * case.shares[island]


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_checkpoint_between_exchanges_continues_bit_by_bit(
    ranks: RankPool, tmp_path: Path, overlap: int
) -> None:
    case = IslandCase(
        islands=(PIPELINE, SHARDED),
        every=4,
        fragments=2,
        overlap=overlap,
        steps=11,
        save_at=7,
        folder=str(tmp_path),
    )
    whole = ranks(case.num_ranks, train_islands, case)
    rest = ranks(case.num_ranks, train_islands, replace(case, save_at=None, resumes=True))
    for one, other in zip(whole, rest, strict=True):
        assert one["losses"][7:] == other["losses"]
        assert all(
            np.array_equal(one["weights"][key], other["weights"][key]) for key in one["weights"]
        )


def test_an_island_that_was_out_of_reach_joins_again_by_itself(ranks: RankPool) -> None:
    """The other one exchanges without it; then it takes over what that has, and nothing is counted
    twice."""
    case = IslandCase(islands=(ALONE, PIPELINE), every=2, steps=12, silent_at=3)
    first, *others = ranks(3, train_islands, case)
    exchanges = [line for line in first["lines"] if "exchange" in line]
    members = [line["islands"] for line in exchanges]
    assert [one for at, one in enumerate(members) if at == 0 or one != members[at - 1]] == [
        [0, 1],
        [0],
        [0, 1],
    ]
    (caught_up,) = [line for line in others[0]["lines"] if "caught_up" in line]
    before = 0
    for line in exchanges:
        assert line["samples"] == [
            case.shares[at] * (line["step"] - before) for at in line["islands"]
        ]
        before = line["step"]
    assert before == case.steps and caught_up["from"] == 0
    for outcome in others:
        for key, values in outcome["weights"].items():
            assert np.array_equal(first["weights"][key], values)


def test_an_island_that_catches_up_has_the_rates_of_that_step_and_its_own_optimizer_state(
    ranks: RankPool,
) -> None:
    ((before, after),) = ranks(1, catch_up_alone)
    assert before[:2] == pytest.approx([3, 2]) and after[:2] == pytest.approx([8, 7])
    assert after[2] == before[2] > 0


def test_islands_choose_the_same_number_of_steps_by_what_they_measure(ranks: RankPool) -> None:
    """Exchanges of a few kilobytes take about as long as steps here, so that H grows up to its
    limit."""
    limits = SyncLimits(most=6, share=1e-9)
    case = IslandCase(islands=(ALONE, ALONE), every=1, steps=20, limits=limits)
    lines = [outcome["lines"] for outcome in ranks(2, train_islands, case)]
    chosen = [[(line["step"], line["sync_every"]) for line in own] for own in lines]
    assert chosen[0] == chosen[1]
    assert [step for step, _ in chosen[0]] == [1, 2, 8, 14, 20]
    for island in (0, 1):
        assert sum(line["samples"][island] for line in lines[0]) == case.steps * case.shares[island]


def test_the_number_of_steps_follows_the_link_and_ignores_noise() -> None:
    limits = SyncLimits(least=2, most=200, share=0.05)
    assert next_sync_every(10, 0.1, 1.0, limits) == 200
    assert next_sync_every(200, 0.1, 0.25, limits) == 50
    assert next_sync_every(50, 0.1, 0.26, limits) == 50
    assert next_sync_every(50, 0.1, 1e-6, limits) == 2
    assert next_sync_every(50, 0.1, 0.0, limits) == 50
    assert next_sync_every(8, 0.1, 0.9, limits, fragments=2, overlap=3) == 20
    assert next_sync_every(8, 0.1, 0.01, limits, fragments=2, overlap=3) == 8


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 5000])
@pytest.mark.parametrize("compression", Compression)
def test_codes_come_back(compression: Compression, count: int) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(count)) * 10
    data = encode(values, compression)
    assert data.numel() == encoded_size(count, values.dtype, compression)
    back = decode(data, count, values.dtype, compression)
    limit = {"none": 0.0, "bf16": 2**-8, "int8": 0.51 / 127}[compression.value]
    largest = values.abs().max().item() if count else 0.0
    assert (
        back.shape == values.shape and (back - values).abs().max().item() <= limit * largest
        if count
        else True
    )
    assert (
        torch.equal(decode(encode(back, compression), count, values.dtype, compression), back)
        or compression == "int8"
    )
