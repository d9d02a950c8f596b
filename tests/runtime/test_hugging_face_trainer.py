"""An ordinary ``transformers.Trainer`` script trains by a plan with two changed lines, and as in
one process."""

from __future__ import annotations

import inspect
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runtime.run_cases import written_plan
from runtime.small_models import hf_bert
from runtime.training_cases import Case, plan_of
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

from argosy.dtype import Dtype
from argosy.errors import InputError
from argosy.integrations import hf
from argosy.integrations.divided import refuse_whole_calls
from argosy.integrations.processes import hidden_variables, visible

SCRIPT = Path(__file__).parent / "programs" / "hf_script.py"
CHANGES = {
    "from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed": (
        "from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed\n"
        "from argosy.integrations.hf import ArgosyTrainer as Trainer"
    ),
    "    data_collator=collate,": '    data_collator=collate, plan=FOLDER / "plan.json",',
}
"""By line; three lines in all."""


def run(command: list[str]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]


def history(folder: Path) -> list[dict[str, float]]:
    figures = ("step", "loss", "eval_loss", "eval_accuracy", "learning_rate", "grad_norm", "epoch")
    lines = json.loads((folder / "log.json").read_text())
    return [{name: line[name] for name in figures if name in line} for line in lines]


def changed_script(folder: Path) -> str:
    text = SCRIPT.read_text().replace(
        "Path(__file__).parent.parent", f"Path({str(SCRIPT.parent.parent)!r})"
    )
    for before, after in CHANGES.items():
        assert text.count(f"{before}\n") == 1
        text = text.replace(f"{before}\n", f"{after}\n")
    shutil.copy(SCRIPT.parent / "last_threads.py", folder)
    return text.replace("import json\n", "import json\nimport last_threads\n")


def test_a_script_trains_on_three_unequal_processes_as_on_one_and_is_resumed(
    tmp_path: Path,
) -> None:
    """Two stages, the first on devices with 3 and 1 of 4 samples; padding, accumulation and short
    batches."""
    alone, folder = tmp_path / "alone", tmp_path / "plan"
    folder.mkdir()
    (folder / "train.py").write_text(changed_script(folder))
    written_plan(folder, Case(shares=((3, 1), (4,)), num_micro_batches=2))
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "3",
    ]
    torchrun += [str(folder / "train.py"), str(folder)]
    run([sys.executable, str(SCRIPT), str(alone)])
    run(torchrun)
    wanted, found = history(alone), history(folder)
    assert len(wanted) == 9 and [line.keys() for line in found] == [line.keys() for line in wanted]
    for line, other in zip(found, wanted, strict=True):
        assert line == pytest.approx(other, rel=2e-5)
    one, other = (
        GPT2LMHeadModel.from_pretrained(place / "model").state_dict() for place in (alone, folder)
    )
    assert all(torch.allclose(one[name], other[name], rtol=1e-3, atol=1e-5) for name in one)
    assert not (folder / "model" / "argosy").exists()
    assert any("eval_accuracy" in line for line in found)
    logits, expected = (
        torch.tensor(json.loads((place / "predicted.json").read_text()))
        for place in (folder, alone)
    )
    assert logits.shape[0] == 11 and torch.allclose(logits, expected, atol=1e-4)
    for rank in range(3):
        assert "gloo" not in (folder / f"threads-{rank}.txt").read_text(), (
            "the end of a process would abort"
        )
    shutil.rmtree(folder / "checkpoint-6")
    (folder / "log.json").unlink()
    run([*torchrun, "resume"])
    for line, other_line in zip(history(folder), wanted, strict=True):
        assert line == pytest.approx(other_line, rel=2e-5)


