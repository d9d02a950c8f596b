"""Which weights are gathered ahead of the layers that need them, without processes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.runtime.weights.gate import WeightGate
from argosy.runtime.weights.sharding import ShardSet
from argosy.schedule import ActionKind

F, B = ActionKind.FORWARD, ActionKind.BACKWARD


class Shards:
    """A stand-in for a layer's weights that records what happens to them."""

    level = 3

    def __init__(self, index: int, num_bytes: int, told: list[str]) -> None:
        self.index, self.num_bytes, self.told = index, num_bytes, told
        self.arriving = self.present = False

    def begin_gather(self) -> None:
        if not self.arriving and not self.present:
            self.told.append(f"begin {self.index}")
            self.arriving = True

    def gather(self) -> None:
        self.begin_gather()
        self.arriving, self.present = False, True

    def release(self) -> None:
        self.present = False

    def discard(self) -> None:
        self.arriving = False

    def scatter_gradients(self) -> None:
        self.told.append(f"scatter {self.index}")

    def let_go(self) -> None: ...


def played(sizes: list[int], actions: list[ActionKind]) -> tuple[list[str], int]:
    """What layers do in some actions, and the most bytes of weights that are there or arrive."""
    told: list[str] = []
    layers = [Shards(index, size, told) for index, size in enumerate(sizes)]
    gate = WeightGate(cast(Any, [[layer] for layer in layers]))
    most = 0

    def compute(name: str) -> None:
        nonlocal most
        told.append(name)
        most = max(most, sum(one.num_bytes for one in layers if one.arriving or one.present))

    for action, after in pairwise([*actions, None]):
        assert action is not None
        gate.following = after
        for layer in layers if action is F else layers[::-1]:
            if action is F:
                gate.run(layer.index, compute, (f"F{layer.index}",), {})
            else:
                gate.open(layer.index, action)
                compute(f"B{layer.index}")
                gate.close(layer.index)
        if action is B:
            gate.finish()
    assert not any(layer.arriving or layer.present for layer in layers)
    return told, most


def test_the_next_layer_is_gathered_while_one_computes() -> None:
    told, most = played([1, 1, 1], [F, B])
    assert most == 2
    assert told == [
        "begin 0", "begin 1", "F0", "begin 2", "F1", "F2",
        "begin 1", "B2", "scatter 2", "begin 0", "B1", "scatter 1", "B0", "scatter 0",
    ]  # fmt: skip


def test_small_layers_are_gathered_further_ahead() -> None:
    told, most = played([1, 1, 1, 3], [F])
    assert told[:5] == ["begin 0", "begin 1", "begin 2", "F0", "F1"]
    assert most == 4


@pytest.mark.parametrize("after", [F, B])
def test_the_first_weights_of_the_next_action_arrive_in_the_last_layer(after: ActionKind) -> None:
    told, _ = played([1, 1, 1], [B, after])
    last = told.index("B0")
    if after is F:  # its first layer is the last one, which stays
        assert told[last + 2 : last + 4] == ["begin 1", "F0"]
    else:
        assert told[last - 1] == "begin 2"


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    actions=st.lists(st.sampled_from([F, B]), min_size=1, max_size=6),
)
def test_weights_are_there_and_take_at_most_twice_the_largest(
    sizes: list[int], actions: list[ActionKind]
) -> None:
    told, most = played(sizes, [*actions, B])
    assert most <= 2 * max(sizes)
    for index in range(len(sizes)):
        first_use = next(at for at, event in enumerate(told) if event in (f"F{index}", f"B{index}"))
        assert f"begin {index}" in told[:first_use]


def test_the_stand_in_has_what_a_shard_set_has() -> None:
    for name in ("begin_gather", "gather", "release", "discard", "scatter_gradients", "let_go"):
        assert callable(getattr(ShardSet, name))
