"""What an ordinary training loop does gives the losses of one process: masks, short batches,
schedulers, evaluation."""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from runtime import loop_cases as cases
from runtime.rank_pool import RankError, RankPool
from torch.utils.data import DataLoader

from argosy.errors import InputError, RunError
from argosy.runtime.sources.optimizing import make_updating
from argosy.runtime.stages.layers import find_layers, has_layers
from argosy.runtime.stages.weighing import PartLoss, Tally, weight_of
from argosy.runtime.step.loading import BatchStream
from argosy.runtime.step.writers import CsvWriter, StepMetrics, TensorBoardWriter, WandbWriter
from argosy.schedule import ScheduleKind

STEPS = [[cases.batch_of(8, seed=step)] for step in range(3)]


def same(
    ranks: RankPool, loss: str, steps: list[Any], case: Any = cases.CASE, **options: Any
) -> None:
    wanted = cases.alone(
        loss, steps, **{key: options[key] for key in options if key in ("scheduler", "optimizer")}
    )
    for losses in ranks(3, cases.by_plan, loss, steps, case, options):
        assert losses == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("loss", ["masked", "halved", "by_class", "paired", "shared"])
def test_a_mean_over_targets_is_one_over_those_of_the_whole_batch(
    ranks: RankPool, loss: str
) -> None:
    same(ranks, loss, STEPS, cases.LAST_DIVIDED)


@pytest.mark.parametrize("zero", [2, 3])
def test_a_part_without_targets_leaves_no_trace_in_sharded_weights(
    ranks: RankPool, zero: int
) -> None:
    same(ranks, "paired", STEPS, replace(cases.LAST_DIVIDED, zero=zero))


@pytest.mark.parametrize("zero", [0, 3])
def test_a_loss_inside_the_last_layer_is_over_the_targets_of_the_whole_batch(
    ranks: RankPool, zero: int
) -> None:
    """Under ZeRO 3 a layer returns views of its results."""
    for losses in ranks(3, cases.scored_by_plan, replace(cases.LAST_DIVIDED, zero=zero), 3):
        assert losses == pytest.approx(cases.scored_alone(3), rel=1e-9)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            "unpaired",
            "divided by a number that depends on the part, expected a mean over samples; return",
        ),
        ("selected", "is a mean over numbers of targets that differ between parts of the batch"),
        ("summed", "is a mean over numbers of targets that differ between parts of the batch"),
    ],
)
def test_a_mean_that_cannot_be_put_together_from_parts_is_refused(
    ranks: RankPool, loss: str, message: str
) -> None:
    with pytest.raises(RankError, match=message):
        ranks(3, cases.by_plan, loss, STEPS, cases.LAST_DIVIDED)


def test_a_batch_without_any_target_is_an_error() -> None:
    tally = Tally()
    tally.begin_batch()
    tally.weighted(PartLoss(torch.zeros(()), torch.tensor(0.0)), 4)
    with pytest.raises(RunError, match="no target of step 7 counts"):
        weight_of(tally.sums(torch.zeros(())).tolist(), 7, 8)


def test_batches_are_accumulated_and_lengths_may_differ(ranks: RankPool) -> None:
    batches = [
        cases.batch_of(8, 5, seed=1),
        cases.batch_of(8, 7, seed=2),
        cases.batch_of(6, 3, seed=3),
    ]
    same(ranks, "masked", [batches, [cases.batch_of(8, 3)], [cases.batch_of(8, 7)], batches])


@pytest.mark.parametrize(
    "case", [cases.CASE, replace(cases.LAST_DIVIDED, kind=ScheduleKind.ZERO_BUBBLE)], ids=str
)
def test_a_short_batch_counts_its_own_samples(ranks: RankPool, case: Any) -> None:
    same(
        ranks,
        "masked",
        [[cases.batch_of(8)], [cases.batch_of(7)], [cases.batch_of(2)], [cases.batch_of(8)]],
        case,
    )


