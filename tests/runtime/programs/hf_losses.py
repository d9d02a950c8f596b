"""An ordinary ``transformers.Trainer`` script that trains several models, each with a loss of
another kind.

python hf_losses.py FOLDER
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    set_seed,
)

FOLDER = Path(sys.argv[1])
GENERATOR = torch.Generator().manual_seed(0)
SIZES = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 24, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}


def pictures(several):
    """Pictures with three labels each, or with a number."""
    for _ in range(30):
        labels = torch.rand(3, generator=GENERATOR).round() if several else torch.rand(())
        yield {"pixel_values": torch.randn(1, 8, 8, generator=GENERATOR), "labels": labels}


def vit(**settings):
    return ViTForImageClassification(
        ViTConfig(image_size=8, patch_size=4, num_channels=1, **SIZES, **settings)
    )


def bert():
    return BertForSequenceClassification(BertConfig(vocab_size=40, num_labels=3, **SIZES))


def adapted_gpt2():
    sizes = {"vocab_size": 40, "n_positions": 16, "n_embd": 16, "n_layer": 4, "n_head": 2}
    drops = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    lora = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    return get_peft_model(GPT2LMHeadModel(GPT2Config(**sizes, **drops)), lora)


def sentences():
    for _ in range(30):
        length = int(torch.randint(4, 12, (1,), generator=GENERATOR))
        words = torch.randint(3, 40, (length,), generator=GENERATOR).tolist()
        yield {"input_ids": words, "label": words[0] % 3}


def padded(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    fills = [[0] * (longest - len(row["input_ids"])) for row in rows]
    pairs = list(zip(rows, fills, strict=True))
    return {
        "input_ids": torch.tensor([row["input_ids"] + fill for row, fill in pairs]),
        "attention_mask": torch.tensor([[1] * len(row["input_ids"]) + fill for row, fill in pairs]),
        "labels": torch.tensor([row["label"] for row in rows]),
    }


def copied(rows):
    """Sentences to be continued, each with a word that a worker changes at random."""
    batch = padded(rows)
    for words in batch["input_ids"]:
        words[random.randrange(4)] = random.randrange(3, 40)
    return {**batch, "labels": batch["input_ids"].where(batch["attention_mask"] == 1, -100)}


def by_class(outputs, labels, num_items_in_batch=None):
    weights = torch.tensor([1.0, 2.0, 5.0])
    return torch.nn.functional.cross_entropy(outputs.logits, labels, weight=weights)


def distance(outputs, labels, num_items_in_batch=None):
    return (outputs.logits.softmax(-1)[:, 0] - labels.float()).abs().mean()


class FirstWordsMasked(Trainer):
    """A trainer that changes batches in the place that the library has for it."""

    def _prepare_inputs(self, inputs):
        labels = inputs["labels"].clone()
        labels[:, :2] = -100
        return super()._prepare_inputs({**inputs, "labels": labels})


def train(model, rows, kind=Trainer, settings=None, **options):
    args = TrainingArguments(
        output_dir=str(FOLDER),
        per_device_train_batch_size=8,
        per_device_eval_batch_size=5,
        max_steps=4,
        learning_rate=1e-2,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **(settings or {}),
    )
    rows = list(rows)
    data = {"train_dataset": rows[:22], "eval_dataset": rows[22:]}
    trainer = kind(model=model, args=args, **data, **options)
    trainer.train()
    return trainer.state.log_history


set_seed(0)
words = list(sentences())
SMOOTHED = {"label_smoothing_factor": 0.1, "dataloader_num_workers": 2}
logs = [
    train(vit(num_labels=3, problem_type="multi_label_classification"), pictures(True)),
    train(vit(num_labels=1), pictures(False)),
    train(bert(), words, data_collator=padded, compute_loss_func=by_class),
    train(bert(), words, data_collator=padded, compute_loss_func=distance),
    train(adapted_gpt2(), words, FirstWordsMasked, SMOOTHED, data_collator=copied),
]
(FOLDER / "log.json").write_text(json.dumps([line for log in logs for line in log]))
