"""Published tables are read row by row, however they are written, or refused in a sentence."""

from pathlib import Path

import pytest

from argosy.calibrate.file import read_measured
from argosy.calibrate.run import Measurements
from argosy.calibrate.table import kind_named, machines
from argosy.cost.calibration import Calibration
from argosy.cost.memory import state_bytes
from argosy.dtype import Dtype
from argosy.errors import InputError, Mismatch
from argosy.plan.plan import Recompute
from argosy.workload.chain import Chain

TITAN = {
    "model": "8B",
    "gpus": "8",
    "kind": "H100-80GB",
    "fsdp": "8",
    "local_batch": "2",
    "seq": "8192",
    "ac": "selective op",
    "precision": "bf16",
    "compile": "1",
    "tokens_per_s_per_gpu": "6667",
    "memory_gib": "77",
}
MPT = {
    "Model": "1b",
    "SeqLen (T)": "2048",
    "# GPUs": "8",
    "GPU": "h100_80gb",
    "MicroBatchSize": "4",
    "Throughput (T/s)": "300000",
    "Precision": "amp_bf16",
    "Sharding Strategy": "FULL_SHARD",
    "Activation Checkpointing": "True",
}


def table_of(
    folder: Path, *rows: dict[str, str], separator: str = ",", partly: bool = False
) -> Measurements:
    lines = [list(rows[0]), *([*row.values()] for row in rows)]
    path = folder / "table.csv"
    path.write_text("\n".join(separator.join(line) for line in lines))
    return read_measured(path, partly=partly)


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_columns_may_be_in_any_order_and_optional_ones_absent(
    tmp_path: Path, separator: str
) -> None:
    turned = dict(reversed(TITAN.items()))
    (run,) = table_of(tmp_path, turned, separator=separator).runs
    assert len(run.plan.devices) == 8
    assert run.seconds == pytest.approx(2 * 8192 / 6667)
    (mpt,) = table_of(tmp_path, MPT, separator=separator).runs
    assert mpt.plan.global_batch == 4 * 8


def test_marks_blank_lines_and_comments_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    head, row = (",".join(cells) for cells in (TITAN, TITAN.values()))
    lines = ["\ufeff# source: a, b, c, d, e", "# a note", "", head, "", row, "# a note", "  ", row]
    lines += ["," * head.count(",")]
    path.write_text("\r\n".join(lines), encoding="utf-8")
    measured = read_measured(path)
    assert [run.row for run in measured.runs] == [0, 1]
    path.write_text("\n".join([*lines, "1,2"]), encoding="utf-8")
    with pytest.raises(InputError, match=r"table.csv:11: found 2, expected a row of 11 cells"):
        read_measured(path)


def test_rows_that_cannot_be_read_are_left_out_and_keep_their_places(tmp_path: Path) -> None:
    rows = [
        TITAN | {"tokens_per_s_per_gpu": "OOM"},
        TITAN,
        TITAN | {"kind": "B300"},
        TITAN | {"precision": "nvfp4"},
        TITAN | {"gpus": "12"},
        TITAN | {"local_batch": "4"},
    ]
    measured = table_of(tmp_path, *rows, partly=True)
    assert [run.row for run in measured.runs] == [1, 5]
    reasons = ("a run that ended", 'did you mean "B200"', "mxfp8", "a multiple of fsdp x tp")
    assert len(measured.left_out) == len(reasons)
    for line, (sentence, reason) in enumerate(zip(measured.left_out, reasons, strict=True)):
        assert f"table.csv:{(2, 4, 5, 6)[line]}" in sentence and reason in sentence
        assert "\n" not in sentence
    with pytest.raises(InputError, match=r"table.csv:2: tokens_per_s_per_gpu: found .OOM."):
        table_of(tmp_path, *rows)
    with pytest.raises(InputError, match="OOM"):
        table_of(tmp_path, rows[0], partly=True)


