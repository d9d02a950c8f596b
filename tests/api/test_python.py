"""The package from Python: names, files or objects everywhere, and results that a notebook
shows."""

from __future__ import annotations

import inspect
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import argosy
from argosy.cli import main
from argosy.errors import InputError
from argosy.plan.file import dumps_plan

BUNDLED = "llama-3-8b-on-mixed-16"


@cache
def plan() -> argosy.Plan:
    return argosy.find_plan(
        "gpt2-xl", "two-cards", global_batch=16, sequence_length=512, dtype="fp16"
    )


def test_names_and_objects_give_one_plan() -> None:
    chain = argosy.load_model("gpt2-xl", sequence_length=512, dtype="fp16")
    by_objects = argosy.find_plan(chain, argosy.load_cluster("two-cards"), global_batch=16)
    assert by_objects.bare == plan().bare


def test_a_plan_is_saved_simulated_explained_and_shown(tmp_path: Path) -> None:
    path = plan().save(tmp_path / "plan.json")
    assert argosy.load_plan(path) == plan()
    predicted = plan().predicted
    assert predicted is not None
    seconds = [
        plan().simulate().iteration_seconds[0],
        argosy.simulate(str(path)).iteration_seconds[0],
    ]
    assert seconds == pytest.approx([predicted.iteration_seconds] * 2)
    told = plan().explain()
    assert "gpt2-xl on two-cards" in repr(told) and told.value.plan == plan()
    assert told._repr_html_().startswith("<pre>gpt2-xl on two-cards")
    assert "an iteration, predicted" in plan()._repr_html_()
    assert repr(plan().report()).startswith("Report: Plan: gpt2-xl on two-cards")
    assert plan().report().save(tmp_path / "page.html").read_text().startswith("<!doctype html>")
    argosy.check_plan(path)


def test_a_plan_for_a_system_is_exported_to_it() -> None:
    """As ``argosy plan --for``: with the system's constants, and refused where it has no words."""
    made = argosy.find_plan("gpt2", "two-cards", global_batch=16, dtype="fp16", system="megatron")
    assert "--accumulate-allreduce-grads-in-fp32" in argosy.export(made, "megatron").files[0][1]
    given = {"global_batch": 16, "dtype": "bf16"}
    with pytest.raises(InputError, match="--for megatron, deepspeed, flagscale or torch takes it"):
        argosy.find_plan("gpt2", "two-cards", system="torchtitan", **given)
    with pytest.raises(InputError, match='system: found "megatrn", expected one of the systems'):
        argosy.find_plan("gpt2", "two-cards", system="megatrn", **given)


def test_a_comparison_is_a_table_and_its_rows() -> None:
    shown = argosy.compare("gpt2-xl", "two-cards", global_batch=16, only=["megatron"], dtype="fp16")
    assert [row.name for row in shown.value][:1] == ["argosy"] and "megatron" in repr(shown)


def test_a_plan_is_exported_from_python_as_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = argosy.export(BUNDLED, "torchrun", folder=tmp_path, steps=7)
    assert made.files and (tmp_path / made.files[0][0]).read_text() == made.files[0][1]
    with pytest.raises(SystemExit):
        main(["export", BUNDLED, "--to", "torchrun", "--steps", "7"])
    assert capsys.readouterr().out == made.files[0][1]


