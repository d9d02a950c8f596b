"""A plan remembers its cost model: every later command predicts what the plan predicts, or says why
it does not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cli.command_result import Run

from argosy.plan.file import load_plan
from argosy.plan.plan import CostModelRef, Plan

CLUSTER = """
name = "pair"

[[nodes]]
name = "h"
count = 2
devices = {kind = "H200", count = 2}
intra = [{medium = "nvlink", bandwidth = "300 GB/s"}]
nic = {bandwidth = "100 Gbit/s"}
"""
CONSTANTS = {
    "forward_peak": 0.1,
    "backward_peak": 0.1,
    "bandwidth": 0.05,
    "latency": 0.001,
    "process_bytes": 2e9,
    "activation_factor": 1.5,
    "blocking": True,
}
PROFILE = ("--profile", "h200-gpt2-xl")
CALIBRATION = ("--calibration", "constants.json")
MADE_WITH = {
    "a profile": PROFILE,
    "a calibration": CALIBRATION,
    "both": (*PROFILE, *CALIBRATION),
    "the default cost model": (),
}
made_with = pytest.mark.parametrize("options", MADE_WITH.values(), ids=MADE_WITH)


@pytest.fixture
def files(tmp_path: Path) -> None:
    (tmp_path / "pair.toml").write_text(CLUSTER)
    (tmp_path / "constants.json").write_text(json.dumps({"version": 1, "constants": CONSTANTS}))


def planned(run: Run, *options: str) -> Plan:
    """A plan in ``plan.json``."""
    search = ("plan", "-m", "gpt2-xl", "-c", "pair.toml", "-b", "8", "-q", "-o", "plan.json")
    result = run(*search, *options)
    assert result.code == 0, result.err
    return load_plan("plan.json")


def seconds(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.iteration_seconds


@pytest.mark.usefixtures("files")
@made_with
def test_later_commands_predict_what_the_plan_predicts(run: Run, options: tuple[str, ...]) -> None:
    plan = planned(run, *options)
    simulated = run("simulate", "plan.json", "--json")
    explained = run("explain", "plan.json", "--json")
    assert (simulated.err, explained.err) == (
        f"simulating {plan!r}\n",
        f"simulating {plan!r} and changes to it\n",
    )
    assert json.loads(simulated.out)["simulated_seconds"] == pytest.approx(seconds(plan), rel=1e-9)
    assert json.loads(explained.out)["iteration_seconds"] == pytest.approx(seconds(plan), rel=1e-9)
    assert run("trace", "plan.json", "-o", "trace.json", "-q").code == 0
    spans = json.loads(Path("trace.json").read_text())["traceEvents"]
    end = max(span["ts"] + span["dur"] for span in spans if "dur" in span)
    assert end / 1e6 == pytest.approx(seconds(plan), rel=1e-6)


@pytest.mark.usefixtures("files")
@made_with
def test_the_page_shows_the_plans_prediction_and_its_certificate(
    run: Run, options: tuple[str, ...]
) -> None:
    from argosy.report.plan import certificate_in_a_sentence
    from argosy.units import TIME

    plan = planned(run, *options)
    assert run("report", "plan.json", "-q").code == 0
    page = Path("report.html").read_text()
    assert plan.certificate is not None
    sentence = certificate_in_a_sentence(plan.certificate)
    assert sentence[1:] in page
    assert f"<strong>{TIME.format(seconds(plan))}</strong>" in page
    assert f"bound {TIME.format(plan.certificate.lower_bound_seconds)}" in page


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), r"default cost model"),
        (PROFILE, r"profile of H200 \([0-9a-f]{8}\)"),
        (CALIBRATION, r"calibration \([0-9a-f]{8}\)"),
        ((*PROFILE, *CALIBRATION), r"profile of H200 and calibration \([0-9a-f]{8}\)"),
    ],
)
def test_a_certificate_states_its_cost_model(
    run: Run, options: tuple[str, ...], words: str
) -> None:
    plan = planned(run, *options)
    assert plan.certificate is not None and plan.certificate.cost_model is not None
    assert re.fullmatch(words, plan.certificate.cost_model)
    assert (plan.cost_model is None) == (not options)
    assert plan.cost_model is None or plan.cost_model.hash[:8] in plan.certificate.cost_model
    shown = run(
        "plan", "-m", "gpt2-xl", "-c", "pair.toml", "-b", "8", "-q", *options, "--width", "300"
    )
    assert re.search(rf"certificate .*, for the {words}", shown.out)


@pytest.mark.usefixtures("files")
@made_with
def test_the_same_cost_model_given_again_changes_nothing(
    run: Run, options: tuple[str, ...]
) -> None:
    plan = planned(run, *options)
    again = run("simulate", "plan.json", "--json", "-q", *options)
    assert again.err == ""
    assert json.loads(again.out)["simulated_seconds"] == pytest.approx(seconds(plan), rel=1e-9)


@pytest.mark.usefixtures("files")
def test_another_cost_model_is_used_and_the_plans_own_figures_are_not_shown(run: Run) -> None:
    plan = planned(run, *PROFILE)
    assert plan.cost_model is not None
    other = run("simulate", "plan.json", "--json", "-q", "--profile", "none")
    warning = (
        f"warning: the plan was made with the {plan.cost_model.words}, and this command uses the default cost model: "
        "the plan's prediction and certificate are not shown, because they do not hold here\n"
    )
    assert other.err == warning
    planned(run)
    default = json.loads(run("simulate", "plan.json", "--json", "-q").out)["simulated_seconds"]
    assert (
        json.loads(other.out)["simulated_seconds"]
        == pytest.approx(default)
        != pytest.approx(seconds(plan))
    )
    told = run("report", "plan.json", "-q", *PROFILE)
    assert told.err.startswith(
        "warning: the plan was made with the default cost model, and this command uses the "
    )
    page = Path("report.html").read_text()
    assert "proven" not in page and "granularity" not in page


@pytest.mark.usefixtures("files")
def test_a_changed_cost_model_in_a_plan_file_is_refused(run: Run) -> None:
    plan = planned(run, *CALIBRATION)
    assert plan.cost_model is not None
    content = json.loads(Path("plan.json").read_text())
    content["cost_model"]["content"]["constants"]["latency"] = 0.002
    text = json.dumps(content, indent=1, sort_keys=True)
    Path("plan.json").write_text(text)
    line = next(
        number for number, row in enumerate(text.splitlines(), 1) if plan.cost_model.hash in row
    )
    refused = run("simulate", "plan.json")
    assert refused.code == 2
    new = CostModelRef.of(content["cost_model"]["content"]).hash[:8]
    assert refused.err == (
        f'error: plan.json:{line}: cost_model.hash: found "{plan.cost_model.hash[:8]}...", expected {new}..., '
        "the SHA-256 of its content; plan again instead of editing the cost model\n"
    )


@pytest.mark.usefixtures("files")
def test_a_plan_without_a_cost_model_was_made_with_the_default_one(run: Run) -> None:
    plan = planned(run)
    content = json.loads(Path("plan.json").read_text())
    assert "cost_model" not in content
    del content["certificate"]["cost_model"]
    Path("plan.json").write_text(json.dumps(content))
    simulated = run("simulate", "plan.json", "--json", "-q")
    assert json.loads(simulated.out)["simulated_seconds"] == pytest.approx(seconds(plan), rel=1e-9)


@pytest.mark.usefixtures("files")
def test_a_comparison_under_another_cost_model_is_refused_on_a_page(run: Run) -> None:
    plan = planned(run, *PROFILE)
    assert plan.cost_model is not None
    compared = run(
        "compare", "-m", "gpt2-xl", "-c", "pair.toml", "-b", "8", "--only", "dp-ev", "--json", "-q"
    )
    Path("compare.json").write_text(compared.out)
    refused = run("report", "plan.json", "--compare", "compare.json", "-q")
    expected = f'compare.json: cost_model: found "default", expected {plan.cost_model.hash}, as in the plan'
    assert (refused.code, expected in refused.err) == (2, True), refused.err
    same = run(
        "compare",
        "-m",
        "gpt2-xl",
        "-c",
        "pair.toml",
        "-b",
        "8",
        "--only",
        "dp-ev",
        "--json",
        "-q",
        *PROFILE,
    )
    Path("compare.json").write_text(same.out)
    assert run("report", "plan.json", "--compare", "compare.json", "-q").code == 0


@pytest.mark.usefixtures("files")
def test_a_run_that_adapts_by_another_cost_model_says_so(run: Run) -> None:
    Path("train.py").write_text("def build(): ...\n")
    plan = planned(run, *PROFILE, "--runnable")
    assert plan.cost_model is not None
    command = ("run", "plan.json", "train.py", "--adapt", "k", "--dry-run", "-q")
    assert run(*command).err == ""
    assert run(*command, *PROFILE).err == ""
    warning = f"the plan was made with the {plan.cost_model.words}, and this command uses the default cost model"
    assert run(*command, "--profile", "none").err == f"warning: {warning} to adapt\n"
