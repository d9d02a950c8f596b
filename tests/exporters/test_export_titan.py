"""Plans as torchtitan recipes: the module read as Python, the schedule by torch's own reader and
dry run.

That torchtitan itself reads them is tested by ``make test-doors``."""

from __future__ import annotations

import ast
import csv
import io
from dataclasses import replace
from typing import Any

import pytest
from exporters.target_readers import options_of, plan, run_script, with_stage
from torch.distributed.pipelining import schedules as torch_schedules

from argosy.dtype import Dtype
from argosy.errors import InputError
from argosy.exporters.form import Export
from argosy.exporters.torchtitan import export_torchtitan
from argosy.plan.plan import Plan
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.workload.architecture import Architecture
from argosy.workload.load import load_architecture, load_model

CHAIN = load_model("llama-3-8b", sequence_length=2048)
SHAPE = load_architecture("llama-3-8b")


def files(made: Export) -> dict[str, str]:
    return dict(made.files)


def recipe(
    plan: Plan, *, lossy: bool = False, shape: Architecture = SHAPE
) -> tuple[ast.Module, str]:
    text = files(export_torchtitan(plan, CHAIN, shape, lossy=lossy))["argosy_recipe.py"]
    return ast.parse(text), text


def job(
    plan: Plan, *, lossy: bool = False, shape: Architecture = SHAPE
) -> dict[str, dict[str, Any]]:
    """The values that the recipe passes to each configuration class; names and calls as they are
    written."""
    found: dict[str, dict[str, Any]] = {}
    for node in ast.walk(recipe(plan, lossy=lossy, shape=shape)[0]):
        if isinstance(node, ast.Call):
            values = {
                one.arg: one.value.value
                if isinstance(one.value, ast.Constant)
                else ast.unparse(one.value)
                for one in node.keywords
                if one.arg is not None
            }
            found[ast.unparse(node.func)] = values
    return found


def stages_of(plan: Plan) -> list[list[str]]:
    for node in recipe(plan)[0].body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "STAGES":
            parts: list[list[str]] = ast.literal_eval(node.value)
            return parts
    raise AssertionError("no STAGES")


def test_the_recipe_says_what_the_plan_says() -> None:
    found = job(plan([13, 26, 30, 34], samples=2))
    parallel, training = found["ParallelismConfig"], found["TrainingConfig"]
    assert (parallel["pipeline_parallel_degree"], parallel["tensor_parallel_degree"]) == (4, 2)
    assert (parallel["data_parallel_replicate_degree"], parallel["data_parallel_shard_degree"]) == (
        2,
        1,
    )
    assert (training["local_batch_size"], training["global_batch_size"]) == (2 * 8, 32)
    assert parallel["pipeline_parallel_microbatch_size"] == 2
    assert training["disable_cuda_graphs"] is True, "it captures no pipelines"
    assert found["Trainer.Config"]["activation_checkpoint"] is None


def test_rotary_positions_are_those_of_the_model() -> None:
    """Its flavors of Llama are scaled as Llama 3.1 is."""
    assert "rope.theta, rope.scaling = 500000.0, 'none'" in recipe(plan([13, 26, 30, 34]))[1]
    _, text = recipe(plan([13, 26, 30, 34]), shape=load_architecture("llama-3.1-405b"))
    assert "rope.theta, rope.scaling = 500000.0, 'llama'" in text
    assert "rope.scaling_factor = 8.0" in text


@pytest.mark.parametrize("kind", ScheduleKind)
def test_the_last_norm_keeps_its_gradient_under_schedules_that_split_backwards(
    kind: ScheduleKind,
) -> None:
    """By a loss that is not computed in chunks; V-shaped schedules go by torch's names and have no
    CSV."""
    chunks = 2 if kind is ScheduleKind.INTERLEAVED else 1
    found = job(replace(plan([9, 17, 26, 34]), schedule=ScheduleSpec(kind=kind, chunks=chunks)))
    loss = "loss" if kind.is_split else "ChunkedLossWrapper.Config(loss_fn=loss)"
    assert found["Trainer.Config"]["loss"] == loss
    parallel = found["ParallelismConfig"]
    named = {"zero-bubble-v": "ZBVZeroBubble", "dualpipe-v": "DualPipeV"}.get(kind)
    assert (parallel["pipeline_parallel_schedule"] == named) == (
        "pipeline_parallel_schedule_csv" not in parallel
    )


