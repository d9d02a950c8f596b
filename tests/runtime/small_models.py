"""Small models of four kinds, each with its loss and a batch: what the runtime is tested with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils._pytree import tree_map

Built = tuple[nn.Module, Callable[[Any, Any], Tensor], Any]
VOCABULARY, WIDTH, LENGTH = 19, 16, 6


class Attention(nn.Module):
    def __init__(self, width: int, heads: int = 2, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.queries = nn.Linear(width, width)
        self.keys_and_values = nn.Linear(width, 2 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor, source: Tensor | None = None) -> Tensor:
        source = x if source is None else source
        keys, values = self.keys_and_values(source).chunk(2, -1)
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in (self.queries(x), keys, values)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.output(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, *, causal: bool = False) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = Attention(width, causal=causal)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.feed_forward(self.norms[1](x))


class TokenEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.places


class Head(nn.Module):
    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.norm(x))


class Gpt(nn.Module):
    """Six layers; the head's weight may be the embedding's."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding = TokenEmbedding()
        self.blocks = nn.ModuleList([Block(causal=True) for _ in range(4)])
        self.head = Head(VOCABULARY)
        if tied:
            self.head.output.weight = self.embedding.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def argosy_layers(self) -> list[nn.Module]:
        return [self.embedding, *self.blocks, self.head]


def token_loss(model: Any, batch: Any) -> Tensor:
    scores = model(batch["tokens"])
    return F.cross_entropy(scores.flatten(0, 1), batch["targets"].flatten())


def gpt(samples: int, *, tied: bool = False) -> Built:
    tokens = torch.randint(VOCABULARY, (samples, LENGTH + 1))
    return Gpt(tied=tied), token_loss, {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


class Adapted(nn.Module):
    """A frozen linear layer with a trained one of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def lora(samples: int, *, tied: bool = False, adapted: int = 4) -> Built:
    """A frozen GPT with adapters on queries and on the way down, in as many of its last blocks."""
    model, loss_fn, batch = gpt(samples, tied=tied)
    model.requires_grad_(False)
    for block in model.blocks[4 - adapted :]:  # type: ignore[index, union-attr]
        block.attention.queries = Adapted(block.attention.queries)
        block.feed_forward[2] = Adapted(block.feed_forward[2])
    return model, loss_fn, batch


class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, 4)
        self.first = nn.Parameter(torch.randn(1, 1, WIDTH) * 0.1)

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.patch(pixels).flatten(2).transpose(1, 2)
        return torch.cat([self.first.expand(len(pixels), -1, -1), patches], dim=1)


class Classifier(Head):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, 0])


def class_loss(model: Any, batch: Any) -> Tensor:
    pixels, classes = batch
    return F.cross_entropy(model(pixels), classes)


def vit(samples: int, *, tied: bool = False) -> Built:
    """Six layers, as an ``nn.Sequential``."""
    del tied
    model = nn.Sequential(Patches(), *(Block() for _ in range(4)), Classifier(5))
    return model, class_loss, (torch.randn(samples, 3, 8, 8), torch.randint(5, (samples,)))


class ConvolutionBlock(nn.Module):
    """Hands on its result and, for a later block, what it got itself."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, channels)
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)

    def forward(self, carry: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, skip = carry
        return x + self.second(F.relu(self.first(self.norm(x)))) + 0.1 * skip, x


class Stem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1, stride=2)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.convolution(pixels)
        return x, torch.zeros_like(x)


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(8, 5)

    def forward(self, carry: tuple[Tensor, Tensor]) -> Tensor:
        return self.output((carry[0] + carry[1]).mean((2, 3)))


def cnn(samples: int, *, tied: bool = False) -> Built:
    """Six layers; each block also takes what went into the one before."""
    del tied
    model = nn.Sequential(Stem(), *(ConvolutionBlock(8) for _ in range(4)), Pooled())
    return model, class_loss, (torch.randn(samples, 3, 8, 8), torch.randint(5, (samples,)))


class EncoderEmbedding(TokenEmbedding):
    def forward(self, source: Tensor, target: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"x": super().forward(source), "target": target}