def test_adapters_are_trained_as_in_one_process(tmp_path: Path) -> None:
    """The Trainer divides a sum by the labels that it counts, also for a model with adapters."""
    adapted = (
        "model=__import__('peft').get_peft_model(GPT2LMHeadModel(config), __import__('peft').LoraConfig("
        "r=2, target_modules=['c_attn'], fan_in_fan_out=True)),"
    )
    alone, folder = tmp_path / "alone", tmp_path / "plan"
    for place in (alone, folder):
        place.mkdir()
    text = changed_script(folder)
    plain = SCRIPT.read_text().replace(
        "Path(__file__).parent.parent", f"Path({str(SCRIPT.parent.parent)!r})"
    )
    for place, script in ((alone, plain), (folder, text)):
        assert script.count("model=GPT2LMHeadModel(config),") == 1
        (place / "train.py").write_text(script.replace("model=GPT2LMHeadModel(config),", adapted))
    written_plan(folder, Case(shares=((4,), (4,)), num_micro_batches=2))
    run([sys.executable, str(alone / "train.py"), str(alone)])
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    run([*torchrun, str(folder / "train.py"), str(folder)])
    for line, other in zip(history(folder), history(alone), strict=True):
        assert line == pytest.approx(other, rel=2e-5)
    one, other = (
        load_file(place / "model" / "adapter_model.safetensors") for place in (alone, folder)
    )
    assert one and all(torch.allclose(one[name], other[name], rtol=1e-3, atol=1e-5) for name in one)


def test_short_batches_of_an_encoder_and_decoder_weigh_as_in_one_process(tmp_path: Path) -> None:
    """``Seq2SeqTrainer`` weighs a last short batch of an evaluation like a whole one."""
    alone, folder = tmp_path / "alone", tmp_path / "plan"
    for place in (alone, folder):
        place.mkdir()
    script = SCRIPT.parent / "hf_seq2seq.py"
    changes = {
        "import torch\n": (
            "import torch\nfrom argosy.integrations.hf import ArgosyTrainer as Seq2SeqTrainer\n"
        ),
        "    Seq2SeqTrainer,\n": "",
        "    data_collator=collate,\n": '    data_collator=collate, plan=FOLDER / "plan.json",\n',
    }
    text = script.read_text()
    for before, after in changes.items():
        assert text.count(before) == 1
        text = text.replace(before, after)
    (folder / "train.py").write_text(text)
    written_plan(folder, Case(shares=((2,), (2,)), num_micro_batches=4))
    run([sys.executable, str(script), str(alone)])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run([*torchrun, "--nproc-per-node", "2", str(folder / "train.py"), str(folder)])
    wanted, found = history(alone), history(folder)
    assert sum("eval_loss" in line for line in wanted) == 3
    assert [line.keys() for line in found] == [line.keys() for line in wanted]
    for line, other in zip(found, wanted, strict=True):
        assert line == pytest.approx(other, rel=2e-5)
    kept = [sorted(path.name for path in place.glob("checkpoint-*")) for place in (alone, folder)]
    assert kept[0] == kept[1] and kept[0]


def test_losses_that_ignore_the_number_of_items_are_means(tmp_path: Path) -> None:
    """Labels of several classes, numbers, class weights, a mean over samples; adapters with smoothed
    labels, whose words workers change at random."""
    alone, folder = tmp_path / "alone", tmp_path / "plan"
    for place in (alone, folder):
        place.mkdir()
    script = SCRIPT.parent / "hf_losses.py"
    text = script.read_text()
    changes = {
        "import torch\n": (
            "import torch\nfrom argosy.integrations.hf import ArgosyTrainer as Trainer\n"
        ),
        "    Trainer,\n": "",
        "args=args, **data": 'args=args, plan=FOLDER / "plan.json", **data',
    }
    for before, after in changes.items():
        assert text.count(before) == 1
        text = text.replace(before, after)
    (folder / "train.py").write_text(text)
    written_plan(folder, Case(shares=((3, 1), (4,)), num_micro_batches=2))
    run([sys.executable, str(script), str(alone)])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run([*torchrun, "--nproc-per-node", "3", str(folder / "train.py"), str(folder)])
    wanted, found = history(alone), history(folder)
    assert sum("loss" in line for line in wanted) == sum("loss" in line for line in found) == 20
    for line, other in zip(found, wanted, strict=True):
        assert line == pytest.approx(other, rel=5e-5, abs=1e-6)


