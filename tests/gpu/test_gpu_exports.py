"""Exports for torch.distributed.pipelining take a step on GPUs, with the gradients of one
process."""

from __future__ import annotations

from pathlib import Path

from exporters.test_export_torch import check_exports
from gpu.gpu_ranks import need_ranks


def test_torch_runs_exports_over_nccl(tmp_path: Path) -> None:
    need_ranks(2)
    check_exports(tmp_path, "cuda")
