"""A PyTorch program that nobody prepared: captured, and shared among unequal devices tensor by
tensor.

python examples/04_any_torch_program.py
"""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

PROGRAM = """
import torch
from torch import nn


def build():
    model = nn.Sequential(nn.Embedding(50_000, 1024), nn.Linear(1024, 16384), nn.GELU(), nn.Linear(16384, 1024))
    batch = {"x": torch.randint(50_000, (32, 64)), "y": torch.randn(32, 64, 1024)}
    return model, lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).mean(), batch
"""

with TemporaryDirectory() as folder:
    file = Path(folder) / "net.py"
    file.write_text(PROGRAM)
    argosy = [sys.executable, "-m", "argosy"]
    shown = subprocess.run(
        [
            *argosy,
            "plan",
            "--program",
            f"{file}:build",
            "-c",
            "two-cards",
            "--quiet",
            "--width",
            "100",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    print(shown.stdout.rstrip().replace(str(file), "net.py"))
