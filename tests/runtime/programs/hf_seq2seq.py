"""An ordinary ``Seq2SeqTrainer`` script: T5 tiny, trained on a stream, with short last batches in
training and in evaluations.

python hf_seq2seq.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

FOLDER = Path(sys.argv[1])


def pairs(count):
    """Random sources of 5 to 12 words and targets of 3 to 9 words."""
    generator, rows = torch.Generator().manual_seed(0), []
    for _ in range(count):
        lengths = [int(torch.randint(*range_, (1,), generator=generator)) for range_ in RANGES]
        source, target = (
            torch.randint(2, 32, (length,), generator=generator).tolist() for length in lengths
        )
        rows.append({"input_ids": source, "labels": target})
    return rows


RANGES = (5, 13), (3, 10)


def collate(rows):
    """Fill up sources and targets to the longest, with masks."""
    batch = {}
    for key, fill in {"input_ids": 0, "labels": -100}.items():
        longest = max(len(row[key]) for row in rows)
        batch[key] = torch.tensor([row[key] + [fill] * (longest - len(row[key])) for row in rows])
    return {**batch, "attention_mask": (batch["input_ids"] != 0).long()}


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


set_seed(0)
config = T5Config(
    vocab_size=32,
    d_model=16,
    d_kv=8,
    d_ff=24,
    num_layers=1,
    num_decoder_layers=2,
    num_heads=2,
    dropout_rate=0.0,
    decoder_start_token_id=0,
)
args = Seq2SeqTrainingArguments(
    output_dir=str(FOLDER),
    per_device_train_batch_size=8,
    per_device_eval_batch_size=5,
    max_steps=6,
    learning_rate=1e-2,
    eval_strategy="steps",
    eval_steps=3,
    save_steps=3,
    load_best_model_at_end=True,
    save_total_limit=1,
    logging_steps=1,
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
)
rows = pairs(30)
trainer = Seq2SeqTrainer(
    model=T5ForConditionalGeneration(config),
    args=args,
    train_dataset=Stream(rows[:19]),
    eval_dataset=rows[19:],
    data_collator=collate,
)
trainer.train()
trainer.evaluate()
if trainer.is_world_process_zero():
    (FOLDER / "log.json").write_text(json.dumps(trainer.state.log_history))
