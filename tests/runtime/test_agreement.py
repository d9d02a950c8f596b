"""Ranks that were given different things refuse to train, and say what differs and where."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runtime.run_cases import written_plan
from runtime.training_cases import Case
from torch import nn

import argosy
from argosy.adapt.controller import AdaptationLevel
from argosy.plan.file import load_plan
from argosy.runtime.job import agreement
from argosy.runtime.job.agreement import batch_digest, differences, given_facts, loaded_facts
from argosy.runtime.job.built import model_facts, settings_facts, updating_facts
from argosy.runtime.processes.run_spec import RunSpec
from argosy.workload.capture.digest import initial_digest
from argosy.workload.capture.initial import Recording

PROGRAM = """
import os
import torch
from torch import nn
import beside

def build():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    if "WEIGHTS" in os.environ:
        nn.init.constant_(model[3].bias, 0.5)
    return model, lambda net, x: (net(x) ** 2).mean(), torch.ones(8, 8)

def optimizer(parameters):
    rate = float(os.environ.get("RATE", "0.01"))
    return torch.optim.AdamW([{"params": parameters, "lr": rate}])

def data(step):
    offset = float(os.environ.get("DATA", "0"))
    return torch.arange(64.0).view(8, 8) / 64 + offset + beside.OFFSET
