"""Very many micro-batches: their times follow from those of a few thousand, and commands show what
they repeat."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from exporters.target_readers import cluster, plan

from argosy.cluster.file import with_changes
from argosy.errors import InputError
from argosy.plan.check import check_plan
from argosy.schedule import ScheduleKind, ScheduleSpec, build_schedule, in_flight, most_in_flight
from argosy.sim import steady
from argosy.sim.constant import pipeline_seconds
from argosy.sim.fold import fold_plan
from argosy.sim.simulate import iteration_seconds
from argosy.sim.steady import shortened
from argosy.workload.load import load_model

CHAIN = load_model("llama-3-8b", sequence_length=2048, dtype="fp16")
SPECS = [
    ScheduleSpec(kind=ScheduleKind.GPIPE),
    ScheduleSpec(),
    ScheduleSpec(kind=ScheduleKind.EAGER),
    ScheduleSpec(kind=ScheduleKind.KFKB, k=3),
    ScheduleSpec(kind=ScheduleKind.ZERO_BUBBLE),
    ScheduleSpec(kind=ScheduleKind.INTERLEAVED, chunks=2),
    ScheduleSpec(depth=(5, 3, 2, 1)),
]


def played(
    spec: ScheduleSpec, count: int, forward: list[float], backward: list[float], hop: list[float]
) -> float:
    """Every action of every stage, one after the other; a link carries one message at a time."""
    rows = [list(row) for row in build_schedule(spec, len(forward), count).rows]
    ends: dict[tuple[int, str, int], float] = {}
    free, links = (
        [0.0] * len(rows),
        dict.fromkeys(((s, way) for s in range(len(forward)) for way in (1, -1)), 0.0),
    )
    at = [0] * len(rows)
    while any(at[worker] < len(row) for worker, row in enumerate(rows)):
        for worker, row in enumerate(rows):
            while at[worker] < len(row):
                action = row[at[worker]]
                stage, kind, index = action.stage, str(action.kind), action.micro_batch
                way = 1 if kind == "F" else -1
                source = (stage - way, "F" if kind == "F" else "B", index)
                outside = not 0 <= stage - way < len(forward)
                if kind != "W" and not outside and source not in ends:
                    break
                start = max(free[worker], 0.0 if outside or kind == "W" else ends[source])
                seconds = (
                    forward[stage] if kind == "F" else backward[stage] / (1 if kind == "B" else 2)
                )
                free[worker] = start + seconds
                if kind != "W" and 0 <= stage + way < len(forward):
                    boundary = stage if way == 1 else stage - 1
                    links[stage, way] = max(links[stage, way], free[worker]) + hop[boundary]
                    ends[stage, "F" if kind == "F" else "B", index] = links[stage, way]
                at[worker] += 1
    return max(free)


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_many_micro_batches_take_what_they_take_one_by_one(spec: ScheduleSpec) -> None:
    random, count = Random(7), steady.MOST_PLAYED + 900
    forward, backward, hop = ([random.uniform(1, 3) for _ in range(4)] for _ in range(3))
    column = {
        name: np.array(values)[:, None]
        for name, values in (("forward", forward), ("backward", backward))
    }
    nothing = np.zeros((4, 1))
    transfer = np.array([*hop[:3], 0.0])[:, None] / 4
    found = pipeline_seconds(
        spec, count, **column, transfer=transfer, latency=nothing, tail=nothing
    )
    assert found[0] == pytest.approx(
        played(spec, count, forward, backward, [each / 4 for each in hop]), rel=1e-6
    )


@pytest.mark.parametrize("spec", SPECS[:5], ids=repr)
def test_shared_links_repeat_themselves_too(
    spec: ScheduleSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = replace(plan([9, 18, 26, 34], micro_batches=3003), schedule=spec)
    whole = iteration_seconds(made, CHAIN, cluster(), whole=False)
    monkeypatch.setattr(steady, "MOST_PLAYED", 1000)
    assert iteration_seconds(made, CHAIN, cluster(), whole=False) == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("spec", SPECS, ids=repr)
@pytest.mark.parametrize("count", [4, 8, 12, 64, 400])
def test_what_is_in_flight_is_known_without_the_whole_schedule(
    spec: ScheduleSpec, count: int
) -> None:
    if spec.depth is not None and max(spec.depth) > count:
        pytest.skip("a depth beyond the micro-batches")
    assert most_in_flight(spec, 4, count) == in_flight(build_schedule(spec, 4, count))


def test_a_plan_with_very_many_micro_batches_is_shown_by_a_part_that_they_repeat() -> None:
    made = plan([9, 18, 26, 34], micro_batches=100_003)
    short = shortened(made, cluster())
    assert short.num_micro_batches < 1000
    check_plan(short, CHAIN, cluster())
    assert shortened(plan([9, 18, 26, 34], micro_batches=64), cluster()).num_micro_batches == 64
    changing = with_changes(cluster(), [{"link": "a0.nic", "steps": [["30 s", "1 Gbit/s"]]}])
    with pytest.raises(
        InputError, match="num_micro_batches: found 100003, expected at most 12500 with 4 stages"
    ):
        shortened(made, changing)


@pytest.mark.parametrize(("data", "width"), [(2, 2), (4, 1), (1, 4)])
def test_an_interleaved_plan_is_folded_along_its_replicas(data: int, width: int) -> None:
    interleaved = ScheduleSpec(kind=ScheduleKind.INTERLEAVED, chunks=2)
    made = plan(
        [9, 18, 26, 34], hosts=("a0", "a1", "a0", "a1"), data=data, width=width, micro_batches=8
    )
    made = replace(made, schedule=interleaved)
    graph, _ = fold_plan(made, CHAIN, cluster())
    assert len({task.device for task in graph.tasks} - {-1}) == 2, "one bundle for every worker"
    whole = iteration_seconds(made, CHAIN, cluster(), whole=True)
    assert iteration_seconds(made, CHAIN, cluster(), whole=False) == pytest.approx(whole, rel=0.02)


def test_an_interleaved_plan_with_other_replicas_in_later_stages_stays_whole() -> None:
    made = plan([9, 18, 26, 34], hosts=("a0", "a1", "a0", "a1"), micro_batches=8)
    odd = replace(made.stages[2], replicas=made.stages[2].replicas[::-1])
    made = replace(made, schedule=ScheduleSpec(kind=ScheduleKind.INTERLEAVED, chunks=2))
    made = replace(made, stages=(*made.stages[:2], odd, made.stages[3]))
    _, where = fold_plan(made, CHAIN, cluster())
    assert where.devices == cluster().devices
