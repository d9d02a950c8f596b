"""Rows of torchtitan's reports state the system that ran them."""

from pathlib import Path

import pytest

from argosy.calibrate.table import machines
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


@pytest.mark.parametrize(
    ("kind", "rate"),
    [("H100-80GB", 0.79 * 450e9), ("H100-PCIe", 50e9), ("MI300X", 0.79 * 448e9), ("T4", 12e9)],
)
def test_devices_of_a_table_exchange_over_the_links_of_their_kind(kind: str, rate: float) -> None:
    cluster = machines(kind, 8)
    first, last = cluster.devices[0].name, cluster.devices[-1].name
    assert cluster.bandwidth(cluster.fastest(first, last, 1e9)).at(0) == pytest.approx(rate)
