"""Plans as torchtitan jobs: the TOML read as TOML, the schedule by torch's own reader and dry run."""

from __future__ import annotations

import csv
import io
import tomllib
from dataclasses import replace

import pytest
from target_readers import options_of, plan, run_script, with_stage
from torch.distributed.pipelining import schedules as torch_schedules

from argosy.dtype import Dtype
from argosy.errors import InputError
from argosy.export.form import Export
from argosy.export.torchtitan import export_torchtitan
from argosy.plan.plan import Plan
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.workload.load import load_model

CHAIN = load_model("llama-3-8b", sequence_length=2048)
KNOWN = {
    "model": {"name", "flavor"},
    "training": {"local_batch_size", "global_batch_size", "seq_len", "mixed_precision_param"},
    "parallelism": {
        "data_parallel_replicate_degree", "data_parallel_shard_degree", "fsdp_reshard_after_forward",
        "tensor_parallel_degree", "context_parallel_degree", "expert_parallel_degree", "pipeline_parallel_degree",
        "module_fqns_per_model_part", "pipeline_parallel_schedule", "pipeline_parallel_schedule_csv",
        "pipeline_parallel_microbatch_size",
    },
    "activation_checkpoint": {"mode"},
}  # fmt: skip
"""Fields of torchtitan's JobConfig by section, as its source has them."""


def files(made: Export) -> dict[str, str]:
    return dict(made.files)


def job(plan: Plan, *, lossy: bool = False) -> dict[str, dict[str, object]]:
    return tomllib.loads(files(export_torchtitan(plan, CHAIN, lossy=lossy))["torchtitan.toml"])


def test_the_job_says_what_the_plan_says() -> None:
    found = job(plan([13, 26, 30, 34], samples=2))
    parallel = found["parallelism"]
    assert {section: set(values) for section, values in found.items()} == KNOWN
    assert found["model"] == {"name": "llama3", "flavor": "8B"}
    assert (parallel["pipeline_parallel_degree"], parallel["tensor_parallel_degree"]) == (4, 2)
    assert (parallel["data_parallel_replicate_degree"], parallel["data_parallel_shard_degree"]) == (2, 1)
    training = found["training"]
    assert training["local_batch_size"] == 2 * 8
    assert training["global_batch_size"] == 32
    assert parallel["pipeline_parallel_microbatch_size"] == 2


@pytest.mark.parametrize("ends", [[13, 26, 30, 34], [1, 2, 33, 34], [9, 17, 26, 34]])
def test_modules_are_the_layers_of_the_stages(ends: list[int]) -> None:
    parts = job(plan(ends))["parallelism"]["module_fqns_per_model_part"]
    assert isinstance(parts, list)
    starts = [0, *ends[:-1]]
    for part, first, end in zip(parts, starts, ends, strict=True):
        assert len([name for name in part if name != "norm"]) == end - first
    flat = [name for part in parts for name in part]
    assert flat == ["tok_embeddings", *(f"layers.{index}" for index in range(32)), "norm", "output"]


SPECS = {
    "1f1b": ScheduleSpec(),
    "gpipe": ScheduleSpec(kind=ScheduleKind.GPIPE),
    "kfkb": ScheduleSpec(kind=ScheduleKind.KFKB, k=2),
    "eager": ScheduleSpec(kind=ScheduleKind.EAGER),
    "depths": ScheduleSpec(kind=ScheduleKind.EAGER, depth=(8, 5, 3, 1)),
    "zero-bubble": ScheduleSpec(kind=ScheduleKind.ZERO_BUBBLE),
    "interleaved": ScheduleSpec(kind=ScheduleKind.INTERLEAVED, chunks=2),
}


