"""The catalogue: every entry is complete and plausible, and agrees with an independent table."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from argosy.cluster.catalogue import catalogue, device_kind
from argosy.cluster.device import DeviceKind
from argosy.dtype import Dtype
from argosy.errors import Mismatch

GIB = 2**30
EPOCH_FILE = Path(__file__).resolve().parents[3] / "shared" / "data" / "epoch-ml-hardware.csv"
EPOCH_MEMORY = "Memory size per board (Byte)"
EPOCH_BANDWIDTH = "Memory bandwidth (byte/s)"
EPOCH_TENSOR = "Tensor-FP16/BF16 performance (FLOP/s)"
EPOCH_TF32 = "TF32 (TensorFloat-32) performance (FLOP/s)"
EPOCH_FP8 = "FP8 performance (FLOP/s)"

EPOCH_NAMES = {
    "P100": "NVIDIA P100",
    "V100-16GB": "NVIDIA Tesla V100 SXM2",
    "V100-32GB": "NVIDIA Tesla V100 SXM2 32 GB",
    "V100-32GB-PCIe": "NVIDIA Tesla V100 PCIe 32 GB",
    "T4": "NVIDIA Tesla T4",
    "RTX-2080Ti": "NVIDIA GeForce RTX 2080 Ti 11GB",
    "RTX-8000": "NVIDIA Quadro RTX 8000",
    "A100-40GB": "NVIDIA A100 SXM4 40 GB",
    "A100-80GB": "NVIDIA A100 SXM4 80 GB",
    "A100-80GB-PCIe": "NVIDIA A100 PCIe",
    "A800-80GB": "NVIDIA A800 SXM",
    "A10": "NVIDIA A10 PCIe",
    "A10G": "NVIDIA A10G",
    "A40": "NVIDIA A40 PCIe",
    "RTX-3090": "NVIDIA GeForce RTX 3090",
    "RTX-A5000": "NVIDIA RTX A5000",
    "RTX-A6000": "NVIDIA RTX A6000",
    "L4": "NVIDIA L4",
    "L20": "NVIDIA L20 PCle",
    "L40": "NVIDIA L40",
    "RTX-6000-Ada": "NVIDIA RTX 6000 Ada Generation",
    "RTX-4090": "NVIDIA GeForce RTX 4090",
    "H100-80GB": "NVIDIA H100 SXM5 80GB",
    "H100-PCIe": "NVIDIA H100 PCIe",
    "H100-NVL": "NVIDIA H100 NVL",
    "H800-80GB": "NVIDIA H800 SXM5",
    "H20": "NVIDIA HGX H20",
    "H200": "NVIDIA H200 SXM",
    "GH200-96GB": "NVIDIA GH200",
    "B200": "NVIDIA B200",
    "GB200": "NVIDIA GB200",
    "MI250X": "AMD Radeon Instinct MI250X",
    "MI300X": "AMD Instinct MI300X",
    "MI325X": "AMD Instinct MI325X",
    "MI355X": "AMD Instinct MI355X",
    "Gaudi2": "Intel Habana Gaudi2",
}

EPOCH_DIFFERS = {
    (
        "A100-80GB-PCIe",
        EPOCH_MEMORY,
    ): "its row is the 40 GB card with the bandwidth of the 80 GB card",
    ("GH200-96GB", EPOCH_BANDWIDTH): "its row is the 144 GB HBM3e variant",
    ("RTX-2080Ti", EPOCH_TENSOR): "its row is fp16 accumulation at Founders Edition clocks",
    ("RTX-4090", EPOCH_TENSOR): "its row is fp16 accumulation, twice the rate",
    ("Gaudi2", EPOCH_TENSOR): "its row is rounded up from 432 to 450",
    ("H800-80GB", EPOCH_TF32): "its row is not half of its own fp16 rate, as on every Hopper card",
    ("MI355X", EPOCH_FP8): "its row repeats the MI350X",
}
"""(kind, column) that is not compared, and why."""

ECC_IN_MEMORY = {"T4", "A10", "A10G", "A40", "L4", "L20", "L40", "L40S"}
TOLERANCE = 0.03


def test_there_are_many_kinds_and_no_name_twice():
    names = [kind.name.lower() for kind in catalogue()]
    assert len(names) >= 90
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("kind", catalogue(), ids=lambda kind: kind.name)
def test_every_kind_is_plausible(kind: DeviceKind):
    assert kind.memory % (GIB / 2) == 0
    assert 1e9 <= kind.memory_bandwidth <= 10e12
    assert kind.source and kind.vendor
    rates = [rate for _, rate in kind.flops]
    assert all(1e10 <= rate <= 1e16 for rate in rates)
    # FLOP per byte at which compute and memory balance, for the slowest and the fastest dtype.
    assert 1 <= min(rates) / kind.memory_bandwidth <= max(rates) / kind.memory_bandwidth <= 2000


@pytest.mark.parametrize("kind", catalogue(), ids=lambda kind: kind.name)
def test_a_narrower_dtype_is_never_slower(kind: DeviceKind):
    rates = dict(kind.flops)
    order = [
        rates[dtype] for dtype in (Dtype.FP32, Dtype.TF32, Dtype.FP16, Dtype.FP8) if dtype in rates
    ]
    assert order == sorted(order)


@pytest.mark.parametrize(("half", "whole"), [("MI250-GCD", "MI250"), ("MI250X-GCD", "MI250X")])
def test_a_card_of_two_dies_is_twice_its_die(half, whole):
    assert device_kind(half).memory * 2 == device_kind(whole).memory
    for dtype, rate in device_kind(half).flops:
        assert 2 * rate == pytest.approx(device_kind(whole).peak(dtype), rel=2e-3)


def test_names_ignore_case():
    assert device_kind("h100-80gb") is device_kind("H100-80GB")


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("A100", 'did you mean "A100-40GB" or "A100-80GB" or "A100-80GB-PCIe"?'),
        ("3090", 'did you mean "RTX-3090" or "RTX-3090Ti"?'),
        ("RTX 4090", 'did you mean "RTX-4090"?'),
        ("zx81", None),
        ("", None),
    ],
)
def test_an_unknown_name_is_refused_with_a_suggestion(name, suggestion):
    with pytest.raises(Mismatch) as caught:
        device_kind(name)
    assert caught.value.expected == "a device kind from the catalogue"
    assert caught.value.suggestion == suggestion


@pytest.fixture(scope="module")
def epoch() -> dict[str, dict[str, str]]:
    if not EPOCH_FILE.exists():
        pytest.skip("the table of accelerators by Epoch AI is not here")
    with EPOCH_FILE.open(encoding="utf-8", newline="") as file:
        return {row["Hardware name"]: row for row in csv.DictReader(file)}


def figures(kind: DeviceKind) -> dict[str, float]:
    """Ours under Epoch's column names; memory as datasheets quote it: GB for GiB, check bits
    included."""
    rates = dict(kind.flops)
    quoted_memory = kind.memory / GIB * 1e9 * (16 / 15 if kind.name in ECC_IN_MEMORY else 1)
    columns = {
        EPOCH_MEMORY: quoted_memory,
        EPOCH_BANDWIDTH: kind.memory_bandwidth,
        EPOCH_TENSOR: rates.get(Dtype.FP16, rates.get(Dtype.BF16)),
        EPOCH_TF32: rates.get(Dtype.TF32),
        EPOCH_FP8: rates.get(Dtype.FP8),
    }
    return {column: value for column, value in columns.items() if value is not None}


@pytest.mark.parametrize("name", EPOCH_NAMES)
def test_figures_agree_with_epoch(name, epoch):
    row = epoch[EPOCH_NAMES[name]]
    for column, value in figures(device_kind(name)).items():
        if row[column] and (name, column) not in EPOCH_DIFFERS:
            assert value == pytest.approx(float(row[column]), rel=TOLERANCE), column


@pytest.mark.parametrize(("name", "column"), EPOCH_DIFFERS)
def test_every_documented_difference_from_epoch_is_still_one(name, column, epoch):
    ours = figures(device_kind(name))[column]
    assert ours != pytest.approx(float(epoch[EPOCH_NAMES[name]][column]), rel=TOLERANCE)
