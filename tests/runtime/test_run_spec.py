"""``run.json``: what was asked for comes out of it as it went in, and what it cannot be is
refused."""

from __future__ import annotations

import inspect
import json
from dataclasses import MISSING, fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.adapt.controller import AdaptationLevel
from argosy.cli.running.run import run
from argosy.cli.running.run_checks import warn_of_other_options
from argosy.errors import InputError
from argosy.runtime.job.worker import main
from argosy.runtime.processes.run_spec import RunSpec, dumps_run_spec, loads_run_spec, read_run_spec

NAMES = st.text(min_size=1)
COUNTS, SECONDS = st.integers(0, 10**12), st.floats(0, 1e12, exclude_min=True)

SPECS = st.builds(
    RunSpec,
    plan=NAMES, program=NAMES, out=NAMES, steps=st.integers(1, 10**12), save_every=COUNTS, resume=st.booleans(),
    init=st.none() | NAMES, clip=st.none() | SECONDS, seed=st.integers(), compile_stages=st.booleans(),
    patience=SECONDS, any_device=st.booleans(),
    adapt=st.sampled_from(AdaptationLevel), model=st.none() | NAMES, horizon=st.integers(1, 10**12), min_gain=st.floats(0, 1),
    profiles=st.lists(st.text()).map(tuple), metrics_port=st.none() | st.integers(0, 65535), copy_every=COUNTS,
    lost_after=SECONDS, gather=SECONDS, wait=SECONDS, grace=SECONDS,
    island=st.none() | COUNTS, meeting=st.none() | NAMES, max_sync_every=st.integers(1, 10**12),
)  # fmt: skip


@given(SPECS)
def test_every_process_reads_the_very_numbers(spec: RunSpec) -> None:
    assert loads_run_spec(dumps_run_spec(spec)) == spec


def test_every_field_is_drawn_and_an_option_of_the_command_with_the_same_default() -> None:
    known = {field.name: field.default for field in fields(RunSpec)}
    drawn = SPECS.wrapped_strategy.kwargs  # type: ignore[attr-defined]
    assert drawn.keys() == known.keys()
    options = {name: option.default for name, option in inspect.signature(run).parameters.items()}
    options["profiles"] = tuple(options.pop("profile") or ())
    without_option = {"gather", "wait", "grace"}
    for name in known.keys() - without_option - {"steps", "out"}:
        assert options[name] == (
            inspect.Parameter.empty if known[name] is MISSING else known[name]
        ), name


GOOD = {"version": 1, "plan": "plan.json", "program": "train.py", "out": "run", "steps": 3}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"version": 2}, "version: found 2, expected one of 1"),
        ({"steps": 0}, "steps: found 0, expected greater than or equal to 1"),
        ({"steps": "3"}, 'steps: found "3", expected a valid integer'),
        ({"program": ""}, 'program: found "", expected a name'),
        ({"clip": -1}, "clip: found -1, expected greater than or equal to 0"),
        ({"patience": float("nan")}, "patience: found nan, expected greater than 0"),
        ({"adapt": "most"}, 'adapt: found "most", expected one of "off", "k", "shares", "full"'),
        (
            {"metrics_port": 70000},
            "metrics_port: found 70000, expected less than or equal to 65535",
        ),
        ({"sede": 1}, "sede: found an unknown field"),
        ({"plan": None}, "plan: found nothing, expected a name"),
    ],
)
def test_what_is_wrong_in_the_file_is_said_with_its_place(
    change: dict[str, object], sentence: str
) -> None:
    with pytest.raises(InputError) as caught:
        loads_run_spec(json.dumps({**GOOD, **change}), file="run.json")
    assert sentence in str(caught.value)
    assert "run.json:1" in str(caught.value)


def test_a_worker_without_its_file_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "run.json"
    assert main([str(missing)]) == 2
    assert capsys.readouterr().err == f"{missing}: there is no such file\n"
    missing.write_text(json.dumps(GOOD))
    assert read_run_spec(missing).steps == 3


def test_a_run_that_is_resumed_with_other_options_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.json"
    spec = RunSpec(plan="plan.json", program="train.py", out=str(tmp_path), steps=3, resume=True)
    warn_of_other_options(spec, file)
    file.write_text(dumps_run_spec(replace(spec, resume=False, steps=9)))
    warn_of_other_options(spec, file)
    assert capsys.readouterr().err == ""
    warn_of_other_options(replace(spec, seed=4, clip=0.5, plan="other.json"), file)
    assert capsys.readouterr().err.splitlines() == [
        "warning: plan: other.json; the run that is resumed had plan.json",
        "warning: --clip: 0.5; the run that is resumed had none",
        "warning: --seed: 4; the run that is resumed had 0",
    ]
    file.write_text("{")
    warn_of_other_options(replace(spec, seed=4), file)
    assert capsys.readouterr().err == ""
