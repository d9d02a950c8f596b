"""The layers of Hugging Face models compute what the model computes, or refuse to."""

from __future__ import annotations

import pytest
import torch
from runtime.small_models import hf_bert, hf_llama

from argosy.errors import InputError
from argosy.runtime.stages.layers import find_layers


@pytest.mark.parametrize("is_decoder", [False, True])
def test_the_layers_of_a_padded_bert_attend_as_the_model(is_decoder: bool) -> None:
    built, _, batch = hf_bert(3)
    built.config.is_decoder = is_decoder
    model = type(built)(built.config).eval()
    padding = torch.ones_like(batch["input_ids"])
    padding[0, 2:] = 0
    first, *blocks, head = find_layers(model)
    hidden = first(**batch, attention_mask=padding)
    for block in blocks:
        hidden = block(hidden)
    expected = model(**batch, attention_mask=padding).logits
    torch.testing.assert_close(head.finish(hidden, **batch).logits, expected)


@pytest.mark.parametrize("is_padded", [False, True])
def test_sequences_beyond_a_sliding_window_are_refused(is_padded: bool) -> None:
    model, _, batch = hf_llama(2)
    length = batch["input_ids"].shape[1]
    padding = torch.ones_like(batch["input_ids"]) if is_padded else None
    model.config.sliding_window = length - 1
    first, block, *_ = find_layers(model)
    hidden = first(**batch, attention_mask=padding)
    expected = f"model: found sequences of {length} tokens, expected at most its sliding window"
    with pytest.raises(InputError, match=expected):
        block(hidden)
    model.config.sliding_window = length
    block(hidden)