class EncoderBlock(Block):
    def forward(self, carry: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        return {"x": super().forward(carry["x"]), "target": carry["target"]}


class DecoderEmbedding(TokenEmbedding):
    def forward(self, carry: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        return {"x": super().forward(carry["target"]), "memory": carry["x"]}


class DecoderBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(causal=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.cross = Attention(WIDTH)

    def forward(self, carry: dict[str, Tensor]) -> dict[str, Tensor]:
        x = self.block(carry["x"])
        return {"x": x + self.cross(self.norm(x), carry["memory"]), "memory": carry["memory"]}


class DecoderHead(Head):
    def forward(self, carry: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(carry["x"])


class T5(nn.Module):
    """Seven layers; the encoder's output passes through every decoder block; the two embeddings may
    share weights."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([EncoderEmbedding(), EncoderBlock(), EncoderBlock()])
        self.decoder = nn.ModuleList(
            [DecoderEmbedding(), DecoderBlock(), DecoderBlock(), DecoderHead(VOCABULARY)]
        )
        if tied:
            self.decoder[0].tokens.weight = self.encoder[0].tokens.weight
            self.decoder[-1].output.weight = self.encoder[0].tokens.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        first, *others = self.argosy_layers()
        carry = first(source, target)
        for layer in others:
            carry = layer(carry)
        return carry

    def argosy_layers(self) -> list[nn.Module]:
        return [*self.encoder, *self.decoder]


def translation_loss(model: Any, batch: Any) -> Tensor:
    scores = model(batch["source"], target=batch["target"])
    return F.cross_entropy(scores.flatten(0, 1), batch["wanted"].flatten())


def t5(samples: int, *, tied: bool = False) -> Built:
    def tokens() -> Tensor:
        return torch.randint(VOCABULARY, (samples, LENGTH))

    return (
        T5(tied=tied),
        translation_loss,
        {"source": tokens(), "target": tokens(), "wanted": tokens()},
    )


class Routed(nn.Module):
    """Samples of some kinds go through the expert of theirs; an expert without samples does nothing
    at all."""

    def __init__(self, *kinds: int) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({str(kind): nn.Linear(WIDTH, WIDTH) for kind in kinds})

    def forward(self, carry: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, kinds = carry
        result = x.clone()
        for kind, expert in self.experts.items():
            own = kinds == int(kind)
            if own.any():
                result[own] = x[own] + torch.tanh(expert(x[own]))
        return result, kinds


class Kinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, WIDTH)

    def forward(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.first(batch[0]), batch[1]


class Guess(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(WIDTH, 5)

    def forward(self, carry: tuple[Tensor, Tensor]) -> Tensor:
        return self.output(carry[0])


def routed_loss(model: Any, batch: Any) -> Tensor:
    x, kinds, classes = batch
    return F.cross_entropy(model((x, kinds)), classes)


def routed(samples: int, *, tied: bool = False) -> Built:
    """Six layers; of neighbouring samples one is of kind 0 and one of kind 1, none of kind 2."""
    del tied
    model = nn.Sequential(Kinds(), Routed(0), Routed(1, 2), Routed(2), Routed(0, 1), Guess())
    batch = (torch.randn(samples, 3), torch.arange(samples) % 2, torch.randint(5, (samples,)))
    return model, routed_loss, batch


def labelled_loss(model: Any, batch: Any) -> Tensor:
    """As Hugging Face's models compute it themselves."""
    loss: Tensor = model(**batch).loss
    return loss


def hf_gpt2(samples: int, *, tied: bool = False, drop: float = 0.0) -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {
        "n_embd": WIDTH,
        "n_layer": 4,
        "n_head": 2,
        "vocab_size": VOCABULARY,
        "n_positions": LENGTH,
    }
    dropout = {"resid_pdrop": drop, "embd_pdrop": drop, "attn_pdrop": drop}
    tokens = torch.randint(VOCABULARY, (samples, LENGTH))
    config = GPT2Config(
        **sizes, **dropout, bos_token_id=1, eos_token_id=2, tie_word_embeddings=tied
    )
    return GPT2LMHeadModel(config), labelled_loss, {"input_ids": tokens, "labels": tokens}


_SIZES = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 2 * WIDTH,
}


def hf_llama(samples: int, *, tied: bool = False) -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens = torch.randint(VOCABULARY, (samples, LENGTH))
    config = LlamaConfig(**_SIZES, vocab_size=VOCABULARY, tie_word_embeddings=tied)
    return LlamaForCausalLM(config), labelled_loss, {"input_ids": tokens, "labels": tokens}


def hf_vit(samples: int, *, tied: bool = False) -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    del tied
    config = ViTConfig(
        **_SIZES,
        image_size=8,
        patch_size=4,
        num_labels=5,
        problem_type="single_label_classification",
    )
    batch = {"pixel_values": torch.randn(samples, 3, 8, 8), "labels": torch.randint(5, (samples,))}
    return ViTForImageClassification(config), labelled_loss, batch


def hf_bert(samples: int, *, tied: bool = False) -> Built:
    from transformers import BertConfig, BertForMaskedLM

    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH}
    config = BertConfig(**_SIZES, **sizes, **drops, tie_word_embeddings=tied)
    ids = torch.randint(1, VOCABULARY, (samples, LENGTH))
    return BertForMaskedLM(config), labelled_loss, {"input_ids": ids, "labels": ids}


def hf_t5(samples: int, *, tied: bool = False) -> Built:
    """An encoder and a decoder; its tokens, encodings and relative positions pass or tie stages."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": 2 * WIDTH, "num_layers": 2, "num_heads": 2}
    config = T5Config(
        **sizes,
        vocab_size=VOCABULARY,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
        tie_word_embeddings=tied,
    )
    source, target = torch.randint(1, VOCABULARY, (2, samples, LENGTH)).unbind()
    return (
        T5ForConditionalGeneration(config),
        labelled_loss,
        {"input_ids": source, "labels": target},
    )


MODELS = {"gpt": gpt, "vit": vit, "cnn": cnn, "t5": t5, "routed": routed}
DROPPING: dict[str, Callable[..., Built]] = {
    "hf-gpt2-dropping": functools.partial(hf_gpt2, drop=0.2)
}
HUGGING_FACE: dict[str, Callable[..., Built]] = {
    "hf-gpt2": hf_gpt2,
    "hf-llama": hf_llama,
    "hf-vit": hf_vit,
    "hf-bert": hf_bert,
    "hf-t5": hf_t5,
}
FROZEN: dict[str, Callable[..., Built]] = {
    "lora": lora,
    "lora-at-the-end": functools.partial(lora, adapted=1),
}
NUM_LAYERS = {"t5": 7, "hf-t5": 7}
"""Where not 6."""


def build(name: str, samples: int, *, tied: bool, dtype: torch.dtype, seed: int = 0) -> Built:
    from runtime.graph_models import GRAPH_MODELS
    from runtime.llama_models import LLAMA_MODELS

    torch.manual_seed(seed)
    known = MODELS | HUGGING_FACE | GRAPH_MODELS | DROPPING | FROZEN | LLAMA_MODELS
    model, loss_fn, batch = known[name](samples, tied=tied)
    model = model.to(dtype)
    return (
        model,
        loss_fn,
        tree_map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, batch),
    )