@pytest.mark.parametrize("name", SPECS)
def test_torch_reads_the_schedule_and_finds_no_deadlock(name: str) -> None:
    hosts = ("a0", "a1", "a0", "a1") if name == "interleaved" else ("a0", "a1", "v0", "v1")
    made = plan([13, 26, 30, 34], hosts=hosts, schedule=SPECS[name])
    text = files(export_torchtitan(made, CHAIN))["schedule.csv"]
    workers = 2 if name == "interleaved" else 4
    order = {
        rank: [torch_schedules._Action.from_str(word) for word in row]
        for rank, row in enumerate(csv.reader(io.StringIO(text)))
    }
    assert len(order) == workers
    ranks = torch_schedules._validate_schedule(order, workers, 4, 8)
    num_actions = sum(map(len, order.values()))
    lowered = torch_schedules._add_send_recv(order, stage_to_rank=lambda stage: ranks[stage], num_stages=4)
    played = torch_schedules._simulate_comms_compute(lowered, lambda stage: ranks[stage], 4)
    computed = [action for row in played.values() for action in row if action is not None and action.is_compute_op]
    assert len(computed) == num_actions
    kind = job(made)["parallelism"]["pipeline_parallel_schedule"]
    is_single = issubclass(torch_schedules.get_schedule_class(str(kind)), torch_schedules.PipelineScheduleSingle)
    assert is_single == (workers == 4)


def test_levels_of_zero() -> None:
    def degrees(level: int) -> tuple[object, ...]:
        made = plan([13, 26, 30, 34])
        for index in range(4):
            made = with_stage(made, index, zero=level)
        found = job(made, lossy=level == 1)["parallelism"]
        names = ("data_parallel_replicate_degree", "data_parallel_shard_degree", "fsdp_reshard_after_forward")
        return tuple(found[name] for name in names)

    assert degrees(0) == (2, 1, "never")
    assert degrees(1) == degrees(2) == (1, 2, "never")
    assert degrees(3) == (1, 2, "always")


def test_what_it_has_no_words_for() -> None:
    half = plan([13, 26, 30, 34])
    half = replace(half, model=replace(half.model, dtype=Dtype.FP16))
    with pytest.raises(InputError, match="bf16 or fp32, which torchtitan trains in"):
        export_torchtitan(half, CHAIN)
    assert job(half, lossy=True)["training"]["mixed_precision_param"] == "bfloat16"
    other = load_model("llama-2-7b", sequence_length=2048)
    with pytest.raises(InputError, match="a model that torchtitan has"):
        export_torchtitan(half, other)


def test_commands_name_the_file() -> None:
    script = files(export_torchtitan(plan([13, 26, 30, 34]), CHAIN))["run.sh"]
    calls = run_script(script)
    assert len(calls) == 4
    assert options_of(calls[2])["node-rank"] == "2"
    assert calls[0][-2:] == ["--job.config_file", "torchtitan.toml"]


def test_one_stage_needs_no_schedule() -> None:
    made = export_torchtitan(plan([34], hosts=("a0",)), CHAIN)
    assert [name for name, _ in made.files] == ["torchtitan.toml", "run.sh"]


def accumulated(found: dict[str, dict[str, object]]) -> int:
    """Micro-batches whose gradients torchtitan adds up, as its trainer counts them."""
    training, parallel = found["training"], found["parallelism"]
    groups = int(str(parallel["data_parallel_replicate_degree"])) * int(str(parallel["data_parallel_shard_degree"]))
    return int(str(training["global_batch_size"])) // (int(str(training["local_batch_size"])) * groups)


def test_one_stage_takes_its_micro_batches_one_by_one() -> None:
    """A pipeline cuts the local batch itself; without one all of it would be in memory at once."""
    assert accumulated(job(plan([34], hosts=("a0",), samples=2))) == 8
    assert accumulated(job(plan([13, 26, 30, 34], samples=2))) == 1


def with_experts(made: Plan, level: int, context: int = 1) -> Plan:
    for index in range(len(made.stages)):
        made = with_stage(made, index, expert=2, zero=level, context=context)
    return made


def test_experts_are_taken_from_the_ranks_that_shard() -> None:
    """Its rule: the holders of experts divide the ranks that shard weights, times the parts of a sequence."""
    made = plan([13, 26, 30, 34])
    for level in (0, 2, 3):
        found = job(with_experts(made, level), lossy=level == 0)["parallelism"]
        assert int(str(found["data_parallel_shard_degree"])) % int(str(found["expert_parallel_degree"])) == 0
        assert found["expert_tensor_parallel_degree"] == found["tensor_parallel_degree"] == 2
    with pytest.raises(InputError, match=r"stages\.zero: found 0, expected 2 or 3 where experts"):
        job(with_experts(made, 0))
    wide = with_experts(plan([34], hosts=("a0",), data=1, width=4), 2, context=4)
    with pytest.raises(InputError, match="a multiple of the 4 parts of a sequence"):
        job(wide, lossy=True)
