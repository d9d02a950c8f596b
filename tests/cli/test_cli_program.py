"""``argosy plan --program`` and ``argosy explain FILE.py:build``: a torch program on the command line."""

from __future__ import annotations

import json
from pathlib import Path

from command_result import Run

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
    missing = run("plan", "--program", "absent.py:build", "-c", "two-cards")
    assert missing.code == 2 and "no such file" in missing.err
