"""Stages of graphs that are no chains: optimal against brute force, balanced, and running in
order."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support.spmd_models import captured

from argosy.errors import InfeasibleError
from argosy.solve.programs.stagecut import (
    TOLERANCES,
    Pieces,
    Tensor,
    cut_graph,
    cut_pieces,
    forward_pieces,
)
from argosy.workload.graph import Graph, Phase


def random_pieces(rng: np.random.Generator, count: int) -> Pieces:
    tensors = []
    for source in range(count - 1):
        readers = sorted({int(r) for r in rng.integers(source + 1, count, rng.integers(1, 3))})
        tensors.append(
            Tensor(source=source, readers=tuple(readers), num_bytes=float(rng.integers(1, 20)))
        )
    return Pieces(
        flop=tuple(float(f) for f in rng.uniform(0.5, 2.0, count)), tensors=tuple(tensors)
    )


def brute_force(pieces: Pieces, shares: tuple[float, ...], tolerance: float) -> float | None:
    """Fewest bytes over every assignment that runs in order and keeps within budgets."""
    best, total = None, sum(pieces.flop)
    for stages in itertools.product(range(len(shares)), repeat=len(pieces.flop)):
        if any(stages[r] < stages[t.source] for t in pieces.tensors for r in t.readers):
            continue
        work = [
            sum(f for f, s in zip(pieces.flop, stages, strict=True) if s == stage)
            for stage in range(len(shares))
        ]
        if any(
            w > (1 + tolerance) * share * total + 1e-9
            for w, share in zip(work, shares, strict=True)
        ):
            continue
        cost = sum(
            t.num_bytes * (max(stages[r] for r in t.readers) - stages[t.source])
            for t in pieces.tensors
        )
        best = cost if best is None else min(best, cost)
    return best


@pytest.mark.parametrize("seed", range(12))
def test_cuts_equal_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pieces = random_pieces(rng, 8)
    shares = ((0.5, 0.5), (0.6, 0.4), (0.4, 0.3, 0.3))[seed % 3]
    found = cut_pieces(pieces, shares)
    for tolerance in TOLERANCES:
        expected = brute_force(pieces, shares, tolerance)
        if tolerance < found.tolerance:
            assert expected is None, "the smallest tolerance that can be met is used"
        elif tolerance == found.tolerance:
            assert found.total_bytes == pytest.approx(expected)


def in_order(graph: Graph, stages: tuple[int, ...]) -> bool:
    forward = [index for index, node in enumerate(graph.nodes) if node.phase is Phase.FORWARD]
    stage = dict(zip(forward, stages, strict=True))
    made = {v: stage[i] for i in forward for v in graph.nodes[i].outputs if v is not None}
    return all(made.get(v, 0) <= stage[i] for i in forward for v in graph.nodes[i].inputs)


CASES = [
    ("unet", (0.5, 0.5)),
    ("t5", (0.4, 0.3, 0.3)),
    ("towers", (0.7, 0.3)),
    ("language", (0.5, 0.3, 0.2)),
]


@pytest.mark.parametrize(("name", "shares"), CASES)
def test_captured_graphs_are_cut_within_their_shares(name: str, shares: tuple[float, ...]) -> None:
    graph = captured(name)
    found = cut_graph(graph, shares)
    assert in_order(graph, found.stages)
    for work, share in zip(found.flop, shares, strict=True):
        assert work <= (1 + found.tolerance) * share * sum(found.flop) * (1 + 1e-6)
    assert sum(found.flop) == pytest.approx(sum(forward_pieces(graph)[0].flop))


def test_a_unet_forwards_its_skips_and_beats_the_cut_of_its_order() -> None:
    graph = captured("unet")
    found = cut_graph(graph, (0.34, 0.33, 0.33))
    assert found.forwarded, "a skip passes through the stage in the middle"
    pieces, _ = forward_pieces(graph)
    best = None
    for cuts in itertools.combinations(
        range(1, len(pieces.flop)), 2
    ):  # stages as runs of the order of capture
        stages = [sum(piece >= cut for cut in cuts) for piece in range(len(pieces.flop))]
        work = [
            sum(f for f, s in zip(pieces.flop, stages, strict=True) if s == stage)
            for stage in range(3)
        ]
        if all(
            w <= (1 + found.tolerance) * s * sum(work)
            for w, s in zip(work, (0.34, 0.33, 0.33), strict=True)
        ):
            cost = sum(
                t.num_bytes * (max(stages[r] for r in t.readers) - stages[t.source])
                for t in pieces.tensors
            )
            best = cost if best is None else min(best, cost)
    assert best is None or found.total_bytes <= best + 1e-6


def test_one_huge_operation_cannot_be_balanced() -> None:
    pieces = Pieces(
        flop=(1.0, 100.0, 1.0), tensors=(Tensor(source=0, readers=(1,), num_bytes=1.0),)
    )
    with pytest.raises(InfeasibleError, match="one operation alone"):
        cut_pieces(pieces, (0.25, 0.25, 0.25, 0.25))
