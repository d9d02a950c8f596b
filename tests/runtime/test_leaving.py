"""A script under torchrun ends without threads of gloo, which an ending interpreter would abort."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from runtime.run_cases import CASE, written_plan

from argosy.runtime.processes import leaving

HERE = Path(__file__).parent
SCRIPT = """
import last_threads
import sys
from pathlib import Path
import torch
import argosy
from runtime.small_models import build
from small_gpt import data

model, loss_fn, _ = build("gpt", 8, tied=False, dtype=torch.float32)
trainer = argosy.parallelize(
    model, loss_fn, torch.optim.AdamW, data(0), Path(sys.argv[1]) / "plan.json"
)
trainer.step(data(0))
"""


def test_a_script_ends_without_threads_of_gloo(tmp_path: Path) -> None:
    """The model and the trainer live until the end, as in most scripts."""
    written_plan(tmp_path, CASE)
    (tmp_path / "train.py").write_text(SCRIPT)
    folders = (HERE / "programs", HERE.parent, os.environ.get("PYTHONPATH", ""))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(map(str, folders))}
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    command = [*torchrun, str(tmp_path / "train.py"), str(tmp_path)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        assert "gloo" not in (tmp_path / f"threads-{rank}.txt").read_text()


def test_leaving_waits_no_longer_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure, gloo's threads wait for processes that wait for this one."""
    monkeypatch.setattr(leaving, "_LIMIT", 0.1)
    monkeypatch.setattr(leaving, "_is_leaving", threading.Event())
    forever = threading.Event()
    thread = threading.Thread(target=forever.wait, daemon=True)
    thread.start()
    begin = time.monotonic()
    leaving._end(thread)
    assert time.monotonic() - begin < 30 and thread.is_alive()
    forever.set()