def test_a_loss_that_ignores_the_number_of_items_is_not_accumulated() -> None:
    trainer: Any = hf.ArgosyTrainer.__new__(hf.ArgosyTrainer)
    trainer.args = SimpleNamespace(gradient_accumulation_steps=2)
    trainer.label_smoother, trainer.label_names = None, ["labels"]
    trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch=None: outputs.mean()
    batch = {"x": torch.ones(4), "labels": torch.ones(4), "num_items_in_batch": 4}
    message = "gradient_accumulation_steps: found 2, expected 1, because the loss ignores num_items"
    with pytest.raises(InputError, match=message):
        trainer._loss_of(lambda x: x, batch)
    trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch=None: (
        outputs.sum() / num_items_in_batch
    )
    loss, weight = trainer._loss_of(lambda x: x, batch)
    assert loss == 1 and weight is None


@pytest.mark.parametrize("name", ["forward", "generate", "save_pretrained", "state_dict"])
def test_a_divided_model_is_not_used_as_a_whole(name: str, tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    values = model.state_dict()
    names = set(values)
    signature = inspect.signature(model.forward)
    refuse_whole_calls(model)
    message = f"Cannot call model.{name} because its weights are divided among processes. Try train"
    with pytest.raises(InputError, match=message):
        getattr(model, name)(tmp_path)
    assert inspect.signature(model.forward) == signature
    model.save_pretrained(tmp_path, state_dict=values)
    assert GPT2LMHeadModel.from_pretrained(tmp_path).state_dict().keys() == names


def test_a_checkpoint_of_one_process_is_not_resumed(tmp_path: Path) -> None:
    trainer: Any = hf.ArgosyTrainer.__new__(hf.ArgosyTrainer)
    trainer.engine = object()
    with pytest.raises(InputError, match="because it has weights alone, and the model is divided"):
        trainer._load_from_checkpoint(str(tmp_path))
    trainer.engine = None
    (tmp_path / "optimizer.pt").touch()
    with pytest.raises(InputError, match="by a plan because its optimizer state is that of one"):
        trainer._load_from_checkpoint(str(tmp_path))


def test_an_optimizer_with_other_weights_in_evaluations_is_refused() -> None:
    class ScheduleFree(torch.optim.SGD):
        def eval(self) -> None: ...

    trainer: Any = hf.ArgosyTrainer.__new__(hf.ArgosyTrainer)
    trainer.optimizer, trainer.optimizer_cls_and_kwargs = None, (ScheduleFree, {"lr": 0.1})
    trainer._compare_values, trainer.args = lambda: None, SimpleNamespace(optim="adamw_torch")
    message = 'optim: found "ScheduleFree", expected an optimizer whose weights are the same in'
    with pytest.raises(InputError, match=message):
        trainer.create_optimizer()


def refusals(kind: type[hf.ArgosyTrainer] = hf.ArgosyTrainer, **changed: Any) -> str:
    """What a trainer with these settings is refused for."""
    usual = {"train_batch_size": 8, "bf16": False, "fp16": False, "gradient_accumulation_steps": 1}
    trainer: Any = kind.__new__(kind)
    trainer.args = SimpleNamespace(
        **{**usual, **{key: changed[key] for key in changed if key not in vars(FREE)}}
    )
    trainer.plan = SimpleNamespace(
        global_batch=8, model=SimpleNamespace(dtype=Dtype.FP32), stages=(), cut=None
    )
    for key, value in vars(FREE).items():
        setattr(trainer, key, changed.get(key, value))
    with pytest.raises(InputError) as error:
        trainer._check({})
    return str(error.value)


FREE = SimpleNamespace(
    optimizer=None,
    lr_scheduler=None,
    compute_metrics=None,
    model_accepts_loss_kwargs=True,
    compute_loss_func=None,
    label_smoother=None,
    model=torch.nn.Sequential(),
)


WITH_HIDDEN_STATES: Any = hf_bert(1)[0]
WITH_HIDDEN_STATES.config.output_hidden_states = True


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"train_batch_size": 4},
            "per_device_train_batch_size: found 4, expected 8, the plan's global batch",
        ),
        ({"bf16": True}, "bf16, fp16: found bf16, expected fp32, in which the plan computes"),
        (
            {"optimizer": 1},
            "optimizers: found an object, expected optimizer_cls_and_kwargs, from which every rank",
        ),
        (
            {"compute_metrics": print, "model": torch.nn.Linear(1, 1)},
            "compute_metrics: found a function, expected none for a model that is captured: its program computes the",
        ),
        (
            {"gradient_accumulation_steps": 2, "model_accepts_loss_kwargs": False},
            "gradient_accumulation_steps: found 2, expected 1 for a model that is captured or whose loss ignores",
        ),
        (
            {"gradient_accumulation_steps": 2, "model": hf_bert(1)[0]},
            "num_items_in_batch; a larger global batch accumulates as much",
        ),
        (
            {"load_best_model_at_end": True, "save_only_model": True},
            "save_only_model: found true with load_best_model_at_end, expected false, because the",
        ),
        ({"torch_compile": True}, "torch_compile: found true, expected no such setting with a"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha: found 5.0, expected no such setting"),
        ({"predict_with_generate": True}, "predict_with_generate: found true, expected no such"),
        (
            {"model": WITH_HIDDEN_STATES},
            "model.config.output_hidden_states: found true, expected false; a plan gathers logits",
        ),
    ],
)
def test_what_one_process_would_do_otherwise_is_refused(
    changed: dict[str, Any], message: str
) -> None:
    assert message in refusals(**changed)


