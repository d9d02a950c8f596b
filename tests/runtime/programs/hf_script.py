"""An ordinary ``transformers.Trainer`` script: GPT-2 tiny, text of several lengths, a cosine
schedule, evaluation.

python hf_script.py FOLDER [resume]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

TEXT = (Path(__file__).parent.parent / "data" / "gettysburg.txt").read_text()
LETTERS = sorted(set(TEXT))
FOLDER = Path(sys.argv[1])


def sentences():
    """Pieces of 5 to 16 letters."""
    generator, rows, at = torch.Generator().manual_seed(0), [], 0
    while len(rows) < 60:
        length = int(torch.randint(5, 17, (1,), generator=generator))
        rows.append({"input_ids": [LETTERS.index(letter) for letter in TEXT[at : at + length]]})
        at += length
    return rows


def collate(rows):
    """Filled up to the longest, with masks."""
    longest = max(len(row["input_ids"]) for row in rows)
    fills = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    batch = {key: [] for key in fills}
    for row in rows:
        letters = row["input_ids"]
        values = {"input_ids": letters, "attention_mask": [1] * len(letters), "labels": letters}
        for key, fill in fills.items():
            batch[key].append(values[key] + [fill] * (longest - len(letters)))
    return {key: torch.tensor(value) for key, value in batch.items()}


def accuracy(predicted):
    """Of the letters that follow, without those that are filled up."""
    logits, labels = predicted
    wanted = labels[:, 1:]
    return {"accuracy": float((logits.argmax(-1)[:, :-1] == wanted)[wanted != -100].mean())}


set_seed(0)
config = GPT2Config(
    vocab_size=len(LETTERS),
    n_positions=16,
    n_embd=16,
    n_layer=4,
    n_head=2,
    resid_pdrop=0,
    embd_pdrop=0,
    attn_pdrop=0,
    bos_token_id=0,
    eos_token_id=0,
)
args = TrainingArguments(
    output_dir=str(FOLDER),
    per_device_train_batch_size=8,
    per_device_eval_batch_size=10,
    gradient_accumulation_steps=2,
    max_steps=6,
    learning_rate=1e-2,
    weight_decay=0.1,
    lr_scheduler_type="cosine",
    warmup_steps=2,
    eval_strategy="steps",
    eval_steps=3,
    save_steps=3,
    logging_steps=1,
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
)
rows = sentences()
trainer = Trainer(
    model=GPT2LMHeadModel(config),
    args=args,
    train_dataset=rows[:44],
    eval_dataset=rows[44:],
    data_collator=collate,
    compute_metrics=accuracy,
)
trainer.train(resume_from_checkpoint="resume" in sys.argv)
trainer.save_model(str(FOLDER / "model"))
trainer.data_collator = lambda rows: {
    key: value for key, value in collate(rows).items() if key != "labels"
}
unlabelled = trainer.predict(rows[:11])
assert "test_loss" not in unlabelled.metrics
if trainer.is_world_process_zero():
    (FOLDER / "log.json").write_text(json.dumps(trainer.state.log_history))
    (FOLDER / "predicted.json").write_text(json.dumps(unlabelled.predictions.tolist()))