@pytest.mark.parametrize("ends", [[13, 26, 30, 34], [1, 2, 33, 34], [9, 17, 26, 34]])
def test_modules_are_the_layers_of_the_stages(ends: list[int]) -> None:
    parts = stages_of(plan(ends))
    starts = [0, *ends[:-1]]
    for part, first, end in zip(parts, starts, ends, strict=True):
        assert len([name for name in part if name != "norm"]) == end - first
    flat = [name for part in parts for name in part]
    assert flat == [
        "tok_embeddings",
        *(f"layers.{index}" for index in range(32)),
        "norm",
        "lm_head",
    ]


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
    text = files(export_torchtitan(made, CHAIN, SHAPE))["schedule.csv"]
    workers = 2 if name == "interleaved" else 4
    order = {
        rank: [torch_schedules._Action.from_str(word) for word in row]
        for rank, row in enumerate(csv.reader(io.StringIO(text)))
    }
    assert len(order) == workers
    ranks = torch_schedules._validate_schedule(order, workers, 4, 8)
    num_actions = sum(map(len, order.values()))
    lowered = torch_schedules._add_send_recv(
        order, stage_to_rank=lambda stage: ranks[stage], num_stages=4
    )
    played = torch_schedules._simulate_comms_compute(lowered, lambda stage: ranks[stage], 4)
    computed = [
        action
        for row in played.values()
        for action in row
        if action is not None and action.is_compute_op
    ]
    assert len(computed) == num_actions
    kind = job(made)["ParallelismConfig"]["pipeline_parallel_schedule"]
    is_single = issubclass(
        torch_schedules.get_schedule_class(kind), torch_schedules.PipelineScheduleSingle
    )
    assert is_single == (workers == 4)


def test_levels_of_zero() -> None:
    def degrees(level: int) -> tuple[object, ...]:
        made = plan([13, 26, 30, 34])
        for index in range(4):
            made = with_stage(made, index, zero=level)
        found = job(made, lossy=level == 1)["ParallelismConfig"]
        names = (
            "data_parallel_replicate_degree",
            "data_parallel_shard_degree",
            "fsdp_reshard_after_forward",
        )
        return tuple(found[name] for name in names)

    assert degrees(0) == (2, 1, "never")
    assert degrees(1) == degrees(2) == (1, 2, "never")
    assert degrees(3) == (1, 2, "always")


def test_what_it_has_no_words_for() -> None:
    half = plan([13, 26, 30, 34])
    half = replace(half, model=replace(half.model, dtype=Dtype.FP16))
    with pytest.raises(
        InputError, match=r"found fp16, expected bf16 or fp32, which torchtitan 0\.3\.0 trains in"
    ):
        export_torchtitan(half, CHAIN, SHAPE, lossy=True)
    other = load_model("llama-2-7b", sequence_length=2048)
    with pytest.raises(InputError, match=r"a model with a recipe for torchtitan 0\.3\.0"):
        export_torchtitan(half, other, SHAPE, lossy=True)


def test_commands_name_the_recipe() -> None:
    script = files(export_torchtitan(plan([13, 26, 30, 34]), CHAIN, SHAPE))["run.sh"]
    calls = run_script(script)
    assert len(calls) == 4
    assert options_of(calls[2])["node-rank"] == "2"
    assert calls[0][-4:] == ["--module", "argosy_recipe", "--config", "planned"]


def test_one_stage_needs_no_schedule() -> None:
    made = export_torchtitan(plan([34], hosts=("a0",)), CHAIN, SHAPE)
    assert [name for name, _ in made.files] == ["argosy_recipe.py", "run.sh"]


def accumulated(found: dict[str, dict[str, Any]]) -> int:
    """Micro-batches whose gradients torchtitan adds up, as its trainer counts them."""
    training, parallel = found["TrainingConfig"], found["ParallelismConfig"]
    groups = parallel["data_parallel_replicate_degree"] * parallel["data_parallel_shard_degree"]
    return int(training["global_batch_size"] // (training["local_batch_size"] * groups))


def test_one_stage_takes_its_micro_batches_one_by_one() -> None:
    """A pipeline cuts the local batch itself; without one all of it would be in memory at once."""
    assert accumulated(job(plan([34], hosts=("a0",), samples=2))) == 8
    assert accumulated(job(plan([13, 26, 30, 34], samples=2))) == 1


def with_experts(made: Plan, level: int, context: int = 1) -> Plan:
    for index in range(len(made.stages)):
        made = with_stage(made, index, expert=2, zero=level, context=context)
    return made


def test_experts_are_taken_from_the_ranks_that_shard() -> None:
    """Its rule: the holders of experts divide the ranks that shard weights or tensors."""
    made, mixture = plan([13, 26, 30, 34]), load_architecture("qwen3-30b-a3b")
    for level in (0, 2, 3):
        found = job(with_experts(made, level), lossy=level == 0, shape=mixture)["ParallelismConfig"]
        ranks = found["data_parallel_shard_degree"] * found["tensor_parallel_degree"]
        assert found["expert_parallel_degree"] == 4 and ranks % 4 == 0
    with pytest.raises(InputError, match=r"stages\.zero: found 0, expected 2 or 3 where experts"):
        job(with_experts(made, 0), shape=mixture)
    wide = with_experts(plan([34], hosts=("a0",), data=1, width=4), 2, context=4)
    with pytest.raises(InputError, match="a multiple of the 4 parts of a sequence"):
        job(wide, lossy=True, shape=mixture)
