"""Gradients are summed by the algorithm that the plan chose, and the sum is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from runtime.order_cases import complex_sum, order_of_early_sums
from runtime.rank_pool import RankPool
from runtime.training_cases import (
    Case,
    differences,
    train_in_parallel,
    train_with_early_sums,
    ways_of_summing,
)
from torch import nn

from argosy.plan.plan import Algorithm
from argosy.runtime.communication.ledger import MOST_BUCKETS
from argosy.runtime.stages.parameters import Weight
from argosy.runtime.weights import gradients, overlap
from argosy.runtime.weights.gradients import EarlyRules, Gradients
from argosy.runtime.weights.overlap import GradientSum, Summand
from argosy.runtime.weights.sharding import Shard, ShardSet
from argosy.schedule import ScheduleKind

LAYOUTS = [(((1, 2, 1, 1, 1),), 2), (((1, 1, 1, 1, 1),), 3), (((2, 1), (1, 1, 1)), 2)]
"""Shares, and devices of a node: nodes of 2, 2 and 1; of 3 and 2; two stages, one of them over two
nodes."""
KINDS = [
    (Algorithm.HIERARCHICAL, 0, LAYOUTS),
    (Algorithm.HIERARCHICAL, 1, LAYOUTS[:1]),  # by the same messages as level 3
    (Algorithm.HIERARCHICAL, 3, LAYOUTS),
    (Algorithm.TREE, 0, LAYOUTS),
]
CASES = [
    Case(shares=shares, per_node=per_node, algorithm=algorithm, zero=zero, num_micro_batches=2)
    for algorithm, zero, layouts in KINDS
    for shares, per_node in layouts
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_algorithm_gives_the_gradients_of_one_process(ranks: RankPool, case: Case) -> None:
    assert not differences(case, ranks(case.num_ranks, train_in_parallel, case))


@pytest.mark.parametrize(
    ("algorithm", "per_node", "expected"),
    [
        (Algorithm.RING, 2, "RingSum"),
        (Algorithm.HIERARCHICAL, 2, "Nodes"),
        (Algorithm.HIERARCHICAL, 8, "RingSum"),
        (Algorithm.TREE, 2, "Nodes by trees"),
        (Algorithm.TREE, 8, "Nodes by trees"),
    ],
)
def test_the_plan_s_choice_is_taken(
    ranks: RankPool, algorithm: Algorithm, per_node: int, expected: str
) -> None:
    """Within one node there is nothing hierarchical."""
    case = Case(shares=((1, 1, 1, 1),), algorithm=algorithm, per_node=per_node, num_micro_batches=1)
    assert ranks(4, ways_of_summing, case) == [[expected]] * 4


@pytest.mark.parametrize(
    "case",
    [
        Case(
            shares=((3, 1), (1, 3), (1, 3), (3, 1)),
            kind=ScheduleKind.DUALPIPE_V,
            num_micro_batches=4,
        ),
        Case(model="routed", shares=((1, 1), (2,)), num_micro_batches=2),
        Case(model="routed", shares=((1, 1), (2,)), num_micro_batches=2, zero=1),
        Case(shares=((3, 1), (1, 3)), num_micro_batches=4, zero=1),
    ],
    ids=str,
)
def test_sums_during_the_last_backward_give_the_gradients_of_one_process(
    ranks: RankPool, case: Case
) -> None:
    """Also if weight gradients are put off, and if replicas have gradients of other weights."""
    assert not differences(case, ranks(case.num_ranks, train_with_early_sums, case))


@pytest.mark.parametrize(
    "case",
    [
        Case(model="chosen-mixture", shares=((1, 1),), experts=(4, 2), num_micro_batches=1),
        Case(shares=((2,),), ratios=((0.7, 0.3),), num_micro_batches=2),
        Case(model="routed", shares=((1, 1), (2,)), num_micro_batches=2, zero=1),
        Case(
            shares=((3, 1), (1, 3)) * 2,
            num_micro_batches=4,
            kind=ScheduleKind.INTERLEAVED,
            zero=1,
            clip=True,
        ),
    ],
    ids=str,
)
def test_all_members_begin_the_collectives_of_a_group_in_one_order(
    ranks: RankPool, case: Case
) -> None:
    """With a bucket for each weight, also if one rank alone has no gradient of some."""
    results = ranks(case.num_ranks, order_of_early_sums, case)
    assert not differences(case, [outcome for outcome, _ in results])
    for group in {name for _, begun in results for name in begun}:
        orders = [begun[group] for _, begun in results if group in begun]
        assert all(order == orders[0] for order in orders), group


def test_complex_gradients_are_summed_in_place(ranks: RankPool) -> None:
    assert ranks(2, complex_sum, (1 + 2j, 3 - 5j)) == [4 - 3j] * 2


class Scatters:
    """Scatters over two members that have the same gradients, of which this one is the first."""

    def __init__(self) -> None:
        self.under_way, self.most, self.begun = 0, 0, 0

    def begin_scatter(self, vector: torch.Tensor, sizes: list[int]) -> Any:
        self.under_way, self.begun = self.under_way + 1, self.begun + 1
        self.most = max(self.most, self.under_way)
        return _Scatter(self, 2 * vector[: sizes[0]])


class _Scatter:
    def __init__(self, way: Scatters, part: torch.Tensor) -> None:
        self.way, self.part = way, part

    def wait(self) -> torch.Tensor:
        self.way.under_way -= 1
        return self.part


@pytest.mark.parametrize("alone", [[0], []])
def test_few_scatters_are_under_way_during_the_last_backward(
    monkeypatch: pytest.MonkeyPatch, alone: list[int]
) -> None:
    """Each needs memory for two vectors. They begin early in stages that compute alone."""
    monkeypatch.setattr(gradients, "is_on_device", lambda way: True)
    parameters = [nn.Parameter(torch.ones(4)) for _ in range(3 * MOST_BUCKETS)]
    way: Any = Scatters()
    sets = [
        ShardSet([Shard(summand, 0, [2, 2], (), level=1)], 1, way)
        for summand in _weights(parameters)
    ]
    own = Gradients([], [], sets, 0, early=EarlyRules(alone=alone))
    for step in range(2):
        own.before_last_backward(0)
        torch.stack([at * p.sum() for at, p in enumerate(parameters)][:-1]).sum().backward()
        assert way.begun == len(parameters) * step, "the last weight is the first of all"
        own.after_last_backward(0)
        assert way.begun == len(parameters) * (step + bool(alone))
        own.reduce()
        assert way.begun == len(parameters) * (step + 1)
        assert way.under_way == 0
        kept = [shards.shards[0].own.grad for shards in sets]
        assert kept[-1] is None, "no member has one"
        expected = [torch.full((2,), 2.0 * at) for at in range(len(kept) - 1)]
        assert all(map(torch.equal, kept[:-1], expected))
        assert all(p.grad is None for p in parameters)
        own.clear()
    assert way.most == (MOST_BUCKETS if alone else 2)


class Doubled:
    """Sums with another holder that has twice as much; ``log`` has the sizes of what was begun."""

    def __init__(self) -> None:
        self.under_way, self.most = 0, 0
        self.log: list[int] = []

    def begin(self, vector: torch.Tensor) -> Any:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        self.log.append(vector.numel())
        return _Doubling(self, [vector])

    def begin_each(self, tensors: list[torch.Tensor]) -> Any:
        assert all(tensor.is_contiguous() for tensor in tensors)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        self.log.append(sum(tensor.numel() for tensor in tensors))
        return _Doubling(self, tensors)


class _Doubling:
    def __init__(self, way: Doubled, tensors: list[torch.Tensor]) -> None:
        self.way, self.tensors = way, tensors

    def wait(self) -> None:
        self.way.under_way -= 1
        for tensor in self.tensors:
            tensor.mul_(3)


def _weights(parameters: list[nn.Parameter]) -> list[Summand]:
    return [
        Summand(Weight(str(index), parameter, (0,), ()))
        for index, parameter in enumerate(parameters)
    ]


@pytest.mark.parametrize("in_place", [False, True])
def test_gradients_are_summed_in_buckets_and_those_that_nobody_has_stay_away(
    monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    """With buckets of three numbers, of which many are under way."""
    monkeypatch.setattr(overlap, "BUCKET_BYTES", 24)
    parameters = [
        nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float64, torch.float32) * 12
    ]
    for number, parameter in enumerate(parameters[:-1]):
        parameter.grad = torch.full_like(parameter, number)
    way: Any = Doubled()
    on_device = way if in_place else None
    GradientSum(way, _weights(parameters), set(), on_device=on_device).finish()
    assert way.under_way == 0
    assert way.most == MOST_BUCKETS + 1, "and who has a gradient at all"
    assert [float(p.grad[0]) for p in parameters[:-1] if p.grad is not None] == [
        3 * n for n in range(23)
    ]
    assert parameters[-1].grad is None
    frozen = [nn.Parameter(torch.ones(1), requires_grad=False)]
    GradientSum(way, _weights(frozen), set()).finish()


def test_a_gradient_in_pieces_is_summed_as_a_copy() -> None:
    weight = nn.Parameter(torch.ones(2, 3).t())
    weight.grad = torch.arange(6.0).view(2, 3).t()
    way: Any = Doubled()
    GradientSum(way, _weights([weight]), set(), on_device=way).finish()
    assert weight.grad.equal(3 * torch.arange(6.0).view(2, 3).t())


def test_sums_begin_in_a_fixed_order_during_the_last_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A weight that no sample used keeps its bucket and those behind it until the backward is
    over."""
    monkeypatch.setattr(overlap, "BUCKET_BYTES", 8)
    parameters = [nn.Parameter(torch.ones(size)) for size in (4, 5, 2, 3)]
    way: Any = Doubled()
    summing = GradientSum(way, _weights(parameters), set(), on_device=way, is_early=True)
    seen: list[list[int]] = []

    def backward(used: list[nn.Parameter]) -> None:
        x = torch.ones((), requires_grad=True)
        for parameter in used:  # the first one's gradient comes last
            x = x * parameter.sum()
            x.register_hook(lambda _: seen.append(list(way.log)))
        x.backward()

    backward(parameters)
    assert way.log == [], "more micro-batches follow"
    summing.before_last_backward(0)
    summing.before_last_backward(1)
    seen.clear()
    backward([parameters[0], *parameters[2:]])
    assert [3] in seen, "while the backward runs"
    assert way.log == [3, 2]
    summing.after_last_backward(0)
    assert way.log == [3, 2, 5, 4]
    single = [p.grad.clone() for p in parameters if p.grad is not None]
    summing.finish()
    assert way.log == [3, 2, 5, 4, 4]
    for parameter, before in zip(parameters, single, strict=True):
        assert parameter.grad is not None
        assert parameter.grad.equal(3 * before)
    summing.close()
    backward(parameters)
    assert len(way.log) == 5
