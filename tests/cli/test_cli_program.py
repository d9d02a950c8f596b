"""``argosy plan --program`` and ``argosy explain FILE.py:build``: a torch program on the command line."""

from __future__ import annotations

import json
from pathlib import Path

from command_result import Run

from argosy.plan.file import load_plan
from argosy.plan.runnable import unsupported

PROGRAM = """
import torch
from torch import nn
from torch.nn import functional


def build():
    model = nn.Sequential(nn.Linear(4096, 16384), nn.GELU(), nn.Linear(16384, 4096))
    return model, lambda net, x: functional.mse_loss(net(x), x), torch.randn(512, 4096)


def broken():
    def loss(net, x):
        y = net(x)
        return y.sum() if y.sum() > 0 else -y.sum()

    return nn.Linear(4, 4), loss, torch.randn(2, 4)


def odd():
    return nn.Linear(64, 64), lambda net, x: torch.special.i0e(net(x)).sum(), torch.randn(16, 64)
"""


def test_a_program_is_planned_and_explained(run: Run) -> None:
    Path("train.py").write_text(PROGRAM, encoding="utf-8")
    text = run("plan", "--program", "train.py:build", "-c", "two-cards", "--quiet")
    assert text.code == 0, text.err
    assert "shared by 4 devices" in text.out and "0.weight" in text.out and "step" in text.out
    found = json.loads(run("plan", "--program", "train.py:build", "-c", "two-cards", "--json", "--quiet").out)[
        "program"
    ]
    assert abs(sum(device["share"] for device in found["devices"]) - 1) < 1e-9
    assert found["step_seconds"] >= found["bound_seconds"] * (1 - 1e-9) and found["parameters"] == 134_238_208
    why = run("explain", "train.py:build", "--cluster", "two-cards", "--quiet")
    assert why.code == 0 and "otherwise" in why.out and "%" in why.out


def test_what_cannot_be_captured_exits_with_2_and_the_line(run: Run) -> None:
    Path("train.py").write_text(PROGRAM, encoding="utf-8")
    failed = run("plan", "--program", "train.py:broken", "-c", "two-cards", "--quiet")
    assert failed.code == 2 and "train.py:15" in failed.err and "y.sum() > 0" in failed.err


def test_what_is_missing_is_said(run: Run) -> None:
    assert run("plan", "-c", "two-cards").code == 2
    ignored = run("plan", "--program", "train.py:build", "-c", "two-cards", "-b", "64")
    assert ignored.code == 2
    assert ignored.err == 'error: --global-batch: found "64", expected no such option with --program\n'
    missing = run("plan", "--program", "absent.py:build", "-c", "two-cards")
    assert missing.code == 2 and "no such file" in missing.err
    Path("train.py").write_text("def build(:\n", encoding="utf-8")
    broken = run("plan", "--program", "train.py:build", "-c", "two-cards")
    assert broken.code == 2 and "train.py:1: found SyntaxError" in broken.err


def test_an_operation_without_a_rule_is_named_in_a_warning(run: Run) -> None:
    Path("train.py").write_text(PROGRAM, encoding="utf-8")
    found = run("plan", "--program", "train.py:odd", "-c", "two-cards", "--json", "--quiet")
    assert "warning: no rule knows aten.special_i0e.default: every device does it in full\n" in found.err
    said = json.loads(found.out)
    assert any("special_i0e" in warning for warning in said["warnings"])
    assert "aten.special_i0e.default" in said["program"]["without_rule"]


def test_a_step_that_is_not_worth_sharing_says_so(run: Run) -> None:
    Path("train.py").write_text(PROGRAM, encoding="utf-8")
    text = run("plan", "--program", "train.py:odd", "-c", "two-cards", "--quiet")
    assert "nothing is split: every device does the whole step" in text.out
    assert not any(line.startswith("when  collective") for line in text.out.splitlines()), "a table without a row"
    assert max(map(len, text.out.splitlines())) <= 80


def test_the_reasons_are_of_the_program_that_was_planned(run: Run) -> None:
    Path("train.py").write_text(PROGRAM, encoding="utf-8")
    half = ("--dtype", "fp16", "--quiet")
    text = run("plan", "--program", "train.py:odd", "-c", "two-cards", *half)
    assert text.out.endswith("why: argosy explain train.py:odd --cluster two-cards --dtype fp16\n")
    planned = json.loads(run("plan", "--program", "train.py:odd", "-c", "two-cards", *half, "--json").out)
    explained = json.loads(run("explain", "train.py:odd", "--cluster", "two-cards", *half, "--json").out)
    assert planned["step_seconds"] == explained["step_seconds"]


def test_a_pipeline_is_printed_with_what_lost_to_it(run: Run) -> None:
    Path("train.py").write_text(PROGRAM + DEEP, encoding="utf-8")
    Path("pair.toml").write_text(PAIR, encoding="utf-8")
    text = run("plan", "--program", "train.py:deep", "-c", "pair.toml", "--quiet", "-o", "plan.json")
    assert text.code == 0, text.err
    check_written_pipeline(run)
    assert "run it: argosy run plan.json train.py:deep" in text.out
    assert "in 2 stages on 4 devices" in text.out and "one program for all devices" in text.out
    found = json.loads(run("plan", "--program", "train.py:deep", "-c", "pair.toml", "--json", "--quiet").out)
    assert found["chosen"] == "pipeline" and found["step_seconds"] == found["pipeline"]["step_seconds"]
    assert len(found["pipeline"]["stages"]) == 2 and found["tried"]
    why = run("explain", "train.py:deep", "--cluster", "pair.toml", "--quiet")
    assert why.code == 0 and "stage 1" in why.out and "pipelines that were looked at" in why.out


def check_written_pipeline(run: Run) -> None:
    """Every operation of the forward has a stage, and what wants layers says that there are none."""
    plan = load_plan("plan.json")
    assert plan.cut is not None
    assert len(plan.stages) == 2 and list(plan.cut) == sorted(plan.cut) and set(plan.cut) == {0, 1}
    assert plan.global_batch == 2048 and plan.devices == ("a0.0", "a0.1", "b0.0", "b0.1")
    assert unsupported(plan) == () and plan.predicted is not None
    for command in (("simulate", "plan.json"), ("export", "plan.json", "--to", "megatron")):
        refused = run(*command)
        assert refused.code == 2 and "a plan for a captured program is carried out by argosy run" in refused.err


DEEP = """

def deep():
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(12)))
    return model, lambda net, x: net(x).square().mean(), torch.randn(2048, 4096)
"""
PAIR = """
name = "pair"

[[nodes]]
name = "a"
devices = [{ kind = "V100-32GB", count = 2 }]
intra = [{ medium = "nvlink", bandwidth = "100 GB/s", latency = "2 us" }]
nic = { bandwidth = "10 Gbit/s", latency = "20 us" }

[[nodes]]
name = "b"
devices = [{ kind = "V100-32GB", count = 2 }]
intra = [{ medium = "nvlink", bandwidth = "100 GB/s", latency = "2 us" }]
nic = { bandwidth = "10 Gbit/s", latency = "20 us" }
"""
