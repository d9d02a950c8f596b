"""The layers of an encoder compute what the model computes."""

from __future__ import annotations

import pytest
import torch
from runtime.small_models import hf_bert

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
