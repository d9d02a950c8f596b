"""Rows of torchtitan's reports state the system that ran them."""

from pathlib import Path

import pytest

from argosy.calibrate.predict import peak_bytes
from argosy.calibrate.table import machines
from argosy.calibrate.torchtitan import read_torchtitan
from argosy.cost.calibration import Calibration
from argosy.workload.systems import Buffers, Selective

HEAD = (
    "source,model,gpus,kind,fsdp,tp,pp,cp,vp,local_batch,seq,ac,precision,compile,"
    "tokens_per_s_per_gpu"
)


@pytest.mark.parametrize(
    ("source", "compiled", "is_fused"),
    [
        ("202412 T1", 1, False),
        ("202506 trainy", 1, True),
        ("202502 torchao", 1, False),
        ("202506 trainy", 0, False),
        ("a report", 1, False),
    ],
)
def test_the_loss_is_compiled_with_the_model_since_april_2025(
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


PUBLISHED = Path(__file__).resolve().parents[2] / "benchmarks" / "published"


@pytest.mark.parametrize(
    ("source", "kind", "buffers", "selective"),
    [
        ("202506", "H200", Buffers.TORCHTITAN, Selective.PRODUCTS),
        ("2025-08", "MI300X", Buffers.TORCHTITAN_2025, Selective.PRODUCTS),
        ("202508", "B200", Buffers.TORCHTITAN_2025, Selective.PRODUCTS_ALONE),
        ("202507", "B200", Buffers.TORCHTITAN, Selective.PRODUCTS_ALONE),
        ("a report of 2025", "B200", Buffers.TORCHTITAN_2025, Selective.PRODUCTS_ALONE),
        ("a report", "GB200", Buffers.TORCHTITAN_2025, Selective.PRODUCTS_ALONE),
        ("202601", "B200", Buffers.TORCHTITAN_2025, Selective.PRODUCTS),
    ],
)
def test_what_is_kept_depends_on_the_version_and_on_cudnn(
    tmp_path: Path, source: str, kind: str, buffers: Buffers, selective: Selective
) -> None:
    row = f"{source},8B,8,{kind},8,1,1,1,1,1,8192,selective op,bf16,1,6667"
    table = tmp_path / "table.csv"
    table.write_text(f"{HEAD}\n{row}\n")
    (run,) = read_torchtitan(table).runs
    assert (run.settings["buffers"], run.settings["selective"]) == (buffers, selective)


def test_published_peaks_of_three_kinds_of_devices_are_within_seven_percent() -> None:
    """One model on H100, MI300X and B200 takes 47.7, 39.1 and 33.7 GiB: the versions of torchtitan
    differ, not the devices."""
    runs = read_torchtitan(PUBLISHED / "torchao.csv").runs
    measured = [run.peak_bytes or 0.0 for run in runs]
    predicted = peak_bytes(runs, Calibration(prefetch=True))
    assert len(runs) == 10 and max(measured) > 1.4 * min(measured)
    for actual, found in zip(measured, predicted, strict=True):
        assert found == pytest.approx(actual, rel=0.07)
