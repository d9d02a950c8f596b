"""Which weights are gathered ahead of the layers that need them, without processes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from argosy.runtime.weights.gate import WeightGate
from argosy.runtime.weights.sharding import ShardSet
from argosy.schedule import ActionKind

F, B = ActionKind.FORWARD, ActionKind.BACKWARD


class Shards:
    """A stand-in for a layer's weights that records what happens to them."""

    sizes = (1, 1)
    known = torch.ones(1)

    def __init__(self, index: int, num_bytes: int, told: list[str], level: int) -> None:
        self.index, self.num_bytes, self.told, self.level = index, num_bytes, told, level
        self.arriving = self.present = self.travelling = False

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

    def begin_scatter(self) -> None:
        assert not self.travelling
        self.told.append(f"scatter {self.index}")
        self.travelling = True

    def end_scatter(self) -> None:
        assert self.travelling
        self.told.append(f"add {self.index}")
        self.travelling = False

    def let_go(self) -> None: ...

    def settle(self, counts: list[float]) -> None:
        assert counts == [1.0]
        self.told.append(f"settle {self.index}")

    @property
    def held(self) -> int:
        """Bytes of weights, and of a vector that is sent and one that arrives."""
        weights = self.level == 3 and (self.arriving or self.present)
        return self.num_bytes * (weights + 2 * self.travelling)


def played(
    sizes: list[int], actions: list[ActionKind], level: int = 3
) -> tuple[list[str], dict[ActionKind, int]]:
    """What layers do in some actions, and the most bytes of weights, gradients and vectors that are
    held in a forward and in a backward."""
    told: list[str] = []
    layers = [Shards(index, size, told, level) for index, size in enumerate(sizes)]
    gate = WeightGate(cast(Any, [[layer] for layer in layers]))
    most = {F: 0, B: 0}

    def compute(name: str) -> None:
        told.append(name)
        own = sizes[int(name[1:])] if action is B else 0
        most[action] = max(most[action], own + sum(layer.held for layer in layers))

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
    assert not any(layer.arriving or layer.present or layer.travelling for layer in layers)
    return told, most


def test_the_next_layer_is_gathered_while_one_computes() -> None:
    told, most = played([1, 1, 1], [F, B])
    assert most[F] == 2
    assert told[:-3] == [
        "begin 0", "begin 1", "F0", "begin 2", "F1", "F2",
        "begin 1", "B2", "scatter 2", "add 2", "begin 0", "B1", "scatter 1", "add 1",
        "B0", "scatter 0", "add 0",
    ]  # fmt: skip


def test_gradients_travel_while_the_next_layer_computes_if_there_is_room() -> None:
    """The first layer is so large that the others need little of what is counted for it."""
    told, _ = played([4, 1, 1, 1], [F, B])
    backward = [event for event in told[told.index("B3") :] if event[0] in "Bas"]
    assert backward == [
        "B3", "scatter 3", "B2", "add 3", "scatter 2", "B1", "add 2", "scatter 1",
        "B0", "add 1", "scatter 0", "add 0", *(f"settle {index}" for index in range(4)),
    ]  # fmt: skip
    told, _ = played([2, 1, 1], [B, F, B], level=2)
    assert [event for event in told if not event.startswith("settle")] == [
        "B2", "scatter 2", "B1", "add 2", "scatter 1", "B0", "add 1", "scatter 0",
        "F0", "F1", "F2", "B2", "add 0", "scatter 2", "B1", "add 2", "scatter 1", "B0", "add 1",
        "scatter 0", "add 0",
    ]  # fmt: skip


def test_small_layers_are_gathered_further_ahead() -> None:
    told, most = played([1, 1, 1, 3], [F])
    assert told[:5] == ["begin 0", "begin 1", "begin 2", "F0", "F1"]
    assert most[F] == 4


@pytest.mark.parametrize("after", [F, B])
def test_the_first_weights_of_the_next_action_arrive_in_the_last_layer(after: ActionKind) -> None:
    told, _ = played([1, 1, 1], [B, after])
    last = told.index("B0")
    if after is F:  # its first layer is the last one, which stays
        assert told[last + 3 : last + 5] == ["begin 1", "F0"]
    else:
        assert told[last - 1] == "begin 2"


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    actions=st.lists(st.sampled_from([F, B]), min_size=1, max_size=6),
    level=st.sampled_from([2, 3]),
)
def test_no_more_is_held_than_is_counted(
    sizes: list[int], actions: list[ActionKind], level: int
) -> None:
    """Two replicas, so that (8) of ``cost.memory`` counts half a layer for the part that stays."""
    told, most = played(sizes, [*actions, B], level)
    assert max(most.values()) <= 3.5 * max(sizes)
    assert most[F] <= 2 * max(sizes) or "add 0" in told
    for index in range(len(sizes)):
        moves = [event for event in told if event in (f"scatter {index}", f"add {index}")]
        assert moves == [f"scatter {index}", f"add {index}"] * (len(moves) // 2)
        assert len(moves) == 2 * [*actions, B].count(B)
    if level == 2:
        return
    for index in range(len(sizes)):
        first_use = next(at for at, event in enumerate(told) if event in (f"F{index}", f"B{index}"))
        assert f"begin {index}" in told[:first_use]


def test_the_stand_in_has_what_a_shard_set_has() -> None:
    for name in (
        "begin_gather", "gather", "release", "discard", "begin_scatter", "end_scatter", "let_go",
        "settle",
    ):  # fmt: skip
        assert callable(getattr(ShardSet, name))
