"""What elastic runs are made of: copies that are whole, duties that survive a host, claims, plans
for who is left."""

from __future__ import annotations

import asyncio
import io
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runtime.training_cases import CLUSTER, Case, plan_of

from argosy.cluster.file import cluster_from_content, load_cluster
from argosy.cost.calibration import Calibration
from argosy.errors import InputError
from argosy.plan.file import dumps_plan, load_plan
from argosy.plan.plan import Replica
from argosy.planner import find_plan
from argosy.runtime.communication.boxes import TensorBox
from argosy.runtime.elastic import snapshot
from argosy.runtime.elastic.agent import replanner_of
from argosy.runtime.elastic.claims import AgentAddress, Claim, Claims, RunOutcome
from argosy.runtime.elastic.copies import (
    BlockHeader,
    BlockRegion,
    BlockSource,
    Store,
    is_whole,
    newest_whole,
)
from argosy.runtime.elastic.folder import check_folder
from argosy.runtime.elastic.leader import _MOST_BARREN, Leader
from argosy.runtime.elastic.origin import newest_base, steps_told
from argosy.runtime.elastic.replan import Replanner, regrouped
from argosy.runtime.elastic.snapshot import SnapshotPart, divide_duties
from argosy.runtime.elastic.workers import Workers
from argosy.runtime.processes.manifest import write_manifest
from argosy.runtime.processes.run_spec import RunSpec
from argosy.runtime.state.state import Rows
from argosy.schedule import ScheduleKind
from argosy.workload.load import load_model

ROWS = 6


def header(
    *pieces: tuple[str, int, int],
    generation: int = 1,
    step: int = 0,
    rank: int = 0,
    entries: int = 2,
) -> BlockHeader:
    """Pieces (entry, first row, rows) of tensors of ``ROWS`` rows and 4 columns, 8 bytes each."""
    made, at = [], 0
    for entry, first, rows in pieces:
        made.append(
            BlockRegion(
                entry=entry,
                first=(first, 0),
                sizes=(rows, 4),
                whole=(ROWS, 4),
                dtype="float64",
                begin=at,
                end=at + 32 * rows,
            )
        )
        at += 32 * rows
    return BlockHeader(
        generation=generation,
        step=step,
        rank=rank,
        scale=1.0,
        entries=entries,
        elements=entries * ROWS * 4,
        pieces=tuple(made),
    )


def test_copies_are_whole_only_where_every_row_is_there() -> None:
    one, other = header(("a", 0, 6), ("b", 0, 4)), header(("b", 3, 3), rank=1)
    assert is_whole([one, other])
    assert not is_whole([one]), "rows 4 and 5 of b are missing"
    assert not is_whole([header(("a", 0, 6))]), "nobody who is left has ever heard of b"
    assert not is_whole([])


def test_the_newest_whole_copies_count() -> None:
    old, new = header(("a", 0, 6), ("b", 0, 6), step=4), header(("a", 0, 6), step=5)
    assert newest_whole([old, new]) == (1, 4)
    assert newest_whole([old, new, header(("b", 0, 6), step=5, rank=1)]) == (1, 5)
    later = header(("a", 0, 6), ("b", 0, 6), generation=2, step=3)
    assert newest_whole([old, later]) == (2, 3), (
        "a later generation went on from where copies were whole"
    )


@given(
    st.lists(
        st.tuples(st.sampled_from("xyz"), st.sets(st.integers(0, 7), min_size=1)),
        min_size=2,
        max_size=6,
    )
)
def test_the_loss_of_any_host_loses_nothing(ranks: list[tuple[str, set[int]]]) -> None:
    """Parts are numbers here; hosts form a ring, as agents do."""
    held = [
        (host, [SnapshotPart(f"e{part}", (0,), (1,), (1,)) for part in sorted(parts)])
        for host, parts in ranks
    ]
    hosts = sorted({host for host, _ in held})
    kept: dict[str, set[SnapshotPart]] = {host: set() for host in hosts}
    for rank, (host, parts) in enumerate(held):
        duties = divide_duties(held, rank)
        assert duties.far <= duties.near <= set(parts)
        assert duties.entries == duties.elements == len({part for _, own in held for part in own})
        assert not kept[host] & duties.near, "a host's agent gets every part once"
        kept[host] |= duties.near
    for rank, (host, _) in enumerate(held):
        following = hosts[(hosts.index(host) + 1) % len(hosts)]
        kept[following] |= divide_duties(held, rank).far
    everything = {part for _, parts in held for part in parts}
    for lost in hosts if len(hosts) > 1 else []:
        assert set().union(*(parts for host, parts in kept.items() if host != lost)) == everything