@pytest.mark.parametrize(
    ("column", "text", "expected"),
    [
        ("precision", "mxfp8_cublas", Dtype.FP8),
        ("precision", "float8 rowwise", Dtype.FP8),
        ("precision", "BFLOAT16", Dtype.BF16),
        ("ac", "per op SAC", Recompute.SELECTIVE),
        ("ac", "None", Recompute.NONE),
        ("model", "Llama 3.1 8B", "llama-3.1-8b"),
        ("model", "qwen3-8b", "qwen3-8b"),
        ("compile", "False", False),
        ("compile", "yes", True),
        ("memory_gib", "n/a", None),
        ("memory_gib", "33.5 GiB", 33.5 * 2**30),
        ("tokens_per_s_per_gpu", '"8,192"', 2.0),
    ],
)
def test_other_names_of_settings(tmp_path: Path, column: str, text: str, expected: object) -> None:
    (run,) = table_of(tmp_path, TITAN | {column: text}).runs
    found = {
        "precision": run.chain.dtype,
        "ac": run.plan.stages[0].recompute,
        "model": run.chain.name,
        "compile": run.settings["compiled"],
        "memory_gib": run.peak_bytes,
        "tokens_per_s_per_gpu": run.seconds,
    }
    assert found[column] == expected


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("h100_80gb", "H100-80GB"),
        ("H100 SXM5", "H100-80GB"),
        ("a100-sxm4-40gb", "A100-40GB"),
        ("GH200", "GH200-96GB"),
        ("AMD Instinct MI300X", "MI300X"),
        ("rtx 4090", "RTX-4090"),
        ("DGX H100", "H100-80GB"),
        ("H100 80GB PCIe", "H100-PCIe"),
        ("H200 141GB", "H200"),
        ("Tesla V100-SXM2-32GB", "V100-32GB"),
    ],
)
def test_kinds_are_found_by_the_names_of_cards(text: str, name: str) -> None:
    assert kind_named(text) == name


def test_a_family_of_several_sizes_is_ambiguous() -> None:
    with pytest.raises(Mismatch, match="A100-40GB"):
        kind_named("A100")


def test_a_size_that_a_card_does_not_have_is_not_ignored() -> None:
    with pytest.raises(Mismatch, match="catalogue"):
        kind_named("H200 80GB")


def test_names_of_columns_may_be_spelled_in_several_ways(tmp_path: Path) -> None:
    spelled = {"tokens_per_s_per_gpu": "Tokens/sec/GPU", "memory_gib": "Memory (GiB)"}
    other = {spelled.get(name, name.upper()): value for name, value in TITAN.items()}
    (run,), (usual,) = table_of(tmp_path, other).runs, table_of(tmp_path, TITAN).runs
    assert (run.seconds, run.peak_bytes) == (usual.seconds, usual.peak_bytes)


@pytest.mark.parametrize(
    ("column", "hint"),
    [("MFU", "counted in several ways"), ("samples_per_s", "in JSON"), ("speed", "tokens_per_s")],
)
def test_a_table_without_its_speed_says_which_column_is_missing(
    tmp_path: Path, column: str, hint: str
) -> None:
    row = {name: value for name, value in TITAN.items() if name != "tokens_per_s_per_gpu"}
    with pytest.raises(InputError, match="tokens_per_s_per_gpu") as caught:
        table_of(tmp_path, row | {column: "0.4"})
    assert hint in str(caught.value)


def test_a_dtype_that_the_devices_lack_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"table.csv:2: dtype: found .fp8., expected"):
        table_of(tmp_path, TITAN | {"kind": "A100-80GB", "precision": "fp8"})


def test_twelve_devices_are_two_nodes_of_six() -> None:
    assert [len(node.devices) for node in machines("A100-80GB", 12).nodes] == [6, 6]


def test_hybrid_sharding_holds_the_state_of_its_shard(tmp_path: Path) -> None:
    """Of 16 devices in two copies of eight shards each holds an eighth of 16 bytes per weight:
    weights, their gradients and two moments in fp32."""
    (whole,) = table_of(tmp_path, TITAN | {"gpus": "16", "fsdp": "16"}).runs
    (hybrid,) = table_of(tmp_path, TITAN | {"gpus": "16"}).runs
    assert len(hybrid.plan.stages[0].replicas) == 16
    held = []
    for run in (whole, hybrid):
        chain: Chain = run.under(Calibration()).chain(run.chain)
        held.append(state_bytes(chain, run.plan.stages[0], 1.0).total)
    assert held[1] == pytest.approx(2 * held[0])
    weights = whole.chain.parameters
    assert held[0] == pytest.approx(weights * 16 / 16)
    assert hybrid.seconds == whole.seconds
