"""``--powersgd`` on the command line: captured programs, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.command_result import Run

SITES = """
name = "sites"
[[nodes]]
name = "x"
count = 2
devices = { kind = "A100-80GB", count = 1 }
nic = { bandwidth = "1 Gbit/s", latency = "0 ms" }
"""


def test_a_captured_program_counts_its_own_matrices(run: Run, tmp_path: Path) -> None:
    program, cluster, plan = (tmp_path / name for name in ("program.py", "sites.toml", "plan.json"))
    program.write_text(
        "import torch\n"
        "def build():\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 2))\n"
        "    return model, lambda model, x: model(x).square().mean(), torch.randn(8, 64)\n"
    )
    cluster.write_text(SITES)
    done = run(
        "plan",
        "--program",
        str(program),
        "-c",
        str(cluster),
        "--powersgd",
        "3",
        "-o",
        str(plan),
        "-q",
    )
    assert done.code == 0, done.err
    layers = json.loads(plan.read_text())["model"]["content"]["layers"]
    # the second matrix, of 2 x 96, has factors that are larger than itself
    assert sum(layer["summed_parameters"] for layer in layers) == 3 * (64 + 96) + 96 + 2 * 96 + 2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--max-width", "2"), "with --powersgd"),
        (("--for", "megatron"), "with --powersgd"),
        (("--offload", "optimizer"), "with --powersgd"),
        (("--lora", "rank=4"), "--powersgd cannot be combined with --train lora --lora"),
        (("--powersgd", "-1"), "--powersgd"),
        (("--dtype", "fp16"), "fp16 cannot be combined with PowerSGD"),
    ],
)
def test_what_powersgd_cannot_do_is_refused(
    run: Run, options: tuple[str, ...], expected: str
) -> None:
    done = run("plan", "-m", "gpt2", "-c", "two-cards", "-b", "8", "--powersgd", "4", *options)
    assert done.code == 2 and expected in " ".join(done.err.split()), done.err


def test_other_systems_do_not_get_such_plans(run: Run, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    done = run(
        "plan", "-m", "gpt2", "-c", "two-cards", "-b", "8", "--powersgd", "4", "-o", str(plan), "-q"
    )
    assert done.code == 0 and "PowerSGD of rank 4" in done.out
    done = run("export", str(plan), "--to", "megatron", "-o", str(tmp_path / "job"))
    assert done.code == 2 and "sums gradients as they are" in " ".join(done.err.split()), done.err
