"""Plans for DeepSpeed, FlagScale and plain torchrun, each read back; and the command that writes
them."""

from __future__ import annotations

import ast
import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli.command_result import Result
from exporters.target_readers import (
    cluster,
    options_of,
    plan,
    read_hostfile,
    read_json,
    read_meshes,
    run_script,
    visible_devices,
    with_stage,
)
from torch.distributed.run import get_args_parser

from argosy.cli import main
from argosy.cluster.host import Tier
from argosy.errors import InputError
from argosy.exporters.deepspeed import export_deepspeed
from argosy.exporters.flagscale import export_flagscale
from argosy.exporters.systems import System
from argosy.exporters.torchrun import export_torchrun
from argosy.exporters.write import ExportOptions, export_plan
from argosy.plan.file import dumps_plan
from argosy.plan.offload import Offload
from argosy.plan.plan import CostModelRef, Plan, Recompute
from argosy.runtime.job.launch import Launch
from argosy.runtime.processes.ranks import devices_by_rank
from argosy.runtime.processes.run_spec import RunSpec, read_run_spec
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.workload.load import load_architecture, load_model

CHAIN, SHAPE = load_model("llama-3-8b", sequence_length=2048), load_architecture("llama-3-8b")


def deepspeed(plan: Plan, *, lossy: bool = False) -> dict[str, str]:
    return dict(export_deepspeed(plan, CHAIN, lossy=lossy).files)


def test_deepspeed_batches_multiply_up() -> None:
    """The rule of its documentation: whole batch = micro-batch x accumulation x data-parallel
    groups."""
    config = read_json(deepspeed(plan([9, 18, 26, 34], samples=2, width=1))["ds_config.json"])
    product = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * 2  # type: ignore[operator]
    assert config["train_batch_size"] == product == 32
    assert config["bf16"] == {"enabled": True}


def test_deepspeed_adds_gradients_up_in_the_format_that_was_planned() -> None:
    made = plan([9, 18, 26, 34], width=1)
    assert read_json(deepspeed(made)["ds_config.json"])["data_types"] == {
        "grad_accum_dtype": "bf16"
    }
    main = replace(made, cost_model=CostModelRef.of({"constants": {"gradient_dtype": "fp32"}}))
    assert read_json(deepspeed(main)["ds_config.json"])["data_types"] == {
        "grad_accum_dtype": "fp32"
    }