"""


def spec_of(folder: Path, **options: Any) -> RunSpec:
    program = folder / "train.py"
    program.write_text(PROGRAM)
    return RunSpec(
        plan=str(folder / "plan.json"), program=str(program), out=str(folder), steps=2, **options
    )


def test_every_option_that_decides_what_is_trained_is_compared(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    plan = load_plan(str(written_plan(tmp_path)))
    changes: dict[str, Any] = {
        "steps": 3, "save_every": 1, "resume": True, "clip": 1.0, "seed": 1, "adapt": AdaptationLevel.K, "horizon": 9,
        "min_gain": 0.5, "copy_every": 2,
    }  # fmt: skip
    for name, value in changes.items():
        for elastic in (False, True):
            facts = [
                given_facts(one, plan, elastic=elastic)
                for one in (spec, replace(spec, **{name: value}))
            ]
            found = [problem.path for problem in differences(facts, ["a", "b"])]
            only_plain, only_elastic = name in ("steps", "resume"), name == "copy_every"
            expected = not (only_plain if elastic else only_elastic)
            assert found == ([f"--{name.replace('_', '-')}"] if expected else []), name
    may_differ: dict[str, Any] = {
        "patience": 5.0,
        "any_device": True,
        "metrics_port": 9,
        "out": "x",
        "plan": "y",
    }
    assert given_facts(replace(spec, **may_differ), plan) == given_facts(spec, plan)


def test_plan_program_and_weights_are_compared_by_content(tmp_path: Path) -> None:
    plan = load_plan(str(written_plan(tmp_path)))
    (tmp_path / "copy").mkdir()
    spec, copied = spec_of(tmp_path), spec_of(tmp_path / "copy")
    assert given_facts(spec, plan) == given_facts(copied, plan)
    Path(copied.program).write_text(PROGRAM + "\n")
    other_plan = replace(plan, global_batch=16, num_micro_batches=8)
    found = differences([given_facts(spec, plan), given_facts(copied, other_plan)], ["a", "b"])
    assert [problem.path for problem in found] == ["plan", "program"]
    weights = [tmp_path / "one.pt", tmp_path / "other.pt"]
    for index, path in enumerate(weights):
        path.write_bytes(bytes([index]))
    with_weights = [given_facts(replace(spec, init=str(path)), plan) for path in weights]
    assert [problem.path for problem in differences(with_weights, ["a", "b"])] == ["--init"]


def test_the_first_difference_of_a_fact_is_told_with_both_ranks() -> None:
    facts = [
        {"--seed": "0"},
        {"--seed": "0", "more": "x"},
        {"--seed": "7", "more": "y" * 3},
        {"--seed": "8"},
    ]
    found = differences(facts, ["rank 0 (a)", "rank 1 (b)", "rank 2 (c)", "rank 3 (d)"])
    assert [str(problem) for problem in found] == [
        "--seed: found 7 on rank 2 (c), expected 0, as on rank 0 (a)",
        "more: found yyy on rank 2 (c), expected x, as on rank 1 (b)",
    ]


def test_versions_of_packages_are_compared_and_builds_for_other_devices_are_not(
    tmp_path: Path,
) -> None:
    facts = loaded_facts(spec_of(tmp_path).program)
    assert facts["package torch"] == torch.__version__.partition("+")[0]
    assert not [name for name in facts if name.endswith(".py")]


def test_batches_are_compared_by_every_value() -> None:
    batch = {"x": torch.arange(6.0).view(2, 3), "y": [torch.tensor([1, 2]), 3, "text"]}
    assert batch_digest(batch) == batch_digest({**batch, "x": torch.arange(6.0).view(2, 3)})
    others: list[Any] = [
        {**batch, "x": torch.arange(6.0).view(3, 2)},
        {**batch, "x": torch.arange(6.0).view(2, 3).nextafter(torch.tensor(9.0))},
        {**batch, "x": torch.arange(6.0, dtype=torch.float64).view(2, 3)},
        {**batch, "y": [torch.tensor([1, 2]), 4, "text"]},
        {"z": batch["x"], "y": batch["y"]},
    ]
    graph = torch.eye(3).to_sparse()
    others += [
        {**batch, "g": graph},
        {**batch, "g": np.arange(3)},
        {**batch, "g": np.arange(3)[::-1]},
    ]
    assert batch_digest({**batch, "g": np.array([object()])}) == batch_digest(
        {**batch, "g": np.array([object()])}
    )
    assert batch_digest(batch) not in [batch_digest(other) for other in others]
    assert len({batch_digest(other) for other in others}) == len(others)


def digest(seed: int = 0, scale: float = 1.0, loaded: torch.Tensor | None = None) -> str:
    torch.manual_seed(seed)
    with Recording() as recording:
        model = nn.Sequential(nn.Linear(300, 300), nn.LayerNorm(300), nn.Embedding(7, 3))
        nn.init.normal_(model[0].weight, std=scale)
        if loaded is not None:
            with torch.no_grad():
                model[2].weight.copy_(loaded)
    return initial_digest(recording, model)


def test_initial_values_are_compared_without_making_them() -> None:
    table = torch.arange(21.0).view(7, 3)
    flipped = table.clone()
    flipped.view(torch.int32)[3, 1] ^= 1
    made = [
        digest(),
        digest(seed=1),
        digest(scale=0.5),
        digest(loaded=table),
        digest(loaded=flipped),
    ]
    assert len(set(made)) == len(made)
    assert made == [
        digest(),
        digest(seed=1),
        digest(scale=0.5),
        digest(loaded=table.clone()),
        digest(loaded=flipped),
    ]


SMOOTHING, MODE = 0.0, "mean"


def smoothed(x: torch.Tensor) -> torch.Tensor:
    return x - SMOOTHING


def loss_of(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return getattr(smoothed(net(x)), MODE)()


class Scaled(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def built_facts(
    scale: float = 1.0,
    drop: float = 0.0,
    optimizer: Any = torch.optim.AdamW,
    scheduler: Any = None,
) -> dict[str, str]:
    model = nn.Sequential(nn.Linear(2, 2), Scaled(scale), nn.Dropout(drop))
    facts = model_facts(model, loss_of, Path(__file__))
    return {**settings_facts(), **facts, **updating_facts(model, optimizer, scheduler)}


def different(facts: dict[str, str]) -> list[str]:
    found = differences([built_facts(), facts], ["a", "b"])
    return [f"{problem.path}: {problem.found}" for problem in found]


def test_numbers_of_modules_and_losses_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert different(built_facts()) == []
    assert different(built_facts(scale=2.0)) == ["scale of module 1: 2.0 on b"]
    assert different(built_facts(drop=0.5))[0] == "module 2: Dropout(p=0.5, inplace=False) on b"
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[__name__], "SMOOTHING", 0.1)
        patch.setattr(sys.modules[__name__], "MODE", "sum")
        other = built_facts()
    assert different(other) == ["MODE in loss_of: 'sum' on b", "SMOOTHING in smoothed: 0.1 on b"]


def test_options_of_the_optimizer_are_compared_for_every_weight() -> None:
    def two_groups(named_parameters: Any) -> torch.optim.Optimizer:
        groups = [
            {"params": [weight for _, weight in named_parameters if (weight.ndim > 1) is matrix]}
            for matrix in (True, False)
        ]
        groups[1]["weight_decay"] = 0.0  # type: ignore[assignment]
        return torch.optim.AdamW(groups)

    def stepped(steps: int) -> dict[str, str]:
        return built_facts(scheduler=lambda made: torch.optim.lr_scheduler.StepLR(made, steps))

    assert different(built_facts(optimizer=two_groups)) == [
        "weight_decay of the optimizer for 0.bias: 0.0 on b"
    ]
    fused = functools.partial(torch.optim.AdamW, fused=True)
    assert different(built_facts(optimizer=fused)) == [], "devices may differ in this"
    found = differences([stepped(3), stepped(4)], ["a", "b"])
    assert [problem.path for problem in found] == ["step_size of the scheduler"]
    assert "optimizer" not in built_facts(optimizer=lambda _: 1 / 0)


def test_settings_that_change_numbers_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    before = settings_facts()
    torch.set_float32_matmul_precision("high")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    try:
        found = differences([before, settings_facts()], ["a", "b"])
    finally:
        torch.set_float32_matmul_precision("highest")
    assert {problem.path for problem in found} >= {
        "environment variable NVIDIA_TF32_OVERRIDE",
        "torch's float32 matmul precision",
    }


def start(
    folder: Path, own: Path, node_rank: int, environment: dict[str, str], *options: str
) -> subprocess.Popen[str]:
    """One node of two on this machine; each has a program of its own."""
    out = [
        "--out",
        str(folder / "run"),
        "--address",
        "127.0.0.1",
        "--port",
        "29617",
        "--steps",
        "2",
        "--any-device",
    ]
    command = [
        sys.executable,
        "-m",
        "argosy",
        "run",
        str(folder / "plan.json"),
        str(own / "train.py"),
        *out,
    ]
    return subprocess.Popen(
        [*command, "--node-rank", str(node_rank), "--quiet", *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("options", "environment", "beside", "sentence"),
    [
        ((), {}, "OFFSET = 0", None),
        pytest.param(
            ("--seed", "1"),
            {},
            "OFFSET = 0",
            "--seed: found 1 on rank 1 (n1.0), expected 0, as on rank 0 (n0.0)",
            marks=pytest.mark.exhaustive,
        ),
        ((), {"WEIGHTS": "1"}, "OFFSET = 0", "initial values: found content"),
        pytest.param(
            (),
            {"DATA": "1"},
            "OFFSET = 0",
            "the data of step 0: found content",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            (),
            {"RATE": "0.1"},
            "OFFSET = 0",
            "lr of the optimizer for 0.bias: found 0.1 on rank 1",
            marks=pytest.mark.exhaustive,
        ),
        ((), {}, "OFFSET = 0.0", "beside.py: found content"),
    ],
    ids=["the same", "seed", "weights", "data", "rate", "a module"],
)
def test_nodes_with_different_things_refuse_to_train(
    tmp_path: Path,
    options: tuple[str, ...],
    environment: dict[str, str],
    beside: str,
    sentence: str | None,
) -> None:
    written_plan(tmp_path, Case(shares=((2,), (2,)), num_micro_batches=4), nodes=2)
    homes = [tmp_path / "one", tmp_path / "other"]
    for home, text in zip(homes, ("OFFSET = 0", beside), strict=True):
        home.mkdir()
        (home / "train.py").write_text(PROGRAM)
        (home / "beside.py").write_text(text)
    nodes = [start(tmp_path, homes[0], 0, {}), start(tmp_path, homes[1], 1, environment, *options)]
    said = [node.communicate(timeout=180)[1] for node in nodes]
    if sentence is None:
        assert [node.returncode for node in nodes] == [0, 0], said
    else:
        assert [node.returncode for node in nodes] == [2, 2], said
        assert all(sentence in text for text in said), said
        assert not (tmp_path / "run" / "progress.jsonl").exists()


def test_the_source_that_ranks_compare_is_all_of_the_package() -> None:
    assert (agreement._PACKAGE / "cost" / "compute.py").is_file()
    assert Path(argosy.__file__).parent == agreement._PACKAGE