@pytest.mark.parametrize(
    ("name", "instead"),
    [("compute_loss", "compute_loss_func"), ("create_optimizer", "optimizer_cls_and_kwargs")],
)
def test_a_method_that_no_rank_would_call_is_refused(name: str, instead: str) -> None:
    weighted = type("Weighted", (hf.ArgosyTrainer,), {name: lambda trainer, *_: None})
    message = refusals(weighted)
    assert f"{name}: found a method of Weighted, expected {instead}" in message


@pytest.mark.parametrize(("name", "value"), [("fsdp", "full_shard"), ("deepspeed", "zero3.json")])
def test_another_library_that_divides_the_model_is_refused(name: str, value: str) -> None:
    args: Any = SimpleNamespace(world_size=1, **{name: value})
    plan = plan_of(Case(shares=((4,), (4,)), num_micro_batches=2))
    with pytest.raises(
        InputError, match=f"{name} cannot be combined with a plan, which divides the model"
    ):
        hf.ArgosyTrainer(None, args, plan=plan)


def test_a_library_sees_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    hidden = hidden_variables()
    assert hidden["RANK"] == "2" and "RANK" not in os.environ and "WORLD_SIZE" not in os.environ
    with visible(hidden):
        assert os.environ["WORLD_SIZE"] == "3"
    assert "WORLD_SIZE" not in os.environ


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate.state", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"hf needs accelerate.*; pip install 'argosy\[hf\]' installs it"
    ):
        runpy.run_path(str(hf.__file__))


def test_models_that_ranks_build_without_a_seed_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[dict[str, str]] = []
    monkeypatch.setattr(hf, "check_agreed", lambda facts, *_: compared.append(facts))
    monkeypatch.setattr(hf, "device_of", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(hf.dist, "get_rank", lambda: 0)
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        trainer: Any = hf.ArgosyTrainer.__new__(hf.ArgosyTrainer)
        trainer.model, trainer.roster = torch.nn.Linear(300, 3).bfloat16(), ("a0.0",)
        trainer._compare_values()
    assert compared[0] == compared[1] != compared[2]
    assert all("set_seed" in name for facts in compared for name in facts)
