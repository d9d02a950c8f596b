"""Rows of torchtitan's reports state the system that ran them."""

from pathlib import Path

import pytest

from argosy.calibrate.torchtitan import read_torchtitan

HEAD = (
    "source,model,gpus,kind,fsdp,tp,pp,cp,vp,local_batch,seq,ac,precision,compile,"
    "tokens_per_s_per_gpu"
)


@pytest.mark.parametrize(
    ("source", "compiled", "is_fused"),
    [
        ("202412 T1", 1, False),
        ("202506 trainy", 1, True),
        ("202506 trainy", 0, False),
        ("a report", 1, False),
    ],
)
def test_the_loss_is_compiled_with_the_model_since_2025(
    tmp_path: Path, source: str, compiled: int, is_fused: bool
) -> None:
    row = f"{source},8B,8,H100-GT,8,1,1,1,1,2,8192,selective op,bf16,{compiled},6667"
    table = tmp_path / "table.csv"
    table.write_text(f"{HEAD}\n{row}\n")
    (run,) = read_torchtitan(table).runs
    assert run.settings["fused_loss"] is is_fused