def constants(text: str) -> dict[str, Any]:
    """The literal values that a module assigns."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            with contextlib.suppress(ValueError):
                found[node.targets[0].id] = ast.literal_eval(node.value)
    return found


def test_deepspeed_cuts_as_the_plan_does() -> None:
    """Uneven stages and recomputation by stage: the module has both."""
    made = with_stage(plan([13, 26, 30, 34], width=1), 1, recompute=Recompute.FULL)
    found = constants(deepspeed(made)["argosy_pipeline.py"])
    assert found == {"CUTS": [0, 13, 26, 30, 34], "RECOMPUTES": [False, True, False, False]}
    alone = with_stage(plan([34], hosts=("a0",), width=1), 0, zero=3)
    assert list(deepspeed(alone)) == ["ds_config.json", "run.sh"], (
        "ZeRO 3 and its pipeline exclude each other"
    )
    with pytest.raises(InputError, match="your model has to do it"):
        deepspeed(with_stage(alone, 0, recompute=Recompute.FULL))


def test_deepspeed_hosts_and_devices() -> None:
    script = deepspeed(plan([9, 18, 26, 34], width=1))["run.sh"]
    calls = [options_of(call) for call in run_script(script)]
    assert [call["nproc-per-node"] for call in calls] == ["2"] * 4
    assert visible_devices(script) == [("0", "1")] * 4


def test_deepspeed_splits_no_tensors() -> None:
    with pytest.raises(
        InputError,
        match=r"stages\[0\].width: found 2, expected at most 1: DeepSpeed splits no further",
    ):
        deepspeed(plan([13, 26, 30, 34]), lossy=True)
    with pytest.raises(InputError, match="selective"):
        deepspeed(with_stage(plan([9, 18, 26, 34], width=1), 0, recompute=Recompute.SELECTIVE))


@pytest.mark.parametrize(
    ("optimizer", "state"), [("momentum", {"momentum": 0.9}), ("sgd", {}), ("adamw", {})]
)
def test_deepspeed_is_told_what_the_optimizer_keeps(
    optimizer: str, state: dict[str, float]
) -> None:
    """It refuses to shard the state of an optimizer that it has not tested, SGD among them, unless
    it is told to."""
    made = plan([9, 18, 26, 34], width=1)
    for index in range(4):
        made = with_stage(made, index, zero=1)
    made = replace(made, model=replace(made.model, optimizer=optimizer))
    config: Any = read_json(deepspeed(made)["ds_config.json"])
    assert {
        name: value for name, value in config["optimizer"]["params"].items() if name != "lr"
    } == state
    assert config.get("zero_allow_untested_optimizer", False) == (optimizer != "adamw")


def flagscale(
    plan: Plan, *, lossy: bool = False
) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
    found = dict(export_flagscale(plan, CHAIN, SHAPE, cluster(), lossy=lossy).files)
    return yaml.safe_load(found["train_hetero.yaml"]), read_hostfile(found["hostfile"])


PUBLISHED = """
system:
  hetero:
    enable_hetero: True
    hetero_pipeline_layer_split: [2, 4, 2]
    hetero_process_meshes: [2, 1, 1, 1, 1, 2, 1, 1, 2, 1, 1, 1, 1, 2, 1]
    hetero_device_types: ["A800", "A800", "A800"]
"""
"""The heterogeneous part of a configuration from FlagScale's own functional tests."""


def test_flagscale_fields_are_those_that_others_have_published() -> None:
    theirs = yaml.safe_load(PUBLISHED)["system"]["hetero"]
    assert read_meshes(theirs["hetero_process_meshes"]) == [
        (2, 1, 1, 1, 1),
        (2, 1, 1, 2, 1),
        (1, 1, 1, 2, 1),
    ]
    ours = flagscale(plan([13, 26, 30, 34]))[0]["train"]["system"]["hetero"]
    assert set(theirs) <= set(ours)


def test_flagscale_meshes_are_runs_of_stages_that_are_alike() -> None:
    content, hosts = flagscale(plan([13, 26, 30, 34]))
    hetero = content["train"]["system"]["hetero"]
    assert read_meshes(hetero["hetero_process_meshes"]) == [(2, 1, 1, 2, 2), (2, 1, 1, 2, 2)]
    assert hetero["hetero_device_types"] == ["A100-80GB", "V100-32GB"]
    assert hetero["hetero_pipeline_layer_split"] == [12, 13, 4, 3]
    assert sum(hetero["hetero_pipeline_layer_split"]) == content["train"]["model"]["num_layers"]
    assert hosts["v1"] == {"slots": "4", "type": "V100-32GB"}