@pytest.mark.parametrize("case", [cases.CASE, cases.LAST_DIVIDED], ids=str)
def test_an_evaluation_has_no_dropout_and_changes_nothing(ranks: RankPool, case: Any) -> None:
    model = cases.model_of(drops=True).eval()
    wanted = [
        cases.masked(model, batch).item() for batch in (cases.batch_of(5, 3), cases.batch_of(8))
    ]
    outcomes = ranks(3, cases.evaluated, case)
    for found, losses in outcomes:
        assert found[:2] == pytest.approx(wanted, rel=1e-9)
        assert found[2] < found[1], "it was trained"
        assert losses[0] != pytest.approx(found[1], rel=1e-3), "dropout is back"


@pytest.mark.parametrize("scheduler", [cases.warm_up, cases.sequence, cases.one_cycle])
def test_schedulers_step_with_the_trainer(ranks: RankPool, scheduler: Any) -> None:
    same(ranks, "masked", STEPS, scheduler=scheduler)


def test_an_optimizer_may_come_with_its_scheduler_and_may_ask_for_names(ranks: RankPool) -> None:
    wanted = cases.alone("masked", STEPS, scheduler=cases.warm_up)
    for losses in ranks(
        3, cases.by_plan, "masked", STEPS, cases.CASE, {"optimizer": cases.with_pair}
    ):
        assert losses == pytest.approx(wanted, rel=1e-9)
    same(ranks, "masked", STEPS, optimizer=cases.grouped)


def test_a_scheduler_survives_moves_and_checkpoints(ranks: RankPool, tmp_path: Path) -> None:
    steps = [[cases.batch_of(8, seed=step)] for step in range(6)]
    wanted = cases.alone("masked", steps, scheduler=cases.sequence)
    for losses, resumed, rows in ranks(3, cases.moved_and_saved, tmp_path):
        assert [*losses, *resumed] == pytest.approx(wanted, rel=1e-9)
        assert [row.learning_rates[0] for row in rows] == pytest.approx(
            [0.2 / 3, 0.4 / 3, 0.2, 0.1]
        )
        assert [row.loss for row in rows] == losses and {row.samples for row in rows} == {8}


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "message"),
    [
        (
            lambda p: None,
            None,
            'optimizer.parameters.: found "NoneType", expected a torch.optim.Optimizer, or a pair',
        ),
        (
            cases.with_pair,
            cases.warm_up,
            "found a scheduler from optimizer.* expected one scheduler",
        ),
        (
            cases.sgd,
            torch.optim.lr_scheduler.ReduceLROnPlateau,
            "whose rates follow from the number of steps",
        ),
    ],
)
def test_what_is_no_optimizer_or_scheduler_is_refused(
    optimizer: Any, scheduler: Any, message: str
) -> None:
    named = [("w", torch.nn.Parameter(torch.zeros(2)))]
    with pytest.raises(InputError, match=message):
        make_updating(optimizer, scheduler, named, 0)


