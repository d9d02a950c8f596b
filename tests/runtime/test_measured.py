"""A measured timeline: complete, on one clock, readable by everything that reads simulated ones."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from runtime.rank_pool import RankPool
from runtime.training_cases import Case, measured_run, offsets_of_skewed_clocks, plan_of

from argosy.runtime.communication.marks import STEP, Mark, Recorder
from argosy.runtime.communication.measured import assemble
from argosy.schedule import Action, ActionKind, ScheduleKind
from argosy.timeline import ContactKind, SpanKind
from argosy.timeline.file import loads_timeline

PART = 2_000_000
"""Cycles of a GPU, about a millisecond."""


@pytest.mark.flaky(reruns=4)  # it measures real time
def test_clocks_of_ranks_are_aligned_within_what_is_promised(ranks: RankPool) -> None:
    for offsets in ranks(3, offsets_of_skewed_clocks, 7.5):
        for rank, (seconds, uncertainty) in enumerate(offsets):
            assert abs(seconds - 7.5 * rank) <= uncertainty + 1e-9
            assert uncertainty < 0.1


def test_a_run_is_written_down_completely(ranks: RankPool) -> None:
    case = Case(
        shares=((3, 1), (4,), (4,)), kind=ScheduleKind.KFKB, k=2, num_micro_batches=3, steps=2
    )
    text, *others = ranks(case.num_ranks, measured_run, case)
    assert others == [None] * (case.num_ranks - 1)
    timeline = loads_timeline(text)
    assert timeline.clock == "measured"
    assert len(timeline.iteration_ends) == case.steps
    for iteration in range(case.steps):
        spans = [span for span in timeline.spans if span.iteration == iteration]
        for kind in (SpanKind.FORWARD, SpanKind.BACKWARD):
            found = sorted((s.where, s.stage, s.micro_batch) for s in spans if s.kind is kind)
            expected = [
                (f"n0.{rank}", [0, 0, 1, 2][rank], index) for rank in range(4) for index in range(3)
            ]
            assert found == expected
        transfers = [span for span in spans if span.kind is SpanKind.TRANSFER]
        assert len(transfers) == 2 * 3 * (2 + 1), (
            "two replicas to one, one to one; there and back; per micro-batch"
        )
        assert sum(span.bytes for span in transfers) == pytest.approx(2 * 3 * 2 * 4 * 6 * 16 * 8)
        assert sum(span.kind is SpanKind.UPDATE for span in spans) == 4


def test_nothing_happens_before_what_it_needs(ranks: RankPool) -> None:
    case = Case(shares=((2,), (2,), (2,)), num_micro_batches=4)
    timeline = loads_timeline(ranks(3, measured_run, case)[0])
    slack = 2e-3  # what the alignment of clocks may be wrong by
    for span in timeline.spans:
        if span.waited_for is not None:
            assert timeline.spans[span.waited_for].start <= span.start + slack
    forwards = {
        (s.stage, s.micro_batch, s.iteration): s
        for s in timeline.spans
        if s.kind is SpanKind.FORWARD
    }
    for (stage, index, iteration), span in forwards.items():
        if stage:
            assert span.start >= forwards[stage - 1, index, iteration].end - slack
    assert timeline.critical_path()[-1].end == pytest.approx(
        max(span.end for span in timeline.spans)
    )


def test_waiting_sending_and_receiving_are_told_apart(ranks: RankPool) -> None:
    """On every rank, for every message; a rank that waits does not compute."""
    case = Case(shares=((3, 1), (4,), (4,)), num_micro_batches=3, steps=2)
    timeline = loads_timeline(ranks(case.num_ranks, measured_run, case)[0])
    stage_of = {"n0.0": 0, "n0.1": 0, "n0.2": 1, "n0.3": 2}
    for device, stage in stage_of.items():
        own = [contact for contact in timeline.contacts if contact.where == device]
        incoming = [False] * (stage > 0) + [True] * (stage < 2)
        for kind in ContactKind:
            found = sorted(
                (c.iteration, c.stage, c.micro_batch, c.gradient) for c in own if c.kind is kind
            )
            directions = (
                [not back for back in incoming] if kind is ContactKind.SENDING else incoming
            )
            assert found == sorted(
                (i, stage, m, back) for i in range(2) for m in range(3) for back in directions
            )
        waits = [contact for contact in own if contact.kind is ContactKind.WAITING]
        computed = [
            span
            for span in timeline.spans
            if span.where == device and not span.kind.is_communication
        ]
        assert all(
            one.end <= other.start or other.end <= one.start for one in waits for other in computed
        )
        received = {c[4:]: c for c in own if c.kind is ContactKind.RECEIVING}
        assert all(
            received[wait[4:]].start <= wait.start <= wait.end <= received[wait[4:]].end
            for wait in waits
        )
        assert timeline.waiting()[device] == pytest.approx(
            sum(wait.end - wait.start for wait in waits)
        )
        assert timeline.waiting()[device] + sum(s.seconds for s in computed) <= timeline.end


def test_a_forward_waits_for_no_gradient_where_two_workers_take_turns() -> None:
    """Interleaved on two workers, both messages of a stage go to the same one."""
    plan = plan_of(Case(kind=ScheduleKind.INTERLEAVED, shares=((2,),) * 4, num_micro_batches=2))
    workers: list[list[Mark]] = [[], []]
    order = [
        (0, False),
        (1, False),
        (2, False),
        (3, False),
        (3, True),
        (2, True),
        (1, True),
        (0, True),
    ]
    for at, (stage, gradient) in enumerate(order):
        kind = SpanKind.BACKWARD if gradient else SpanKind.FORWARD
        own = workers[stage % 2]
        if 0 < at != 4:
            own.append(Mark(ContactKind.WAITING, stage, 0, gradient, 0, 2.0 * at - 1, 2.0 * at))
        own.append(Mark(kind, stage, 0, False, 0, 2.0 * at, 2.0 * at + 1))
        own.append(Mark(ContactKind.SENDING, stage, 0, gradient, 0, 2.0 * at + 1, 2.0 * at + 1))
    timeline = assemble(
        [[*own, Mark(STEP, None, None, False, 0, 0.0, 16.0)] for own in workers], plan, {0: 8.0}
    )
    for span in timeline.spans:
        assert span.waited_for is None or timeline.spans[span.waited_for].end <= span.start
    assert len(timeline.critical_path()) == 8 + 6


class Streams(torch.autograd.Function):
    """Two parts of work and three of an exchange, backward two and five; the exchange on a stream
    of its own that waits for this one, and this one for it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, recorder: Recorder) -> torch.Tensor:
        ctx.recorder = recorder
        torch.cuda._sleep(PART)
        exchange(recorder, 3)
        torch.cuda._sleep(PART)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        torch.cuda._sleep(2 * PART)
        exchange(ctx.recorder, 5)
        return gradients[0], None


