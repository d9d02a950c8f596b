"""What cannot be run is refused before it is, with where it is, what was found and what was
expected."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from runtime.small_models import hf_t5
from runtime.training_cases import Case, plan_of
from torch import nn

from argosy.dtype import Dtype
from argosy.errors import InputError, RunError
from argosy.measure import profile_shape
from argosy.measure.profile import ProfileSettings, _check_samples
from argosy.plan.plan import Recompute
from argosy.runtime.job.metrics import Metrics, serve
from argosy.runtime.job.program import load_program
from argosy.runtime.job.worker import prepare
from argosy.runtime.processes import world
from argosy.runtime.processes.failure import clear_notes, leave_note, verdict
from argosy.runtime.processes.run_folder import held
from argosy.runtime.sources.mixing import check_mixing
from argosy.runtime.sources.source import LayerSource
from argosy.runtime.stages.huggingface import Inputs, check_settings
from argosy.runtime.stages.huggingface_encoders import EncoderInputs
from argosy.runtime.stages.layers import check_unwrapped, find_layers
from argosy.runtime.stages.moment import Moment
from argosy.runtime.stages.stage import LayerStage
from argosy.runtime.stages.weighing import LossWatch
from argosy.runtime.state.migrate import _checked
from argosy.runtime.step.batch import check_as_captured, check_batch
from argosy.runtime.step.trainer import Trainer
from argosy.runtime.weights.holding import _real
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.workload.preset import read_preset

INTERLEAVED = ScheduleSpec(kind=ScheduleKind.INTERLEAVED, chunks=2)


def trainer(**case: Any) -> Any:
    """One that has a plan and nothing else."""
    found: Any = Trainer.__new__(Trainer)
    found.plan, found.making = plan_of(Case(**case)), None
    return found


def movable() -> Any:
    found = trainer()
    found.making = SimpleNamespace(recipe=SimpleNamespace(roster=("n0.0", "n0.1")))
    return found


def moved() -> Any:
    """To a plan with a layer more on a device that is not of the run."""
    plan = plan_of(Case(shares=((2,), (2,), (2,))))
    last = replace(plan.stages[-1], end=7)
    return replace(plan, stages=(*plan.stages[:-1], last))


def stage_with(loss: Callable[..., Any]) -> Any:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    place: Any = {
        "recompute": Recompute.NONE,
        "autocast": None,
        "device": torch.device("cpu"),
        "seed": 0,
    }
    return LayerStage(model, tuple(model), loss, first=0, end=2, **place)(
        None, torch.ones(1, 2), Moment(0, 0, 1)
    )


class Listed(nn.Module):
    def argosy_layers(self) -> list[Any]:
        return [nn.Identity(), F.relu]


GPT2LMHeadModel = type(
    "GPT2LMHeadModel", (nn.Module,), {"config": SimpleNamespace(_attn_implementation="eager")}
)

RoutedModel = type(
    "MixtralForCausalLM",
    (nn.Module,),
    {"config": SimpleNamespace(_attn_implementation="sdpa", output_router_logits=True)},
)

CASES: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: trainer().set_schedule(INTERLEAVED),
        "schedule: found interleaved (2 chunks), expected a schedule with the same stages per worker",
    ),
    (
        lambda: trainer(shares=((3, 1), (4,))).set_shares(0, (4, 0)),
        r"stages[0].samples: found (4, 0), expected 2 counts above 0 that sum to 4",
    ),
    (
        lambda: _checked(movable(), moved()),
        "plan: found n0.2, expected devices of the run: n0.0, n0.1",
    ),
    (
        lambda: LayerSource(None, None, [nn.Identity()] * 6, moved()),
        "plan.stages: found 7 layers, expected 6, the model's layers",
    ),
    (
        lambda: check_mixing(
            [nn.Identity(), nn.BatchNorm1d(3), *[nn.Identity()] * 4],
            plan_of(Case(shares=((1, 1), (2,)))),
        ),
        "layer 1: found BatchNorm1d, expected no statistics over a batch, which stage 0 divides over 2 replicas",
    ),
    (
        lambda: check_batch({"x": 3}, plan_of(Case())),
        "batch: found dict, expected a pytree with tensors",
    ),
    (
        lambda: find_layers(nn.Linear(2, 2)),
        "model: found Linear, expected an nn.Sequential, a model with argosy_layers()",
    ),
    *(
        (
            partial(find_layers, nn.Sequential(nn.Embedding(4, 2, **{argument: value}))),
            f"0: found Embedding with {argument}={value}, expected {expected}",
        )
        for argument, value, expected in (
            ("max_norm", 1.0, "no max_norm, which changes weights in a forward"),
            ("scale_grad_by_freq", True, "gradients that do not depend on how a plan divides"),
            ("sparse", True, "dense gradients, which replicas can sum"),
        )
    ),
    (
        lambda: find_layers(Listed()),
        "Listed.argosy_layers()[1]: found function, expected an nn.Module",
    ),
    (
        lambda: check_unwrapped(nn.DataParallel(nn.Linear(2, 2))),
        "model: found a DataParallel, expected the model itself, which the plan divides; give model.module",
    ),
    (
        lambda: EncoderInputs(nn.Identity())(torch.ones(1, 2), inputs_embeds=torch.ones(1, 2)),
        "model: found inputs_embeds, expected only token_type_ids, position_ids, labels",
    ),
    (
        lambda: find_layers(hf_t5(1)[0])[0](torch.ones(1, 2, dtype=torch.int64)),
        "model: found no labels, expected labels or decoder_input_ids",
    ),
    (lambda: check_settings(GPT2LMHeadModel()), "model: found attention eager, expected sdpa"),
    (
        lambda: check_settings(RoutedModel()),
        "model: found output_router_logits=True, which adds a loss of the routers",
    ),
    (
        lambda: Inputs(nn.Identity(), "input_ids")(
            torch.ones(1, 2), token_type_ids=torch.ones(1, 2)
        ),
        "model: found token_type_ids, expected only input_ids, attention_mask and labels",
    ),
    (
        Inputs(nn.Identity(), "input_ids"),
        "model: found no input_ids, expected only input_ids, attention",
    ),
    (
        lambda: LossWatch().judged(torch.ones(3), 1),
        "loss_fn: found a tensor of shape (3,), expected a scalar tensor, the mean over samples",
    ),
    (lambda: LossWatch().judged(1.5, 1), "loss_fn: found float, expected a scalar"),
    (
        lambda: LossWatch().judged((torch.ones(()), "3"), 1),
        "loss_fn: found a weight of str, expected a number or a scalar",
    ),
    (
        lambda: stage_with(lambda model, batch: model(batch).sum() + model(batch).sum()),
        "loss_fn: found a second call of the model, expected one call of the model",
    ),
    (
        lambda: stage_with(
            lambda model, batch: model(batch).sum() + next(model.parameters()).sum()
        ),
        "loss_fn: found model.parameters, expected nothing of the model but calls of it",
    ),
    (
        lambda: _real(torch.empty(2, device="meta"), "head.weight", None),
        "head.weight: found a weight on the meta device, expected values",
    ),
    (
        lambda: prepare(
            SimpleNamespace(build=lambda: (1, 2)), plan_of(Case()), SimpleNamespace(seed=0)
        ),  # type: ignore[arg-type]
        "build: found int, int, expected build() to return a model, a loss function and a batch",
    ),
    (
        lambda: world.check_supported(
            replace(plan_of(Case()), stages=(replace(plan_of(Case()).stages[0], context=2),))
        ),
        "plan: Stage 0 asks for context parallelism in 2 parts on replicas of 1 device",
    ),
    (
        lambda: world.check_world_size(("a", "b"), 1),
        "plan: found 1 process, expected 2, one for each device of the plan",
    ),
]


@pytest.mark.parametrize(("call", "says"), CASES, ids=[says for _, says in CASES])
def test_what_cannot_be_run_is_refused_by_name(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert says in str(caught.value)


def test_what_does_not_train_may_have_statistics_of_a_batch() -> None:
    frozen = nn.BatchNorm1d(3).eval()
    check_mixing(
        [nn.Identity(), frozen, *[nn.Identity()] * 4], plan_of(Case(shares=((1, 1), (2,))))
    )


def test_a_plain_setting_of_the_model_can_be_read_by_a_loss() -> None:
    result = stage_with(lambda model, batch: model(batch).sum() * model.training)
    assert result.loss.shape == ()


def test_a_function_that_a_program_does_not_have_is_named_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def build():\n    return 1\n")
    with pytest.raises(
        InputError, match=r'train.py: found no function "biuld", expected build\(\)'
    ) as caught:
        load_program(f"{tmp_path / 'train.py'}:biuld")
    assert "build" in str(caught.value).partition("expected build()")[2], "it is suggested"


def test_a_port_that_is_taken_is_named() -> None:
    server = serve(Metrics(), 0)
    try:
        with pytest.raises(
            InputError,
            match=r'Cannot use port \d+ because .*"Address already in use".*another --metrics-port',
        ):
            serve(Metrics(), server.server_port)
    finally:
        server.shutdown()
        server.server_close()


NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.mark.parametrize(
    ("error", "reason"),
    [(RuntimeError("no route\nmore"), "no route"), (TimeoutError(), "TimeoutError")],
)
def test_who_cannot_join_the_others_says_where_they_are(
    monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    def meet(*_: Any, **__: Any) -> None:
        raise error

    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        InputError,
        match=r"RANK is not set in the environment. Try starting it by torchrun",
    ):
        world.join(plan_of(Case()))
    monkeypatch.setattr(world, "meet", meet)
    for name, value in zip(NAMES, ("1", "2", "far", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(RunError) as caught:
        world.join(plan_of(Case()))
    assert str(caught.value) == f"rank 1 could not join the others at far:29500: {reason}"


def test_where_no_rank_speaks_torchrun_s_last_words_count(tmp_path: Path) -> None:
    assert verdict(tmp_path, "one\nno such option\n\n", []) == (
        "torchrun failed: no such option",
        RunError.exit_code,
    )
    assert verdict(tmp_path, "", [])[0] == "torchrun failed without a message"
    leave_note(tmp_path, rank=1, device="n0.1", message="no", exit_code=2, first_hand=True)
    assert verdict(tmp_path, "", ["n0.0", "n0.1"]) == ("rank 1 (n0.1): no", 2)
    clear_notes(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_shape_of_which_nothing_fits_into_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(profile_shape, "measure_stack", full)
    shapes = profile_shape.Shapes(samples=(1,), widths=(1,), dtypes=(Dtype.FP32,), tokens=8)
    heard: list[str] = []
    small = read_preset("gpt2-xl").config.architecture
    with pytest.raises(InputError, match="Cannot measure because no batch size fits into memory"):
        settings = ProfileSettings(name="gpt2-xl", kind="x", report=heard.append)
        profile_shape.profile_shape(small, shapes, settings)
    assert "block with 1 x 8 tokens, width 1, fp32: does not fit into memory, skipped" in heard


@pytest.mark.parametrize("samples", [(), (0, 2), (1, 5)])
def test_numbers_of_samples_that_a_batch_does_not_have_are_told(samples: tuple[int, ...]) -> None:
    says = rf"samples: found \"{re.escape(str(list(samples)))}\", expected numbers of samples from 1 to 4"
    with pytest.raises(InputError, match=says):
        _check_samples(samples, {"x": torch.zeros(4, 2), "y": torch.zeros(6)})


def test_a_folder_that_is_not_there_cannot_be_held(tmp_path: Path) -> None:
    says = r'Cannot write into .*none because the system reports "No such file or directory"'
    with pytest.raises(InputError, match=says), held(tmp_path / "none", "n0"):
        pass


CAPTURED = {"x": torch.zeros(4, 7), "mask": None, "rate": 0.5}


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"x": torch.zeros(4, 6), "mask": None, "rate": 0.5},
            r"batch\['x'\]: found a tensor of shape \(4, 6\), expected \(4, 7\), the shape that was",
        ),
        (
            {"x": torch.zeros(4, 7), "mask": None, "rate": 0.25},
            r"batch\['rate'\]: found 0.25, expected 0.5, the value that was captured; give a value",
        ),
        (
            {"mask": None, "x": torch.zeros(4, 7), "rate": 0.5},
            r"batch: found \['mask'\], \['x'\], \['rate'\], expected \['x'\], \['mask'\], \['rate'\]",
        ),
    ],
)
def test_a_captured_program_gets_batches_like_the_captured_one(batch: Any, message: str) -> None:
    check_as_captured({**CAPTURED, "x": torch.ones(2, 7)}, CAPTURED)
    with pytest.raises(InputError, match=message):
        check_as_captured(batch, CAPTURED)