def test_flagscale_says_what_megatron_cannot() -> None:
    """Unequal widths and numbers of replicas, and recomputation by stage."""
    wide = plan([13, 26, 30, 34], samples=2)
    whole = replace(wide.stages[3].replicas[0], devices=("v1.0", "v1.1", "v1.2", "v1.3"), samples=4)
    made = with_stage(with_stage(wide, 3, replicas=(whole,)), 3, recompute=Recompute.FULL)
    content, _ = flagscale(made)
    assert read_meshes(content["train"]["system"]["hetero"]["hetero_process_meshes"])[-1] == (
        4,
        1,
        1,
        1,
        1,
    )
    again = content["train"]["system"]["recompute"]["recompute_granularity_per_stage_micro_batch"]
    assert again == [[1, 8, 0], [1, 8, 0], [1, 8, 0], [1, 8, 1]]
    # what a replica of a mesh takes, by FlagScale's rule, is what the plan gives it
    data = [
        mesh[3]
        for mesh in read_meshes(content["train"]["system"]["hetero"]["hetero_process_meshes"])
    ]
    shares = [content["train"]["model"]["micro_batch_size"] * data[0] // count for count in data]
    assert (shares[0], shares[-1]) == (2, 4)


def test_flagscale_refuses_mixed_kinds() -> None:
    made = plan([13, 26, 30, 34])
    mixed = (made.stages[1].replicas[0], made.stages[2].replicas[0])
    with pytest.raises(InputError, match="A100-80GB and V100-32GB"):
        flagscale(with_stage(made, 1, replicas=mixed), lossy=True)
    with pytest.raises(InputError, match="a block in every stage"):
        flagscale(plan([1, 12, 24, 34]), lossy=True)


@pytest.mark.parametrize("kind", [ScheduleKind.ZERO_BUBBLE_V, ScheduleKind.DUALPIPE_V])
@pytest.mark.parametrize("to", ["megatron", "deepspeed", "flagscale", "torch"])
def test_v_shaped_schedules_are_refused_by_name(kind: ScheduleKind, to: str) -> None:
    """Also with ``lossy``: a worker has two stages, which no other schedule of these systems places
    so."""
    planned = replace(plan([9, 17, 26, 34], data=1, width=1), schedule=ScheduleSpec(kind=kind))
    with pytest.raises(
        InputError, match=rf"schedule: found {kind}, expected .*1f1b.*, which \S+ runs"
    ):
        export_plan(planned, cluster(), System(to), ExportOptions(lossy=True))


def launch_of(planned: Plan) -> Launch:
    return Launch(
        plan=planned, spec=RunSpec(plan="plan.json", program="train.py:build", out="run", steps=7)
    )


def test_torchrun_itself_reads_the_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plan([13, 26, 30, 34], data=4, width=1)
    ((_, script),) = export_torchrun(launch_of(made)).files
    monkeypatch.chdir(tmp_path)
    script = script.replace("python -m argosy.runtime.processes.meeting", "torchrun")
    found = [get_args_parser().parse_args(call) for call in run_script(script)]
    assert [call.rdzv_conf for call in found] == [f"rank={rank}" for rank in range(4)]
    assert {call.rdzv_endpoint for call in found} == {"a0:29500"}
    assert sum(int(call.nproc_per_node) for call in found) == len(devices_by_rank(made))
    assert all(
        call.training_script == "argosy.runtime.job.worker" and call.module for call in found
    )
    assert [call.training_script_args for call in found] == [["run/run.json"]] * 4
    spec = read_run_spec("run/run.json")
    assert (spec.plan, spec.program, spec.steps) == ("plan.json", "train.py:build", 7)
    away = with_stage(plan([13, 26, 30, 34]), 1, offload=Offload(weights=Tier.HOST))
    with pytest.raises(InputError, match="offload of weights"):
        export_torchrun(launch_of(away))


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> Result:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    captured = capsys.readouterr()
    return Result(stop.value.code, captured.out, captured.err)


@pytest.mark.parametrize("target", ["torchtitan", "megatron", "deepspeed", "flagscale", "torch"])
def test_the_command_writes_what_it_prints(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    made = plan([9, 18, 26, 34], samples=2, width=1, data=4)
    path.write_text(dumps_plan(with_stage(made, 1, recompute=Recompute.FULL)))
    refused = run_command(capsys, "export", str(path), "--to", target)
    if target in ("torchtitan", "megatron"):
        assert refused.code == 2
        assert "stages.recompute" in refused.err
    shown = run_command(capsys, "export", str(path), "--to", target, "--lossy", "--json")
    assert shown.code == 0
    document = json.loads(shown.out)
    assert [f"lost: {lost['path']}" in shown.err for lost in document["lost"]] == [True] * len(
        document["lost"]
    )
    out = tmp_path / "out"
    assert (
        run_command(capsys, "export", str(path), "--to", target, "--lossy", "-o", str(out)).code
        == 0
    )
    written = (
        {out.name: out.read_text()}
        if out.is_file()
        else {file.name: file.read_text() for file in out.iterdir()}
    )
    assert sorted(written.values()) == sorted(document["files"].values())


def test_flagscale_recomputes_by_stage_fully_or_everywhere_selectively() -> None:
    made = plan([13, 26, 30, 34])
    everywhere = replace(
        made, stages=tuple(replace(stage, recompute=Recompute.SELECTIVE) for stage in made.stages)
    )
    with pytest.raises(InputError, match="argosy plan --for flagscale"):
        flagscale(everywhere)
    meant = replace(
        everywhere, cost_model=CostModelRef.of({"constants": {"selective": "attention"}})
    )
    assert flagscale(meant)[0]["train"]["system"]["recompute"] == {
        "recompute_granularity": "selective"
    }
    somewhere = with_stage(made, 2, recompute=Recompute.SELECTIVE)
    with pytest.raises(
        InputError, match=r"stages.recompute: found none/none/selective/none, expected none or full"
    ):
        flagscale(somewhere)
    again = flagscale(somewhere, lossy=True)[0]["train"]["system"]["recompute"]
    assert again["recompute_granularity_per_stage_micro_batch"] == [
        [1, 8, 0],
        [1, 8, 0],
        [1, 8, 1],
        [1, 8, 0],
    ]


def test_flagscale_has_one_context_for_all_meshes() -> None:
    made = plan([13, 26, 30, 34])
    with pytest.raises(InputError, match=r"stages\[2\].context: found 2, expected at most 1"):
        flagscale(with_stage(made, 2, context=2), lossy=True)


def test_flagscale_has_everything_at_its_level() -> None:
    """What its runner looks up: the task, static rendezvous, devices by host, and the training
    arguments."""
    content, hosts = flagscale(plan([13, 26, 30, 34]))
    experiment = content["experiment"]
    assert experiment["task"] == {
        "type": "train",
        "backend": "megatron",
        "entrypoint": "./flagscale/train/train_gpt.py",
    }
    assert experiment["runner"] == {"hostfile": "./hostfile", "rdzv_backend": "static"}
    assert experiment["envs"]["node_specific"]["v1"] == {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    assert set(content["train"]) == {"system", "model", "data"} and content["action"] == "run"
    assert content["train"]["model"]["rotary_base"] == 500_000
    assert list(hosts) == ["a0", "a1", "v0", "v1"]


def test_flagscale_keeps_the_order_of_a_kind_that_comes_back() -> None:
    """It sorts ranks by where their type first stands in the list."""
    content, hosts = flagscale(plan([13, 26, 30, 34], hosts=("a0", "v0", "a1", "v1")))
    types = content["train"]["system"]["hetero"]["hetero_device_types"]
    ranks = sorted(hosts, key=lambda host: types.index(hosts[host]["type"]))
    assert ranks == ["a0", "v0", "a1", "v1"] and len(set(types)) == 4


def test_flagscale_splits_a_tied_table_in_one_way() -> None:
    chain, shape = load_model("gpt2", sequence_length=512), load_architecture("gpt2")
    made = plan([4, 7, 11, 14], samples=2, model="gpt2")
    whole = replace(made.stages[3].replicas[0], devices=("v1.0", "v1.1", "v1.2", "v1.3"), samples=4)
    with pytest.raises(InputError, match=r"stages\[3\].width: found 4, expected 2, as in stage 0"):
        export_flagscale(
            with_stage(made, 3, replicas=(whole,)), chain, shape, cluster(), lossy=True
        )