def exchange(recorder: Recorder, parts: int) -> None:
    with recorder.exchanging():
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            torch.cuda._sleep(parts * PART)
        main.wait_stream(side)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="for --gpu, where there is one")
@pytest.mark.flaky(reruns=4)  # it measures real time
def test_exchanges_are_told_apart_on_a_stream() -> None:
    recorder = Recorder(torch.device("cuda", 0))
    x = torch.ones(4, device=recorder.device, requires_grad=True)
    for recorder.step in range(5):
        with recorder.computing(Action(0, ActionKind.FORWARD, 0)):
            y = Streams.apply(x, recorder)
        with recorder.computing(Action(0, ActionKind.BACKWARD, 0)):
            y.backward(x.detach())
        recorder.end_step(0.0)
    last = {mark.what: mark for mark in recorder.marks if mark.step == 4}
    for what, own, together in (("forward", 2, 3), ("backward", 2, 5)):
        mark = last[what]
        assert mark.together / (mark.end - mark.start) == pytest.approx(
            together / (own + together), rel=0.06
        )


def test_exchanges_are_told_apart_inside_computations_only() -> None:
    """A clock that goes on by 1 s at every reading: each pair of readings is a second."""
    recorder = Recorder(torch.device("cpu"))
    recorder.now = itertools.count(0.0).__next__
    with recorder.exchanging():  # of weights, between two computations
        pass
    with recorder.computing(Action(1, ActionKind.FORWARD, 0)):
        for _ in range(2):
            with recorder.exchanging():
                pass
    with recorder.reducing(), recorder.exchanging():
        pass
    with recorder.computing(Action(1, ActionKind.BACKWARD, 0)):
        pass
    recorder.end_step(0.0)
    found = [(mark.what, mark.end - mark.start, mark.together) for mark in recorder.marks[:-1]]
    assert found == [("forward", 5.0, 2.0), ("collective", 1.0, 0.0), ("backward", 1.0, 0.0)]
    timeline = assemble([recorder.marks, []], plan_of(Case(shares=((1,), (1,)))), {})
    assert {span.kind: span.together for span in timeline.spans} == {
        SpanKind.FORWARD: 2.0, SpanKind.COLLECTIVE: 0.0, SpanKind.BACKWARD: 0.0
    }  # fmt: skip
