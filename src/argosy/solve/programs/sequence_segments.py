"""Determine which segments of a captured step can run on parts of the sequence, and what the parts
send each other for it.

Parts of a sequence run every operation as ``SequenceStates`` says, in plans and in runs. In a
forward with these states, a segment has

    (1)  parts        as many as half of the sequence's tokens, if hardly any of its work is done
                      whole by every device and hardly any of what it keeps is kept whole; else one
    (2)  keys, values bytes that its attention sends past every other device, repeated heads once

A segment that gathers more than a few bytes of parts to continue with whole values has one part,
too: the cost model has no such collectives. Those at the ends of stages are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from argosy.cost.group import GroupCollective
from argosy.solve.programs.sequence import RING, SequenceStates, repeated_heads
from argosy.space.operations.calls import call_of
from argosy.space.operations.flop import flop_of
from argosy.workload.chain import Chain
from argosy.workload.graph import Graph

# Share of a segment's FLOP, kept bytes or results that every device may have whole.
_WHOLE = 0.02
# Work and bytes below this share of the model's may be whole in any segment.
_FEW = 1e-3


def with_sequence_parts(
    chain: Chain, states: SequenceStates, segment: Sequence[int], kept: set[int], samples: int
) -> Chain:
    """Return the chain of a step with segments that state into how many parts they cut sequences.

    ``segment`` has the segment of every operation of the forward of ``states``, at ``samples``
    samples, and ``kept`` its values that a backward reads. The chain stays as it is if no sequence
    can be cut in all segments.
    """
    graph, count = states.graph, len(chain.layers)
    is_divided = _divided(states, segment, kept, count)
    if states.length < 4 or not states.has_ring or not all(is_divided):
        return chain
    sent = _keys_and_values(graph, states, segment, count)
    layers = tuple(
        replace(layer, max_context=states.length // 2, key_value_bytes=sent[at] / samples)
        for at, layer in enumerate(chain.layers)
    )
    return replace(chain, layers=layers, sequence_length=states.length)


def _divided(
    states: SequenceStates, segment: Sequence[int], kept: set[int], count: int
) -> list[bool]:
    """Return for each segment whether hardly anything in it is whole on every device (1)."""
    graph = states.graph
    measures = [_Shares(count) for _ in ("work", "kept", "gathered")]
    work, held, gathered = measures
    for at, node, row in zip(segment, graph.nodes, states.rows, strict=True):
        work.add(at, flop_of(call_of(graph, node)), is_whole=not row.units)
        for value, state in zip(node.outputs, row.outputs, strict=True):
            if value in kept and value in states.of_batch:
                held_bytes = graph.values[value].num_bytes
                held.add(at, held_bytes, is_whole=not state.is_sharded)
    for value, ((step, _), *_) in states.gathers().items():
        at = segment[graph.producer[value]]
        is_gather = step.kind is GroupCollective.ALL_GATHER
        gathered.add(at, graph.values[value].num_bytes, is_whole=is_gather)
    gathered.divided = [sum(sizes) for sizes in zip(gathered.divided, held.divided, strict=True)]
    return [all(measure.is_divided(at) for measure in measures) for at in range(count)]


class _Shares:
    """Amounts by segment, and of them what every device has whole."""

    def __init__(self, count: int) -> None:
        self.divided, self.whole = [0.0] * count, [0.0] * count

    def add(self, segment: int, amount: float, *, is_whole: bool) -> None:
        (self.whole if is_whole else self.divided)[segment] += amount

    def is_divided(self, segment: int) -> bool:
        whole, total = self.whole[segment], sum(self.divided) + sum(self.whole)
        return whole <= max(_WHOLE * (whole + self.divided[segment]), _FEW * total)


def _keys_and_values(
    graph: Graph, states: SequenceStates, segment: Sequence[int], count: int
) -> list[float]:
    """Return the bytes of keys and values that go around the ring in each segment (2)."""
    sent = [0.0] * count
    for at, node, row in zip(segment, graph.nodes, states.rows, strict=True):
        if row.local == RING:
            groups = min(repeated_heads(graph, value) for value in node.inputs[1:3])
            size = sum(graph.values[value].num_bytes for value in node.inputs[1:3])
            sent[at] += size / groups
    return sent
