"""Fitting constants: what it recovers, what it refuses, and how its figures are made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from argosy.calibrate.file import read_measured
from argosy.calibrate.fit import MOST, errors, fit_to, rank_correlation, split_runs
from argosy.calibrate.predict import exact_seconds, peak_bytes, quick_seconds
from argosy.calibrate.run import Degrees, MeasuredRun, Measurements, even_plan
from argosy.calibrate.sailor import read_sailor_runs
from argosy.calibrate.study import default_names, study
from argosy.calibrate.vtrain import COLUMNS, read_vtrain
from argosy.cluster.file import load_cluster
from argosy.cost.calibration import Calibration
from argosy.errors import InputError
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.workload.load import load_model
from argosy.workload.profile import Profile

TRUE = Calibration(passes=3.2, forward_floor=0.4e-3, backward_floor=2e-3, bandwidth=0.4)
SHAPES = [
    (1, 1, 2),
    (2, 1, 1),
    (1, 2, 2),
    (2, 2, 1),
    (4, 2, 1),
    (1, 8, 1),
    (1, 2, 4),
    (8, 1, 1),
    (2, 1, 4),
]


@pytest.fixture(scope="module")
def imagined(tmp_path_factory: pytest.TempPathFactory) -> Measurements:
    """Runs whose seconds and bytes are those of the model itself under known constants."""
    lines = [",".join(COLUMNS)]
    for hidden in (1024, 2048):
        for tensor, data, pipeline in SHAPES:
            for micro in (1, 4, 8):
                batch = 4 * micro * data
                row = (
                    tensor * data * pipeline,
                    batch,
                    micro,
                    hidden,
                    16,
                    12,
                    1024,
                    tensor,
                    data,
                    pipeline,
                    100.0,
                )
                lines.append(",".join(map(str, row)))
    path = tmp_path_factory.mktemp("vtrain") / "runs.csv"
    path.write_text("\ufeff" + "\n".join(lines), encoding="utf-8")
    return told_by(read_measured(path), TRUE)


def told_by(measured: Measurements, constants: Calibration) -> Measurements:
    seconds = np.array([exact_seconds(measured, run, constants) for run in measured.runs])
    memory = peak_bytes(
        measured.runs, replace(constants, process_bytes=4e9, activation_factor=1.25)
    )
    runs = zip(measured.runs, seconds.tolist(), memory.tolist(), strict=True)
    return replace(
        measured, runs=tuple(replace(run, seconds=s, peak_bytes=b) for run, s, b in runs)
    )


@pytest.fixture(scope="module")
def two_dtypes() -> tuple[MeasuredRun, ...]:
    cluster = load_cluster("mixed-16")
    degrees = Degrees(tensor=2, data=1, pipeline=2, micro_batch=1, global_batch=8)
    chains = [
        load_model("llama-2-7b", dtype=dtype, sequence_length=2048) for dtype in ("fp16", "fp32")
    ]
    plans = [even_plan(degrees, chain, cluster) for chain in chains]
    both = zip(plans, chains, strict=True)
    return tuple(
        MeasuredRun(name="", plan=plan, chain=chain, cluster=cluster, seconds=1.0)
        for plan, chain in both
    )


def test_a_run_is_priced_the_same_beside_others_of_its_model(
    two_dtypes: tuple[MeasuredRun, ...],
) -> None:
    measured = Measurements(source="", runs=two_dtypes)
    together = quick_seconds(measured, two_dtypes, Calibration())
    alone = [quick_seconds(measured, [run], Calibration())[0] for run in two_dtypes]
    assert together.tolist() == alone


def test_a_schedule_of_its_own_depth_holds_as_many_activations(
    two_dtypes: tuple[MeasuredRun, ...],
) -> None:
    run = two_dtypes[0]
    all_ahead = replace(run, plan=replace(run.plan, schedule=ScheduleSpec(kind=ScheduleKind.GPIPE)))
    as_deep = ScheduleSpec(kind=ScheduleKind.EAGER, depth=(8, 8))
    deep = replace(run, plan=replace(run.plan, schedule=as_deep))
    assert len(set(peak_bytes([all_ahead, deep], Calibration()).tolist())) == 1


def test_known_constants_are_found_again(imagined: Measurements) -> None:
    names = (
        "passes",
        "forward_floor",
        "backward_floor",
        "bandwidth",
        "process_bytes",
        "activation_factor",
    )
    found = fit_to(imagined, imagined.runs, names[:4], Calibration()).calibration
    for name in names[:4]:
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.1), name
    found = fit_to(imagined, imagined.runs, names[4:], found).calibration
    assert found.process_bytes == pytest.approx(4e9, rel=0.02)
    assert found.activation_factor == pytest.approx(1.25, rel=0.02)


def test_constants_that_are_0_by_default_are_found_too(imagined: Measurements) -> None:
    """From a usual value on, and not from the largest that is possible, where a simplex sees
    nothing change."""
    true = replace(TRUE, forward_start=3e-4, backward_start=6e-4)
    measured = told_by(imagined, true)
    for name in ("forward_start", "backward_start"):
        known = replace(true, **{name: 0.0})
        found = fit_to(measured, measured.runs, (name,), known).calibration
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=0.1)


def test_the_closed_form_and_the_exact_engine_agree(imagined: Measurements) -> None:
    runs = imagined.runs[::4]
    quick = quick_seconds(imagined, runs, TRUE)
    exact = np.array([exact_seconds(imagined, run, TRUE) for run in runs])
    assert np.abs(quick / exact - 1).max() < 0.05
    assert np.median(np.abs(quick / exact - 1)) < 0.01


def test_a_split_is_the_same_for_the_same_seed(imagined: Measurements) -> None:
    one, rest = split_runs(imagined.runs, 0.5, seed=7)
    assert split_runs(imagined.runs, 0.5, seed=7) == (one, rest)
    assert split_runs(imagined.runs, 0.5, seed=8)[0] != one
    assert len(one) == len(imagined.runs) // 2
    assert {run.name for run in one}.isdisjoint(run.name for run in rest)


def test_same_runs_same_constants(imagined: Measurements) -> None:
    first, second = (
        fit_to(imagined, imagined.runs[:12], ("passes", "bandwidth"), Calibration())
        for _ in range(2)
    )
    assert first == second


def test_figures_of_errors() -> None:
    found = errors(np.array([1.1, 0.8, 1.0, 2.0]), np.ones(4))
    assert (found.count, found.worst) == (4, pytest.approx(1.0))
    assert found.median == pytest.approx(0.15)
    assert found.mean == pytest.approx(1.3 / 4)


def test_rank_correlation_is_spearmans() -> None:
    random = np.random.default_rng(1)
    for _ in range(20):
        one, other = random.integers(0, 9, 12).astype(float), random.normal(size=12)
        assert rank_correlation(one, other) == pytest.approx(spearmanr(one, other).statistic)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("pases",), 'did you mean "passes"'),
        (("passes",) * 2, "different"),
        (("passes",) * (MOST + 1), "at most 5"),
    ],
)
def test_constants_are_refused_by_name(
    imagined: Measurements, names: tuple[str, ...], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        fit_to(imagined, imagined.runs, names, Calibration())


def test_even_plans_rank_devices_as_megatron_does(imagined: Measurements) -> None:
    run: MeasuredRun = imagined.runs[0]
    plan = even_plan(
        Degrees(tensor=2, data=2, pipeline=2, micro_batch=1, global_batch=4), run.chain, run.cluster
    )
    assert [replica.devices for stage in plan.stages for replica in stage.replicas] == [
        ("a0.0", "a0.1"),
        ("a0.2", "a0.3"),
        ("a0.4", "a0.5"),
        ("a0.6", "a0.7"),
    ]
    assert [(stage.first, stage.end) for stage in plan.stages] == [(0, 7), (7, 14)]


@pytest.mark.parametrize(
    ("degrees", "says"),
    [
        (Degrees(tensor=4, data=4, pipeline=1, micro_batch=1, global_batch=4), "at most 8 devices"),
        (
            Degrees(pipeline=2, chunks=8, micro_batch=1, global_batch=4),
            "at most 12 stages, one for each block",
        ),
        (
            Degrees(tensor=1, data=2, pipeline=1, micro_batch=2, global_batch=6),
            "multiple of micro_batch x data",
        ),
    ],
)
def test_impossible_degrees_are_refused(
    imagined: Measurements, degrees: Degrees, says: str
) -> None:
    run = imagined.runs[0]
    with pytest.raises(InputError, match=says):
        even_plan(degrees, run.chain, run.cluster)


def test_a_broken_row_is_named(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(",".join(COLUMNS) + "\n2,16,8,1024,16,24,1024,1,1,2,fast\n")
    with pytest.raises(InputError, match=r"runs.csv:2"):
        read_vtrain(path)


def test_messages_and_sums_can_be_slow(imagined: Measurements) -> None:
    """What a message takes beside its bytes, and what of a link sums of gradients reach, mean the
    same to the closed form and to the exact engine, and are found again."""
    slow = replace(TRUE, latency=2e-4, reduction=0.4)
    told = told_by(imagined, slow)
    found = fit_to(told, told.runs, ("latency", "reduction"), TRUE).calibration
    assert found.latency == pytest.approx(2e-4, rel=0.15)
    assert found.reduction == pytest.approx(0.4, rel=0.1)
    runs = told.runs[::7]
    exact = np.array([exact_seconds(told, run, slow) for run in runs])
    assert np.abs(quick_seconds(told, runs, slow) / exact - 1).max() < 0.05


def test_by_default_what_the_runs_can_tell_is_fitted(imagined: Measurements) -> None:
    """Five constants about seconds and both about memory; fewer where layers were timed, or one
    device ran alone."""
    seconds = ("peak", "attention_peak", "passes", "forward_floor", "bandwidth")
    everything = (*seconds, "process_bytes", "activation_factor")
    assert default_names(imagined) == everything
    unweighed = replace(
        imagined, runs=tuple(replace(run, peak_bytes=None) for run in imagined.runs)
    )
    assert default_names(unweighed) == seconds
    (kind,) = {device.kind.name for device in imagined.runs[0].cluster.devices}
    timed = replace(unweighed, profiles={kind: Profile(device=kind, model="any", rows=())})
    assert default_names(timed) == ("bandwidth",)
    few = replace(imagined, runs=imagined.runs[:3])
    assert default_names(few) == ()
    with pytest.raises(InputError, match="found 3, expected at least 4 runs to fit on"):
        study(few, ("passes",))


def test_a_study_of_many_runs_judges_those_it_was_not_fitted_on(imagined: Measurements) -> None:
    found = study(imagined, share=0.6, seed=1)
    assert found.names == default_names(imagined)
    assert found.method == f"fitted on 32 runs (seed 1), judged on {len(imagined.runs) - 32} others"
    fitted, _ = split_runs(imagined.runs, 0.6, 1)
    assert {one.run.name for one in found.judged}.isdisjoint(run.name for run in fitted)
    assert found.seconds.median < 0.02 and found.memory is not None and found.memory.median < 0.02


def test_what_is_no_table_of_runs_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match=r"runs.csv:1: expected the columns "):
        read_vtrain(path)
    path.write_text(",".join(COLUMNS) + '\n"' + 200_000 * "x" + '"\n')
    with pytest.raises(
        InputError,
        match=r"runs.csv:\d: found field larger than field limit .*, expected a row of a CSV",
    ):
        read_vtrain(path)
    with pytest.raises(
        InputError,
        match=r"expected runs as JSON files, and layer-times.json in a folder above them",
    ):
        read_sailor_runs(tmp_path)


HEAD = "section,Model,SeqLen (T),# GPUs,GPU,MFU,MicroBatchSize,GradAccum,GlobalBatchSize,Throughput (T/s),Precision"
HEAD += ",Sharding Strategy,Activation Checkpointing,Note"


def foundry(*rows: str) -> str:
    return "# source: a test\n" + HEAD + "\n" + "\n".join(rows) + "\n"


def test_a_published_table_is_read_whatever_columns_it_has_more(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(
        "\ufeff" + foundry("A,7b,2048,16,a100_80gb,50,4,2,128,60000,amp_bf16,FULL_SHARD,True,x")
    )
    (run,) = read_measured(path).runs
    assert (run.chain.parameters, run.plan.num_micro_batches, run.plan.stages[0].zero) == (
        6658859008,
        2,
        3,
    )
    assert run.seconds == pytest.approx(128 * 2048 / 60000)
    assert run.cluster.device("n1.7").kind.name == "A100-80GB"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("A,8b,2048,8,a100_80gb,50,4,2,64,60000,bf16,FULL_SHARD,True,x", "one of the MPT sizes"),
        (
            "A,7b,2048,8,a100_81gb,50,4,2,64,60000,bf16,FULL_SHARD,True,x",
            "runs.csv:3: GPU: .* a device kind",
        ),
        (
            "A,7b,2048,8,a100_80gb,50,4,2,63,60000,bf16,FULL_SHARD,True,x",
            "MicroBatchSize x GradAccum",
        ),
        (
            "A,7b,2048,8,a100_80gb,50,4,2,64,fast,bf16,FULL_SHARD,True,x",
            "Throughput .* a finite number above 0",
        ),
        ("A,7b,2048,8,a100_80gb,50,4,2,64,60000,bf16,SOME,True,x", "one of FULL_SHARD"),
        ("A,7b,2048", "a row of 14 cells"),
    ],
)
def test_a_broken_row_of_a_published_table_is_named(tmp_path: Path, row: str, says: str) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(foundry(row))
    with pytest.raises(InputError, match=says):
        read_measured(path)


def test_a_table_that_nobody_knows_names_the_columns_that_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(",".join(COLUMNS[:-1]) + "\n1,1,1,1,1,1,1,1,1,1\n")
    with pytest.raises(InputError, match=r"expected also the columns iteration time \(ms\)"):
        read_measured(path)


def test_constants_that_runs_do_not_tell_stay_as_they_were(imagined: Measurements) -> None:
    """One device alone sends nothing, so its runs say nothing of links."""
    alone = [
        run
        for run in imagined.runs
        if len(run.plan.devices) == 2 and len(run.plan.stages[0].devices) == 2
    ]
    lonely = replace(imagined, runs=tuple(alone))
    found = fit_to(lonely, lonely.runs, ("passes", "latency"), TRUE)
    assert "latency" in found.unidentified or found.calibration.latency < 1e-4
    assert found.calibration.passes == pytest.approx(TRUE.passes, rel=0.05)


def test_a_fit_that_predicts_left_out_runs_worse_is_dropped(imagined: Measurements) -> None:
    noise = np.random.default_rng(3).lognormal(0.0, 0.4, 6)
    runs = tuple(
        replace(run, seconds=run.seconds * n)
        for run, n in zip(imagined.runs[::9], noise, strict=True)
    )
    found = fit_to(replace(imagined, runs=runs), runs, ("peak", "passes", "bandwidth"), TRUE)
    assert found.left_out is not None and found.before is not None
    assert found.is_kept == (found.left_out < found.before)
    assert found.is_kept or found.calibration == TRUE