def test_a_store_keeps_what_is_whole_and_what_is_newer() -> None:
    store = Store()
    for step in (1, 2, 3):
        store.put(header(("a", 0, 6), step=step), b"x" * 192, keep_from=(1, step - 1))
    assert sorted(found.step for found in store.headers()) == [2, 3]
    assert bytes(store.get((1, 3), 0, 32, 64)) == b"x" * 32
    store.keep_only((1, 2))
    assert [found.step for found in store.headers()] == [2]


def test_a_generation_goes_on_from_the_newest_of_copies_and_checkpoints(tmp_path: Path) -> None:
    assert newest_base(tmp_path, []).kind == "start"
    (tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)
    write_manifest(
        tmp_path / "checkpoints" / "step-00000004", {"steps": 4, "scale": 1.0, "aliases": {}}, {}
    )
    (tmp_path / "checkpoints" / ".step-00000009.partial").mkdir()
    sources = [
        BlockSource(address="x", port=1, header=header(("a", 0, 6), ("b", 0, 6), step=step))
        for step in (3, 5)
    ]
    assert newest_base(tmp_path, sources[:1]).step == 4
    assert newest_base(tmp_path, sources).moment == (1, 5)
    assert newest_base(tmp_path, []).path == tmp_path / "checkpoints" / "step-00000004"
    assert steps_told(tmp_path) == 0
    (tmp_path / "progress.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    assert steps_told(tmp_path) == 2


def test_only_one_can_claim_a_generation(tmp_path: Path) -> None:
    one, other = Claims(tmp_path), Claims(tmp_path)
    assert one.token() == other.token()
    claim = Claim(generation=1, leader="a", members=("a", "b"), last=9)
    assert one.claim(claim)
    assert not other.claim(replace(claim, leader="b"))
    assert other.newest() == claim
    assert other.claim(replace(claim, generation=2, leader="b"))
    newest = one.newest()
    assert newest is not None
    assert newest.leader == "b"


def test_a_leader_that_beats_is_not_silent(tmp_path: Path) -> None:
    leader, other = Claims(tmp_path), Claims(tmp_path)
    leader.beat()
    first = other.silence()
    leader.beat()
    assert other.silence() < 1
    assert first < 1
    leader.release()
    assert math.isinf(other.silence())


def test_the_end_leaves_only_the_outcome(tmp_path: Path) -> None:
    claims = Claims(tmp_path)
    claims.token()
    claims.register(AgentAddress(name="a", address="x", port=1))
    claims.beat()
    claims.claim(Claim(generation=1, leader="a", members=("a",), last=9))
    claims.end(RunOutcome(message="done", exit_code=0))
    assert [path.name for path in claims.folder.iterdir()] == ["outcome.json"]
    spec = RunSpec(plan="p", program="q", out=str(tmp_path), steps=1)
    with pytest.raises(
        InputError, match=r"the run there is over \(done\)\. Try another --out, or --resume"
    ):
        check_folder(spec)
    check_folder(replace(spec, resume=True))
    assert claims.outcome() is None
    (tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)
    with pytest.raises(InputError, match="checkpoints of an earlier run"):
        check_folder(spec)


def test_a_plan_without_costs_is_kept_as_far_as_it_goes() -> None:
    plan = plan_of(Case(shares=((3, 1), (2, 2), (4,))))
    devices = plan.devices
    without_replica = regrouped(plan, set(devices) - {devices[0]})
    assert without_replica is not None
    assert [[r.samples for r in stage.replicas] for stage in without_replica.stages] == [
        [4],
        [2, 2],
        [4],
    ]
    without_last = regrouped(plan, set(devices) - {devices[4]})
    assert without_last is not None
    assert [(stage.first, stage.end) for stage in without_last.stages] == [
        (plan.stages[0].first, plan.stages[0].end),
        (plan.stages[1].first, plan.stages[2].end),
    ]
    without_first = regrouped(plan, devices[2:])
    assert without_first is not None
    assert without_first.stages[0].first == 0
    assert without_first.schedule.kind is ScheduleKind.ONE_F_ONE_B
    assert regrouped(plan, ()) is None


def test_a_group_that_loses_members_goes_on_with_the_others() -> None:
    plan = plan_of(Case(shares=((2, 2), (4,)), ratios=((0.5, 0.5), (0.5, 0.3, 0.2))))
    devices = plan.devices
    left = regrouped(plan, set(devices) - {devices[0], devices[5]})
    assert left is not None
    assert [[r.devices for r in stage.replicas] for stage in left.stages] == [
        [devices[2:4]],
        [(devices[4], devices[6])],
    ]
    assert left.stages[1].replicas[0].ratios == pytest.approx((5 / 7, 2 / 7))
    alone = regrouped(plan, {devices[1], devices[4], devices[6]})
    assert alone is not None
    assert alone.stages[0].replicas == (Replica(devices=(devices[1],), samples=4),)


def test_devices_that_share_a_sequence_go_on_with_those_that_are_left() -> None:
    plan = plan_of(Case(shares=((2, 2),), ratios=((0.5, 0.3, 0.2),), context=True))
    first, second = plan.devices[:3], plan.devices[3:]
    left = regrouped(plan, {*first[1:], second[0]})
    assert left is not None
    (stage,) = left.stages
    assert [replica.devices for replica in stage.replicas] == [first[1:]]
    assert (stage.context, stage.replicas[0].samples) == (2, 4)
    assert stage.replicas[0].ratios == pytest.approx((0.6, 0.4))
    alone = regrouped(plan, {second[2]})
    assert alone is not None
    assert alone.stages[0].context == 1


def test_holders_of_experts_go_on_with_those_that_are_left() -> None:
    """Groups that share experts have one width; a run whose parts share experts has fewer parts."""
    groups = plan_of(
        Case(model="mixture", shares=((2, 2),), ratios=((0.5, 0.3, 0.2),), experts=(3, 3))
    )
    first, second = groups.devices[:3], groups.devices[3:]
    for lost, widths, expert in (
        (first[:1], [3], 1),
        ((first[0], second[1]), [2, 2], 2),
        ((*first[:2], second[1]), [2], 1),
    ):
        left = regrouped(groups, set(groups.devices) - set(lost))
        assert left is not None
        (stage,) = left.stages
        assert [replica.width for replica in stage.replicas] == widths
        assert stage.expert == expert
    parts = plan_of(
        Case(
            model="mixture",
            shares=((4,),),
            ratios=((0.5, 0.3, 0.2),),
            context=True,
            experts=(2, 2, 2),
        )
    )
    left = regrouped(parts, parts.devices[1:])
    assert left is not None
    assert (left.stages[0].context, left.stages[0].expert) == (2, 2)


def test_parts_on_groups_stay_if_a_replica_is_whole_and_end_on_single_devices_otherwise() -> None:
    even = (0.25,) * 4
    plan = plan_of(Case(shares=((2, 2),), ratios=(even,), context=True, members=2))
    first, second = plan.devices[:4], plan.devices[4:]
    whole = regrouped(plan, {*first[1:], *second})
    assert whole is not None
    assert [replica.devices for replica in whole.stages[0].replicas] == [second]
    assert whole.stages[0].context == 2
    left = regrouped(plan, {*first[1:], *second[2:]})
    assert left is not None
    (stage,) = left.stages
    assert [replica.devices for replica in stage.replicas] == [first[1:]]
    assert stage.context == 3


def test_experts_are_shared_again_by_the_replicas_that_are_left() -> None:
    plan = plan_of(Case(model="mixture", shares=((1, 1, 1, 3),), experts=(5, 1)))
    devices = plan.devices
    three = regrouped(plan, devices[1:])
    assert three is not None
    assert [replica.devices[0] for replica in three.stages[0].replicas] == list(devices[1:3])
    assert sum(replica.samples for replica in three.stages[0].replicas) == plan.micro_batch_size
    assert three.stages[0].expert_shares == plan.stages[0].expert_shares
    one = regrouped(plan, devices[3:])
    assert one is not None
    assert (one.stages[0].expert, one.stages[0].experts) == (1, ())


@given(st.sampled_from([0, 1]), st.data())
def test_any_region_is_read_from_the_parts_of_others(dim: int, data: st.DataObject) -> None:
    """A matrix in two blocks, cut by rows or by columns; what the blocks hold travels row by
    row."""
    whole = torch.arange(ROWS * 4, dtype=torch.float64).view(ROWS, 4)
    blocks, sources = {}, []
    for rank, part in enumerate(whole.split([2, whole.shape[dim] - 2], dim)):
        first = (2 * rank, 0) if dim == 0 else (0, 2 * rank)
        blocks[rank] = bytes(part.contiguous().view(-1).view(torch.uint8).tolist())
        piece = BlockRegion(
            entry="a",
            first=first,
            sizes=tuple(part.shape),
            whole=(ROWS, 4),
            dtype="float64",
            begin=0,
            end=len(blocks[rank]),
        )
        head = BlockHeader(
            generation=1,
            step=0,
            rank=rank,
            scale=1.0,
            entries=1,
            elements=ROWS * 4,
            pieces=(piece,),
        )
        sources.append(BlockSource(address="x", port=1, header=head))
    assert is_whole([source.header for source in sources])
    assert not is_whole([sources[0].header])

    @contextmanager
    def asking(
        address: str, port: int, token: str, greeting: Any, *, patience: float
    ) -> Iterator[Any]:
        yield io.BytesIO(
            b"".join(blocks[greeting["rank"]][begin:end] for begin, end in greeting["ranges"])
        )

    rows, columns = (
        data.draw(st.tuples(st.integers(0, n - 1), st.integers(1, n)).filter(lambda t: t[0] < t[1]))
        for n in (ROWS, 4)
    )
    sizes = (rows[1] - rows[0], columns[1] - columns[0])
    box = TensorBox((rows[0], columns[0]), (0, 0), sizes)
    wanted = Rows.of(torch.zeros(sizes, dtype=torch.float64), (box,), (ROWS, 4))
    places = {"a": [(source, source.header.pieces[0]) for source in sources]}
    with mock.patch.object(snapshot, "asking", asking):
        snapshot.Reading(places, token="", patience=1.0).fill({"a": wanted})
    assert torch.equal(wanted.as_subclass(torch.Tensor), whole[slice(*rows), slice(*columns)])


def test_samples_that_do_not_divide_go_where_they_are_fewest_for_what_was_planned() -> None:
    plan = plan_of(Case(shares=((1, 4, 2), (7,))))
    found = regrouped(plan, set(plan.devices) - {plan.devices[2]})
    assert found is not None
    assert [replica.samples for replica in found.stages[0].replicas] == [2, 5]


def test_without_costs_or_room_there_is_a_plan_or_none() -> None:
    plan, cluster = plan_of(Case()), cluster_from_content(CLUSTER)
    known = Replanner(
        first=plan, cluster=cluster, chain=load_model("llama-3-70b", sequence_length=8192)
    )
    left = plan.devices[:1]
    assert known.plan([device.name for device in cluster.devices]) is plan
    assert known.plan(left) is None, "too large for one device"
    assert replace(known, chain=None).plan(left) == regrouped(plan, left)


def leader(reached: dict[str, list[str]]) -> Any:
    """One that asks nobody: what hosts reach is given."""
    found: Any = Leader.__new__(Leader)
    found.node, found.spec = "a", SimpleNamespace(wait=0.0)
    found.replanner = SimpleNamespace(order=["a", "b", "c", "d"])
    found.members = {
        name: SimpleNamespace(host=AgentAddress(name=name, address=name, port=1))
        for name in reached
    }

    async def ask(message: Any) -> Any:
        assert [place[0] for place in message["places"]] == list(reached)
        return {name: {"reached": others} for name, others in reached.items()}

    found._ask_all = ask
    return found


def test_whoever_reaches_fewest_is_left_out_and_never_the_leader() -> None:
    everyone = ["a", "b", "c", "d"]
    assert asyncio.run(leader(dict.fromkeys(everyone, everyone)).connected()) == everyone
    one_way = {
        name: [other for other in everyone if {name, other} != {"b", "c"}] for name in everyone
    } | {"c": ["a"]}
    assert asyncio.run(leader(one_way).connected()) == ["a", "b", "d"]
    alone = {"a": ["a"], "b": ["b", "c"], "c": ["b", "c"]}
    assert asyncio.run(leader(alone).connected()) == ["a"]


def test_a_job_that_gets_nowhere_ends_with_its_reason() -> None:
    found = leader({"a": ["a"]})
    outcome = asyncio.run(found._form())
    assert outcome.message == "no plan fits on the present hosts, and no host joined for 0 s"
    assert outcome.exit_code == 3

    class Barren:
        has_stepped, why = False, "n.0: out of memory"

        def __init__(self, *_: Any) -> None: ...

        async def run(self) -> None: ...

    found.barren = 0
    with mock.patch("argosy.runtime.elastic.leader.GenerationWatch", Barren):
        outcomes = [asyncio.run(found._watch(None)) for _ in range(_MOST_BARREN)]
    assert outcomes[:-1] == [None] * (_MOST_BARREN - 1)
    told = f"{_MOST_BARREN} generations in a row ended before their first step, the last because n.0: out of memory"
    assert outcomes[-1].message == told


@given(st.data())
def test_regrouping_keeps_layers_and_samples(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from([ScheduleKind.ONE_F_ONE_B, ScheduleKind.INTERLEAVED]))
    shares = ((2, 2), (3, 1)) if kind is ScheduleKind.ONE_F_ONE_B else ((4,), (4,), (4,), (4,))
    plan = plan_of(Case(kind=kind, shares=shares))
    left = data.draw(st.sets(st.sampled_from(plan.devices), min_size=1))
    found = regrouped(plan, left)
    assert found is not None
    assert set(found.devices) <= left
    ends = [0, *(stage.end for stage in found.stages)]
    assert [stage.first for stage in found.stages] == ends[:-1]
    assert ends[-1] == plan.stages[-1].end
    assert all(
        sum(r.samples for r in stage.replicas) == plan.micro_batch_size for stage in found.stages
    )
    assert all(r.samples > 0 for stage in found.stages for r in stage.replicas)


def test_later_generations_are_planned_with_the_cost_model_of_the_first_plan(
    tmp_path: Path,
) -> None:
    """A slow calibration predicts slow plans, also for the devices that are left."""
    calibration = Calibration(forward_peak=0.05, backward_peak=0.05, bandwidth=0.1)
    chain, cluster = load_model("gpt2", sequence_length=128, dtype="fp32"), load_cluster("mixed-8")
    first = find_plan(
        calibration.chain(chain),
        calibration.cluster(cluster),
        global_batch=8,
        model=calibration.compute_model(),
    )
    (tmp_path / "plan.json").write_text(dumps_plan(first))
    spec = RunSpec(plan=str(tmp_path / "plan.json"), program="train.py", out=str(tmp_path), steps=1)
    replanner = replanner_of(spec, load_plan(spec.plan))
    left = replanner.plan(
        [device.name for device in cluster.devices if device.name not in first.devices[:1]]
    )
    assert left is not None and left != first
    assert left.cost_model == first.cost_model is not None


def test_workers_of_one_host_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise every worker starts as many threads as there are cores, and they wait for each
    other."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    Workers(lambda *_: None, 1)
    assert "OMP_NUM_THREADS" not in os.environ
    Workers(lambda *_: None, 2)
    assert os.environ["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    Workers(lambda *_: None, 2)
    assert os.environ["OMP_NUM_THREADS"] == "3"
