"""Baselines for equal devices: their plans make sense, fit, and are the best of what their rules
allow."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from argosy.baselines import BASELINES, NoPlan, PlanningJob
from argosy.baselines.assemble import even_cuts, played, shared_by, shared_evenly, shortage
from argosy.cluster.file import load_cluster
from argosy.cluster.lasting import at_time_zero
from argosy.cost.compute import ComputeModel
from argosy.plan.check import check_plan
from argosy.plan.plan import Plan, Replica, Stage
from argosy.sim.simulate import simulate
from argosy.workload.load import load_model

CLUSTERS = ("two-cards", "mixed-8", "geo-8", "one-per-node-16")


def job_of(cluster: str, model: str = "gpt2", batch: int = 16) -> PlanningJob:
    chain = load_model(model, sequence_length=512, dtype="fp16")
    return PlanningJob(
        chain=chain,
        cluster=at_time_zero(load_cluster(cluster)),
        global_batch=batch,
        model=ComputeModel(),
    )


@pytest.mark.parametrize(("cluster", "name"), [*itertools.product(CLUSTERS, BASELINES)])
def test_plans_make_sense_and_fit(cluster: str, name: str) -> None:
    job = job_of(cluster)
    plan = BASELINES[name](job)
    assert isinstance(plan, Plan), plan
    check_plan(plan, job.chain, job.cluster)
    peaks = simulate(plan, job.chain, job.cluster).peak_memory()
    assert all(held <= job.device(device).kind.memory for device, held in peaks.items())
    assert {left.device for left in plan.left_out} == set(job.devices) - set(plan.devices)


@pytest.mark.parametrize("cluster", ["two-cards", "mixed-8"])
def test_even_plan_is_the_best_of_all_even_plans(cluster: str) -> None:
    """Against an enumeration of its own, whole in the simulator."""
    job = job_of(cluster)
    plan = BASELINES["megatron"](job)
    assert isinstance(plan, Plan)
    best = min(played(job, other, whole=True) for other in _all_even(job, plan))
    assert played(job, plan, whole=True) == pytest.approx(best, rel=1e-12)


def _all_even(job: PlanningJob, like: Plan) -> list[Plan]:
    found = []
    count = len(job.devices)
    for tensor, replicas, stages in itertools.product(
        (1, 2, 4), range(1, count + 1), range(1, count + 1)
    ):
        if tensor * replicas * stages != count:
            continue
        for size in (size for size in range(1, 17) if 16 % size == 0 and size % replicas == 0):
            ranks = iter(job.devices)
            layout = []
            for first, end in even_cuts(job, stages):
                groups = [tuple(itertools.islice(ranks, tensor)) for _ in range(replicas)]
                members = tuple(
                    Replica(devices=group, samples=size // replicas) for group in groups
                )
                layout.append(
                    Stage(first=first, end=end, replicas=members, zero=1 if replicas > 1 else 0)
                )
            sizes = {"micro_batch_size": size, "num_micro_batches": 16 // size}
            plan = Plan(**{**vars(like), **sizes, "stages": tuple(layout)})
            if shortage(job, plan) is None:
                found.append(plan)
    return found


def test_even_stages_have_equally_many_blocks() -> None:
    job = job_of("mixed-8", "gpt2-medium")  # an embedding, 24 blocks, a head
    assert even_cuts(job, 4) == [(0, 7), (7, 13), (13, 19), (19, 26)]
    assert even_cuts(job, 5)[0] == (0, 6)
    assert [end - first for first, end in even_cuts(job, 5)] == [6, 5, 5, 5, 5]


def test_proportional_shares_follow_speed() -> None:
    job = job_of("two-cards", batch=60)
    plan = BASELINES["dp-cp"](job)
    assert isinstance(plan, Plan)
    new, old = job.pace("box0.0"), job.pace("box0.2")
    taken = [replica.samples * plan.num_micro_batches for replica in plan.stages[0].replicas]
    assert taken[0] / taken[2] == pytest.approx(old / new, rel=0.25)
    assert taken[0] == taken[1] > taken[2] == taken[3]


def test_proportional_batches_beat_even_ones_where_devices_differ() -> None:
    job = job_of("two-cards", batch=64)
    even, proportional = (BASELINES[name](job) for name in ("dp-ev", "dp-cp"))
    assert isinstance(even, Plan) and isinstance(proportional, Plan)
    assert played(job, proportional) < 0.8 * played(job, even)


def test_one_kind_leaves_the_others_out() -> None:
    job = job_of("mixed-8")
    plan = BASELINES["megatron-1-kind"](job)
    assert isinstance(plan, Plan)
    assert {job.device(name).kind.name for name in plan.devices} == {"RTX-A6000"}


@pytest.mark.parametrize("name", ["dp-ev", "dp-cp"])
def test_a_model_that_does_not_fit_is_refused_with_the_device_that_lacks_memory(name: str) -> None:
    refused = BASELINES[name](job_of("two-cards", "gpt2-xl"))
    assert isinstance(refused, NoPlan)
    assert refused.reason.startswith("box0.2 would need ")


def test_too_few_samples_are_refused() -> None:
    refused = BASELINES["fsdp"](job_of("one-per-node-16", batch=8))
    assert refused == NoPlan(reason="8 samples, too few for 16 devices")


def test_one_kind_on_a_cluster_of_one_kind(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('name = "c"\n[[nodes]]\nname = "a"\ndevices = { kind = "T4", count = 2 }\n')
    file.write_text(
        file.read_text()
        + 'intra = [{ medium = "pcie", bandwidth = "12 GB/s", latency = "5 us" }]\n'
    )
    chain = load_model("gpt2", sequence_length=128, dtype="fp16")
    job = PlanningJob(chain=chain, cluster=load_cluster(file), global_batch=4, model=ComputeModel())
    assert isinstance(BASELINES["megatron-1-kind"](job), NoPlan)
    assert isinstance(BASELINES["megatron"](job), Plan)


def test_shares_keep_every_sample() -> None:
    for samples, count in itertools.product(range(1, 20), range(1, 7)):
        assert sum(shared_evenly(samples, count)) == samples
        assert sum(shared_by([1.0 + at for at in range(count)], samples)) == samples