@pytest.mark.parametrize(
    ("to", "options", "message"),
    [
        ("megatorn", {}, 'to: .*did you mean "megatron"'),
        ("megatron", {"steps": 7}, "--steps does not apply to megatron"),
        ("torchrun", {"zone": "z"}, "--zone does not apply to torchrun"),
        ("jobset", {}, "--to jobset needs --image, a container"),
    ],
)
def test_what_a_system_does_not_take_is_refused(
    to: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        argosy.export(BUNDLED, to, **options)


def searched(**settings: Any) -> argosy.Plan:
    """A search with settings of any type."""
    return argosy.find_plan(
        "gpt2", "two-cards", global_batch=8, settings=argosy.Settings(**settings)
    )


def build() -> None:
    """A program, which is given by its name and not as an object."""


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: argosy.find_plan(3, "two-cards", global_batch=8),
            "model: .*object of class int.*a Chain, a model's",
        ),  # type: ignore[arg-type]
        (
            lambda: argosy.find_plan("gpt2", None, global_batch=8),
            "cluster: .*expected a Cluster, a cluster's file or",
        ),  # type: ignore[arg-type]
        (lambda: argosy.simulate(plan(), cluster="two-crads"), 'did you mean "two-cards"'),
        (
            lambda: argosy.simulate({}),
            "plan: .*object of class dict.*, expected a Plan, a plan's file or name",
        ),  # type: ignore[arg-type]
        (
            lambda: argosy.find_plan(
                argosy.load_model("gpt2"), "two-cards", global_batch=8, dtype="fp16"
            ),
            "dtype cannot be combined with a Chain, which has its own",
        ),
        (
            lambda: argosy.find_plan("gpt2", "two-cards", global_batch="8"),  # type: ignore[arg-type]
            'global_batch: found "8", expected a whole number, at least 1',
        ),
        (
            lambda: argosy.find_plan("gpt2", "two-cards", global_batch=8, settings={"level": 2}),  # type: ignore[arg-type]
            "settings: found .an object of class dict., expected argosy.Settings, such as",
        ),
        (
            lambda: argosy.find_plan(
                "gpt2", "two-cards", global_batch=8, settings=argosy.Settings(level=3)
            ),
            "settings.level: found 3, expected 1 or 2",
        ),
        (lambda: searched(gap="0.1"), 'settings.gap: found "0.1", expected float'),
        (
            lambda: searched(schedules="1f1b"),
            r'settings.schedules: found "1f1b", expected tuple\[ScheduleSpec, ...\]',
        ),
        (lambda: searched(recompute=("full",)), "settings.recompute: found a list of 1, expected"),
        (lambda: searched(max_width=0), "settings.max_width: found 0, expected a whole number"),
        (
            lambda: argosy.find_plan("gpt2", "two-cards", global_batch=8, model="torch"),  # type: ignore[arg-type]
            "model: found .an object of class str., expected a ComputeModel",
        ),
        (lambda: plan().simulate(model="torch"), "model: found .*expected a ComputeModel"),
        (lambda: plan().simulate(record=-1), "record: found -1, expected a whole number, at least"),
        (lambda: plan().save(None), "path: found .an object of class NoneType., expected a path"),
        (lambda: plan().save("no-such-folder/plan.json"), "the folder no-such-folder does not"),
        (lambda: argosy.load_plan({}), "found an object of class dict, expected a file or a name"),  # type: ignore[arg-type]
        (lambda: argosy.load_model(3), "found an object of class int, expected a file or a name"),  # type: ignore[arg-type]
        (lambda: argosy.export(BUNDLED, None), "to: expected one of torchtitan"),  # type: ignore[arg-type]
        (lambda: argosy.export(BUNDLED, "torchrun", steps=0), "steps: found 0, expected a whole"),
        (
            lambda: argosy.export(BUNDLED, "torchrun", program=build),  # type: ignore[arg-type]
            "program: found .an object of class function., expected a file and a function",
        ),
        (lambda: argosy.compare("gpt2", "two-cards", only=3), "only: found 3, expected a planner"),  # type: ignore[arg-type]
        (lambda: argosy.compare("gpt2", "two-cards", level=0), "level: found 0, expected 1 or 2"),
        (
            lambda: argosy.compare("gpt2", "two-cards", only="metis"),
            'only: found "metis", expected',
        ),
        (
            lambda: argosy.compare("gpt2", "two-cards", global_batch=True),
            "global_batch: found true, expected a whole number, at least 1",
        ),
        (lambda: plan().simulate(iterations=0), "iterations: found 0, expected a whole number"),
        (lambda: plan().simulate(iterations=2.5), "iterations: found 2.5, expected a whole"),
        (lambda: plan().simulate(until="1 min"), 'until: found "1 min", expected seconds, more'),
        (lambda: plan().simulate(until=0.0), "until: found 0.0, expected seconds, more than 0"),
    ],
)
def test_what_is_neither_a_name_nor_an_object_is_refused(call: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


def test_every_public_function_is_documented_with_types() -> None:
    for name in argosy.__all__:
        value = getattr(argosy, name)
        assert inspect.getdoc(value) or name == "__version__", name


def test_a_saved_plan_is_what_the_commands_write(tmp_path: Path) -> None:
    assert plan().save(tmp_path / "p.json").read_text() == dumps_plan(plan())
