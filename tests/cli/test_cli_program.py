"""``argosy plan --program`` and ``argosy explain FILE.py:build``: a torch program on the command
line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.command_result import Run

from argosy.plan.file import load_plan
from argosy.plan.runnable import unsupported

pytest.importorskip("torch")

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


def test_a_program_gets_what_a_config_gets(run: Run) -> None:
    """A certificate and runner-ups, and a plan file on which every command works without the
    program."""
    Path("train.py").write_text(PROGRAM + DEEP, encoding="utf-8")
    Path("pair.toml").write_text(PAIR, encoding="utf-8")
    text = run(
        "plan", "--program", "train.py:narrow", "-c", "pair.toml", "--quiet", "-o", "plan.json"
    )
    assert text.code == 0, text.err
    assert "certificate" in text.out and "argosy run plan.json train.py:narrow" in text.out
    Path("train.py").unlink()
    plan = load_plan("plan.json")
    assert plan.global_batch == 65536 and plan.certificate is not None and unsupported(plan) == ()
    assert (
        plan.predicted is not None
        and plan.predicted.iteration_seconds >= plan.certificate.lower_bound_seconds
    )
    played = json.loads(run("simulate", "plan.json", "--json", "--quiet").out)
    assert played["simulated_seconds"] == pytest.approx(plan.predicted.iteration_seconds, rel=1e-2)
    for command in (
        ("explain", "plan.json"),
        ("report", "plan.json", "-o", "page.html"),
        ("trace", "plan.json"),
    ):
        assert run(*command, "--quiet").code == 0, command
    compared = json.loads(run("compare", "plan.json", "--only", "dp-ev", "--json", "-q").out)
    ours, other = compared["rows"]
    assert (compared["model"], compared["global_batch"]) == ("train", 65536)
    assert ours["iteration_seconds"] == pytest.approx(plan.predicted.iteration_seconds, rel=1e-2)
    assert (ours["name"], other["name"]) == ("argosy", "dp-ev")
    refused = run("export", "plan.json", "--to", "megatron")
    assert (
        refused.code == 2
        and "for a captured program use --to torchrun, or argosy run" in refused.err
    )


def test_one_group_of_all_devices_wins_where_weights_are_wide(run: Run) -> None:
    """Sums of its gradients would take longer than exchanges of what a tensor-parallel group
    computes."""
    Path("train.py").write_text(PROGRAM, encoding="utf-8")
    text = run(
        "plan", "--program", "train.py:build", "-c", "two-cards", "--quiet", "-o", "plan.json"
    )
    assert text.code == 0 and "certificate" in text.out, text.err
    plan = load_plan("plan.json")
    (replica,) = plan.stages[0].replicas
    assert len(replica.devices) == 4 and replica.ratios[0] > replica.ratios[3], (
        "the A6000s take more"
    )
    played = run("simulate", "plan.json", "--json", "--quiet")
    assert plan.predicted is not None
    assert json.loads(played.out)["simulated_seconds"] == pytest.approx(
        plan.predicted.iteration_seconds, rel=1e-6
    )
    assert run("explain", "plan.json", "--quiet").code == 0


def test_options_of_the_search_hold_for_a_program(run: Run) -> None:
    Path("train.py").write_text(PROGRAM, encoding="utf-8")
    base = ("plan", "--program", "train.py:build", "-c", "two-cards", "--quiet", "--json")
    for options in (
        ("--level", "2"),
        ("--schedule", "gpipe"),
        ("--even-shares",),
        ("--objective", "cost"),
    ):
        found = run(*base, *options)
        assert found.code == 0 or "price" in found.err, found.err
    (stage,) = json.loads(run(*base, "--no-mixed").out)["plan"]["stages"]
    used = {name for replica in stage["replicas"] for name in replica["devices"]}
    assert used <= {"box0.0", "box0.1"} or used <= {"box0.2", "box0.3"}, "one kind of card"
    free, cheap = (json.loads(run(*base, *more).out)["plan"] for more in ((), ("--even-shares",)))
    assert free["predicted"]["iteration_seconds"] <= cheap["predicted"]["iteration_seconds"] * (
        1 + 1e-9
    )


def test_what_cannot_be_captured_exits_with_2_and_the_line(run: Run) -> None:
    Path("train.py").write_text(PROGRAM, encoding="utf-8")
    failed = run("plan", "--program", "train.py:broken", "-c", "two-cards", "--quiet")
    assert failed.code == 2 and "train.py:15" in failed.err and "y.sum() > 0" in failed.err


def test_what_is_missing_is_said(run: Run) -> None:
    assert run("plan", "-c", "two-cards").code == 2
    ignored = run("plan", "--program", "train.py:build", "-c", "two-cards", "-b", "64")
    assert ignored.code == 2
    assert ignored.err == "error: --global-batch cannot be combined with --program\n"
    missing = run("plan", "--program", "absent.py:build", "-c", "two-cards")
    assert missing.code == 2 and "no such file" in missing.err
    Path("train.py").write_text("def build(:\n", encoding="utf-8")
    broken = run("plan", "--program", "train.py:build", "-c", "two-cards")
    assert broken.code == 2 and "train.py:1: found SyntaxError" in broken.err


def test_an_operation_without_a_rule_is_named_in_a_warning(run: Run) -> None:
    Path("train.py").write_text(PROGRAM, encoding="utf-8")
    found = run("plan", "--program", "train.py:odd", "-c", "two-cards", "--json", "--quiet")
    assert (
        "warning: no rule knows aten.special_i0e.default: every device of a group does it in full\n"
        in found.err
    )


def test_a_small_step_is_left_to_one_device(run: Run) -> None:
    """Across a slow link every other device would only add to the time."""
    Path("train.py").write_text(PROGRAM + DEEP, encoding="utf-8")
    Path("pair.toml").write_text(PAIR.replace("10 Gbit/s", "10 Mbit/s"), encoding="utf-8")
    run("plan", "--program", "train.py:small", "-c", "pair.toml", "--quiet", "-o", "plan.json")
    plan = load_plan("plan.json")
    assert len({name.split(".")[0] for name in plan.devices}) == 1 and plan.left_out


def test_a_program_that_mixes_samples_is_not_divided_by_them(run: Run) -> None:
    Path("train.py").write_text(PROGRAM + DEEP, encoding="utf-8")
    Path("pair.toml").write_text(PAIR, encoding="utf-8")
    done = run(
        "plan", "--program", "train.py:contrast", "-c", "pair.toml", "--quiet", "-o", "plan.json"
    )
    assert done.code == 0, done.err
    assert all(len(stage.replicas) == 1 for stage in load_plan("plan.json").stages)


def test_a_program_is_explained_as_its_plan_is(run: Run) -> None:
    Path("train.py").write_text(PROGRAM + DEEP, encoding="utf-8")
    Path("pair.toml").write_text(PAIR, encoding="utf-8")
    planned = run("plan", "--program", "train.py:deep", "-c", "pair.toml", "--quiet", "--json")
    explained = run("explain", "train.py:deep", "--cluster", "pair.toml", "--quiet", "--json")
    seconds = json.loads(planned.out)["predicted"]["iteration_seconds"]
    assert json.loads(explained.out)["iteration_seconds"] == pytest.approx(seconds, rel=1e-2)


DEEP = """

def deep():
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(12)))
    return model, lambda net, x: net(x).square().mean(), torch.randn(2048, 4096)


def narrow():
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(12)))
    return model, lambda net, x: net(x).square().mean(), torch.randn(65536, 512)


def small():
    return nn.Linear(256, 256), lambda net, x: net(x).square().mean(), torch.randn(64, 256)


def contrast():
    def loss(net, x):
        y = net(x)
        return (y - y.mean(dim=0)).square().mean()

    return nn.Linear(2048, 2048), loss, torch.randn(64, 2048)
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
