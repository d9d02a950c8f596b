"""Dropout's masks are the same under every plan, and are what dropout's masks should be."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from runtime.rank_pool import RankPool
from runtime.training_cases import (
    Case,
    Outcome,
    box_of,
    differences,
    plan_of,
    train_in_parallel,
    train_with_rows,
)
from torch import nn

from argosy.errors import InputError
from argosy.plan.plan import Recompute
from argosy.runtime.sources.mixing import check_mixing
from argosy.runtime.stages.dropout import Masks
from argosy.runtime.stages.moment import Moment
from argosy.runtime.stages.stage import LayerStage
from argosy.schedule import ScheduleKind
from argosy.workload.capture.experts import drops

GPT2 = Case(model="hf-gpt2-dropping", single=True, num_micro_batches=3, shares=((3, 1), (2, 2)))


@pytest.mark.parametrize(
    "case",
    [
        GPT2,
        replace(
            GPT2,
            recompute=Recompute.FULL,
            kind=ScheduleKind.ZERO_BUBBLE,
            zero=3,
            shares=((4,), (1, 3)),
        ),
    ],
    ids=str,
)
def test_a_plan_draws_what_one_process_draws(ranks: RankPool, case: Case) -> None:
    assert not differences(case, ranks(case.num_ranks, train_in_parallel, case))


def check_against_one_stage(alone: Outcome, results: list[Outcome]) -> None:
    for result in results:
        assert result.losses == pytest.approx(alone.losses, rel=1e-9)
        for kind in ("gradients", "weights"):
            whole = getattr(alone, kind)
            for name, parts in getattr(result, kind).items():
                for first, part in parts:
                    np.testing.assert_allclose(
                        part, whole[name][0][1][box_of(first, part)], rtol=1e-9, atol=1e-12
                    )


def test_stages_of_operations_draw_what_one_stage_draws(ranks: RankPool) -> None:
    case = Case(
        model="dropping", num_micro_batches=2, shares=((2, 1), (3,)), recompute=Recompute.FULL
    )
    plain = replace(case, model="forked")
    (alone,) = ranks(1, train_in_parallel, replace(case, shares=((3,),), recompute=Recompute.NONE))
    (without,) = ranks(
        1, train_in_parallel, replace(plain, shares=((3,),), recompute=Recompute.NONE)
    )
    check_against_one_stage(alone, ranks(3, train_in_parallel, case))
    assert alone.losses != pytest.approx(without.losses, rel=1e-4)


def test_groups_draw_what_one_stage_draws_and_find_rows_of_a_table(ranks: RankPool) -> None:
    """Every member draws its columns of the mask, and looks up the rows that it has."""
    case = Case(model="tabled", num_micro_batches=2, shares=((2,),))
    (alone,) = ranks(1, train_in_parallel, case)
    results = ranks(2, train_with_rows, replace(case, ratios=((0.7, 0.3),)), "table.weight")
    assert [first for result in results for first, _ in result.weights["table.weight"]] == [
        (0, 0),
        (14, 0),
    ]
    check_against_one_stage(alone, results)


def drawn(
    layer: int = 0, step: int = 0, first: int = 0, samples: int = 4, seed: int = 0, calls: int = 1
) -> list[torch.Tensor]:
    with Masks(seed, layer, Moment(step, first, samples)):
        return [F.dropout(torch.ones(samples, 5000), 0.3) for _ in range(calls)]


def test_masks_keep_their_share_and_differ_where_they_should() -> None:
    (mask,) = drawn()
    assert mask.unique().tolist() == pytest.approx([0, 1 / 0.7])
    assert (mask > 0).double().mean().item() == pytest.approx(
        0.7, abs=5 * (0.7 * 0.3 / mask.numel()) ** 0.5
    )
    others = [
        *drawn(layer=1),
        *drawn(step=1),
        *drawn(first=4),
        *drawn(seed=1),
        drawn(calls=2)[1],
        mask.roll(1, 0),
    ]
    for other in others:
        agreeing = ((mask > 0) == (other > 0)).double().mean().item()
        assert agreeing == pytest.approx(0.7**2 + 0.3**2, abs=0.03), (
            "as two independent masks agree"
        )


def test_a_sample_has_the_same_mask_in_every_portion() -> None:
    (whole,) = drawn(samples=4)
    assert torch.equal(torch.cat([*drawn(samples=1), *drawn(first=1, samples=3)]), whole)


def test_attention_with_dropout_is_attention_where_nothing_is_dropped() -> None:
    q, k, v = torch.randn(3, 2, 4, 6, 8, dtype=torch.float64).unbind()
    for settings in (
        {"is_causal": True},
        {"attn_mask": torch.randn(6, 6, dtype=torch.float64), "scale": 0.2},
    ):
        with Masks(0, 0, Moment(0, 0, 2)):
            written = F.scaled_dot_product_attention(q, k, v, dropout_p=1e-12, **settings)  # type: ignore[arg-type]
        plain = F.scaled_dot_product_attention(q, k, v, **settings)  # type: ignore[arg-type]
        torch.testing.assert_close(written, plain)


def test_heads_that_share_keys_drop_as_heads_with_copies_of_them() -> None:
    query, (key, value) = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 2, 5, 8).unbind()
    copies = [part.repeat_interleave(3, 1) for part in (key, value)]
    with Masks(0, 0, Moment(0, 0, 2)):
        shared = F.scaled_dot_product_attention(query, key, value, dropout_p=0.4, enable_gqa=True)
    with Masks(0, 0, Moment(0, 0, 2)):
        copied = F.scaled_dot_product_attention(query, *copies, dropout_p=0.4)
    torch.testing.assert_close(shared, copied)


def test_a_mask_needs_the_samples_in_front() -> None:
    with Masks(0, 7, Moment(0, 0, 4)):
        for shape in ((), (3, 4)):
            says = rf"layer 7: found dropout of a tensor of shape {re.escape(str(shape))}, expected the 4 samples"
            with pytest.raises(InputError, match=says):
                F.dropout(torch.ones(shape), 0.5)
        kept = torch.ones(8, 3)
        assert F.dropout(kept, 0.5, training=False) is kept
        assert F.dropout(kept, 1.0).sum() == 0


def test_layers_that_may_drop_are_known_by_modules_and_numbers() -> None:
    attention = nn.Module()
    attention.attention_dropout = 0.1  # type: ignore[assignment]
    assert drops(nn.Sequential(attention))
    assert drops(nn.Sequential(nn.Dropout(0.1)))
    assert not drops(nn.Sequential(nn.Dropout(0.0), nn.Linear(2, 2)))
    assert not drops(nn.Sequential(attention, nn.Dropout(0.1)).eval())


class Written(nn.Module):
    """Drops, or adds noise, without a word in its modules or numbers."""

    def __init__(self, *, noise: bool) -> None:
        super().__init__()
        self.linear, self.noise = nn.Linear(8, 8), noise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return x + (y * torch.rand_like(y) if self.noise else F.dropout(y, 0.5, self.training))


def gradients_of(
    layer: nn.Module, recompute: Recompute, x: torch.Tensor, *, parts: int = 1
) -> list[torch.Tensor]:
    stage = LayerStage(
        nn.Identity(),
        [nn.Identity(), layer, nn.Identity()],
        None,
        first=1,
        end=2,
        recompute=recompute,
    )  # type: ignore[arg-type]
    torch.manual_seed(3)
    found = []
    for _ in range(2):  # what the first run has told holds for the second
        layer.zero_grad()
        size = len(x) // parts
        for at in reversed(range(0, len(x), size)):
            stage(x[at : at + size], None, Moment(0, at, size)).square().sum().backward()
        found += [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    return found


@pytest.mark.parametrize("noise", [False, True])
def test_a_layer_that_is_computed_again_draws_the_same(noise: bool) -> None:
    torch.manual_seed(0)
    layer, x = Written(noise=noise).double(), torch.randn(4, 8, dtype=torch.float64)
    kept, again = (
        gradients_of(layer, recompute, x) for recompute in (Recompute.NONE, Recompute.FULL)
    )
    for one, other in zip(kept, again, strict=True):
        torch.testing.assert_close(one, other)


def test_masks_of_a_layer_that_says_nothing_of_them_are_the_same_in_every_portion() -> None:
    torch.manual_seed(0)
    layer, x = Written(noise=False).double(), torch.randn(4, 8, dtype=torch.float64)
    whole, divided = (gradients_of(layer, Recompute.NONE, x, parts=parts) for parts in (1, 4))
    for one, other in zip(whole, divided, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "module", [nn.Dropout2d(0.2), nn.AlphaDropout(0.2), nn.MultiheadAttention(4, 2, dropout=0.1)]
)
def test_masks_of_other_kinds_are_refused_by_name(module: nn.Module) -> None:
    layers = [nn.Identity(), nn.Sequential(module), *[nn.Identity()] * 4]
    with pytest.raises(InputError, match=rf"layer 1.0: found {type(module).__name__} with p=0"):
        check_mixing(layers, plan_of(Case()))
