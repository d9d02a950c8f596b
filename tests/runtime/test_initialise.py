"""Initial values replayed weight by weight are the bits of an ordinary build."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from runtime.small_models import MODELS, build
from torch import nn

from argosy.errors import InputError
from argosy.workload.capture import initial
from argosy.workload.capture.initial import Recording, build_fake

Make = Callable[[], nn.Module]


class Odd(nn.Module):
    """Everything that initialisation code does somewhere: views, in-place changes, new seeds,
    values that are read."""

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
        sizes = {
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
        }
        match name:
            case "gpt2":
                shape = {
                    "n_embd": 32,
                    "n_layer": 2,
                    "n_head": 2,
                    "vocab_size": 60,
                    "n_positions": 16,
                }
                tokens = {"bos_token_id": 1, "eos_token_id": 2}
                return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **tokens))  # type: ignore[no-any-return]
            case "llama":
                return transformers.LlamaForCausalLM(
                    transformers.LlamaConfig(vocab_size=60, **sizes)
                )  # type: ignore[no-any-return]
        config = transformers.ViTConfig(image_size=32, patch_size=8, **sizes)
        return transformers.ViTForImageClassification(config)  # type: ignore[no-any-return]

    return make


CASES = {"odd": Odd, **{name: small(name) for name in MODELS}}
CASES |= {f"hf-{name}": hugging_face(name) for name in ("gpt2", "llama", "vit")}


@pytest.mark.parametrize("make", CASES.values(), ids=list(CASES))
@pytest.mark.parametrize("small", [0, initial.SMALL])
def test_replayed_values_are_those_of_an_ordinary_build(
    make: Make, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(initial, "SMALL", small)
    torch.manual_seed(3)
    ordinary = make().state_dict()
    after = torch.get_rng_state()
    torch.manual_seed(3)
    with Recording() as recording:
        model = make()
    assert torch.equal(torch.get_rng_state(), after), "the generator goes on where it would have"
    assert small or any(parameter.is_meta for parameter in model.parameters())
    for name, tensor in reversed(model.state_dict().items()):
        (value,) = recording.materialise([tensor])
        assert torch.equal(value, ordinary[name]), name


def drawn() -> tuple[torch.Tensor, ...]:
    """What ``build`` does to batches: generators of its own, edits in place, numbers that are
    read."""
    own = torch.Generator().manual_seed(4)
    labels = torch.randint(0, 4, (6, 500))
    labels[0, 1:] = -100
    labels[:, ::2].masked_fill_(torch.rand(6, 250) < 0.2, 7)
    first, second = torch.randn(6, 500, generator=own), torch.randn(6, 500, generator=own)
    order = torch.randperm(6).tolist()
    part = torch.zeros(3)
    part.copy_(first[0, :3])
    table = torch.randn(100, 1000)
    table[0] = part.sum().item()
    table[table > 1] = 0
    count = len((table > 0).nonzero())
    source = torch.ones(70_000)
    target = torch.empty(70_000).copy_(source)
    source.zero_()
    return (
        labels,
        first[order],
        second,
        part,
        table,
        torch.tensor(count),
        target,
        source,
        torch.rand(3),
    )


@pytest.mark.parametrize("small", [0, 600, initial.SMALL])
def test_batches_drawn_edited_and_read_in_build_are_those_of_an_ordinary_build(
    small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(initial, "SMALL", small)
    torch.manual_seed(3)
    ordinary = drawn()
    torch.manual_seed(3)
    with Recording() as recording:
        recorded = drawn()
    for index, (value, wanted) in enumerate(
        zip(recording.materialise(recorded), ordinary, strict=True)
    ):
        assert torch.equal(value, wanted), index


def test_two_parameters_in_the_same_memory_are_refused() -> None:
    def build() -> tuple[nn.Module, Callable[..., torch.Tensor], torch.Tensor]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight.data = model[0].weight.data
        return model, lambda net, x: net(x).mean(), torch.ones(2, 4)

    with pytest.raises(
        InputError, match=r"0\.weight and 1\.weight, expected one; tie weights by assigning"
    ):
        build_fake(build)


def test_weights_that_never_got_values_are_refused() -> None:
    with Recording() as recording:
        tensor = torch.empty(4, 4, device="meta")
    with pytest.raises(InputError, match="never got values"):
        recording.materialise([tensor])


def test_a_model_that_the_program_makes_on_the_meta_device_draws_nothing() -> None:
    """As ``from_pretrained`` does, before it puts the weights that it has read in place."""

    def make() -> tuple[nn.Module, torch.Tensor]:
        with torch.device("meta"):
            model = nn.Linear(300, 400)
        state = {
            "weight": torch.full((400, 300), 0.5),
            "bias": torch.ones_like(model.bias, device="cpu"),
        }
        model.load_state_dict(state, assign=True)
        return model, torch.randn(4, 300)

    torch.manual_seed(3)
    wanted = make()
    torch.manual_seed(3)
    with Recording() as recording:
        model, batch = make()
    found = recording.materialise([model.weight, model.bias, batch])
    assert all(map(torch.equal, found, [wanted[0].weight, wanted[0].bias, wanted[1]]))
