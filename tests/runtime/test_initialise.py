"""Initial values replayed weight by weight are the bits of an ordinary build."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from small_models import MODELS, build
from torch import nn

from argosy.runtime.initialise import Recording

Make = Callable[[], nn.Module]


class Odd(nn.Module):
    """Everything that initialisation code does somewhere: views, in-place changes, new seeds, values that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Parameter(torch.randn(300, 400) * 0.02)
        self.linear = nn.Linear(300, 300)
        nn.init.orthogonal_(self.linear.weight)
        nn.init.trunc_normal_(self.linear.bias, std=0.02)
        self.embedding = nn.Embedding(500, 200, padding_idx=3)
        torch.manual_seed(9)
        self.convolution = nn.Conv2d(20, 300, 3)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]
        self.register_buffer("triangle", torch.tril(torch.ones(300, 300)))
        with torch.no_grad():
            self.linear.weight[:5].mul_(2)
            self.plain.data.copy_(torch.rand(300, 400))


def small(name: str) -> Make:
    return lambda: build(name, 4, tied=True, dtype=torch.float32)[0]


def hugging_face(name: str) -> Make:
    def make() -> nn.Module:
        transformers = pytest.importorskip("transformers")
        sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 64}
        match name:
            case "gpt2":
                shape = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 60, "n_positions": 16}
                tokens = {"bos_token_id": 1, "eos_token_id": 2}
                return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **tokens))  # type: ignore[no-any-return]
            case "llama":
                return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=60, **sizes))  # type: ignore[no-any-return]
        config = transformers.ViTConfig(image_size=32, patch_size=8, **sizes)
        return transformers.ViTForImageClassification(config)  # type: ignore[no-any-return]

    return make


CASES = {"odd": Odd, **{name: small(name) for name in MODELS}}
CASES |= {f"hf-{name}": hugging_face(name) for name in ("gpt2", "llama", "vit")}


@pytest.mark.parametrize("make", CASES.values(), ids=list(CASES))
def test_replayed_values_are_those_of_an_ordinary_build(make: Make) -> None:
    torch.manual_seed(3)
    ordinary = make().state_dict()
    after = torch.get_rng_state()
    torch.manual_seed(3)
    with Recording() as recording:
        model = make()
    assert torch.equal(torch.get_rng_state(), after), "the generator goes on where it would have"
    assert any(parameter.is_meta for parameter in model.parameters())
    for name, tensor in reversed(model.state_dict().items()):
        (value,) = recording.materialise([tensor])
        assert torch.equal(value, ordinary[name]), name