def test_an_optimizer_that_reads_whole_weights_gets_no_parts(ranks: RankPool) -> None:
    """It would train otherwise than in one process, without a word."""
    same(ranks, "masked", STEPS, optimizer=cases.adafactor)
    case = replace(cases.LAST_DIVIDED, zero=1)
    message = (
        "optimizer: found Adafactor, which reads whole weights, for a part of .*plan without ZeRO"
    )
    with pytest.raises(RankError, match=message):
        ranks(3, cases.by_plan, "masked", STEPS, case, {"optimizer": cases.adafactor})


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(list(range(10)), batch_size=4, shuffle=True, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{}, {"generator": True}], ids=["plain", "generator"])
def test_batches_of_a_loader_are_a_function_of_the_step(options: dict[str, Any]) -> None:
    def stream() -> BatchStream:
        own = {"generator": torch.Generator().manual_seed(5)} if options else {}
        return BatchStream(loader(**own), seed=1)

    before = torch.random.get_rng_state()
    one = stream()
    first = [one(step).tolist() for step in range(9)]
    assert torch.equal(before, torch.random.get_rng_state())
    assert [len(batch) for batch in first] == [4, 4, 2] * 3
    epochs = [[*first[at], *first[at + 1], *first[at + 2]] for at in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3, "every epoch has an order of its own"
    torch.rand(7)
    other = stream()
    assert [other(step).tolist() for step in (4, 5, 1, 7)] == [first[step] for step in (4, 5, 1, 7)]


def test_an_iterable_without_a_length_is_read_to_the_step_and_an_empty_one_refused() -> None:
    class Endless:
        def __iter__(self) -> Any:
            return iter([{"x": 1}, {"x": 2}, {"x": 3}])

    assert [BatchStream(Endless())(step) for step in (4, 2)] == [{"x": 2}, {"x": 3}]
    with pytest.raises(InputError, match=r"data: .*expected an iterable with batches"):
        BatchStream([])(0)


def test_figures_go_to_other_writers_from_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    board = SimpleNamespace(add_scalar=lambda *row: told.append(row), flush=lambda: None)
    monkeypatch.setitem(
        sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=lambda folder: board)
    )
    logged = SimpleNamespace(log=lambda figures, step: told.append((step, figures["loss"])))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda project: logged))
    for writer in (TensorBoardWriter("runs"), WandbWriter(project="p")):
        for rank in (0, 1):
            writer(StepMetrics(rank, 3, 2.5, 0.5, 8, 1.5, (0.1,)))
    names = {
        "loss": 2.5,
        "seconds": 0.5,
        "samples_per_second": 16.0,
        "gradient_norm": 1.5,
        "learning_rate": 0.1,
    }
    assert told == [*((name, value, 3) for name, value in names.items()), (3, 2.5)]
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(RunError, match="WandbWriter needs wandb; pip install wandb"):
        WandbWriter()(StepMetrics(0, 0, 2.5, 0.5, 8, None, ()))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt2 with adapters"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padding_mask_passes_through_layers_as_through_the_model(family: str, side: str) -> None:
    import transformers as tf

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 13,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "bos_token_id": 0,
    }
    if family.startswith("gpt2"):
        model: Any = tf.GPT2LMHeadModel(
            tf.GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=13, n_positions=8)
        )
    else:
        model = tf.LlamaForCausalLM(
            tf.LlamaConfig(**sizes, intermediate_size=16, num_key_value_heads=1)
        )
    if family.endswith("adapters"):
        adapters = {
            "target_modules": ["c_attn"],
            "fan_in_fan_out": True,
            "init_lora_weights": False,
        }
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, **adapters))
    model.eval()
    tokens, kept = torch.randint(13, (3, 8)), torch.tensor([8, 5, 3])[:, None] > torch.arange(8)
    mask = (kept if side == "right" else kept.flip(1)).long()
    batch = {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": tokens.masked_fill(mask == 0, -100),
    }
    first, *blocks, head = find_layers(model)
    carry = first(**batch)
    for block in blocks:
        carry = block(carry)
    assert head.finish(carry, **batch).loss.item() == pytest.approx(
        model(**batch).loss.item(), rel=1e-6
    )  # type: ignore[operator]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
def test_adapters_that_change_the_input_need_the_wrapper() -> None:
    import transformers as tf

    inner = tf.GPT2LMHeadModel(
        tf.GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=13, n_positions=8)
    )
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    assert has_layers(inner) and not has_layers(peft.get_peft_model(inner, config))


def test_rows_of_metrics_are_written_by_rank_0_and_added_later(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    for rank in (0, 1):
        CsvWriter(path)(StepMetrics(rank, 0, 2.5, 0.5, 8, None, (0.1,)))
    CsvWriter(path)(StepMetrics(0, 1, 2.25, 0.5, 8, 3.0, (0.2,)))
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["loss"], row["learning_rate"]) for row in rows] == [
        ("0", "2.5", "0.1"),
        ("1", "2.25", "0.2"),
    ]
    assert rows[0]["samples_per_second"] == "16.0"
