"""Small models of many kinds as users write them: ``build() -> (model, loss, batch)``."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from argosy.workload.capture.trace import capture
from argosy.workload.graph import Graph

BATCH, TIME, WORDS = 8, 12, 60


def words(count: int = WORDS, time: int = TIME) -> Tensor:
    return torch.randint(0, count, (BATCH, time))


def token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def class_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


class Perceptron(nn.Module):
    def __init__(self, width: int = 24, inner: int = 48) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(torch.tanh(self.wide(x)))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, *, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        parts = self.qkv(x).split(width, dim=-1)
        q, k, v = (part.view(batch, time, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, feed: nn.Module, drop: float = 0.0) -> None:
        super().__init__()
        self.before, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.between, self.feed, self.drop = nn.LayerNorm(width), feed, nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.before(x)))
        return x + self.drop(self.feed(self.between(x)))


def feed_forward(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Experts(nn.Module):
    """Every word goes to its two best experts, as long as they have room; shapes do not depend on
    contents."""

    def __init__(self, width: int, experts: int = 4, room: float = 1.5) -> None:
        super().__init__()
        self.num, self.room = experts, room
        self.gate = nn.Linear(width, experts, bias=False)
        self.rise = nn.Parameter(torch.randn(experts, width, 2 * width) * 0.1)
        self.fall = nn.Parameter(torch.randn(experts, 2 * width, width) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        places = int(self.room * 2 * time / self.num)
        weight, chosen = self.gate(x).softmax(-1).topk(2, -1)
        hot = functional.one_hot(chosen, self.num).to(x.dtype)
        order = (
            hot.reshape(batch, 2 * time, self.num).cumsum(1).reshape(batch, time, 2, self.num) - 1
        )
        place = (order * hot).sum(-1).long()
        seat = functional.one_hot(place.clamp(max=places - 1), places).to(x.dtype) * (
            place < places
        ).unsqueeze(-1)
        send = torch.einsum("btke,btkc->btec", hot, seat)
        back = torch.einsum("btk,btke,btkc->btec", weight, hot, seat)
        inside = torch.einsum("btec,btd->ebcd", send, x)
        inside = torch.einsum("ebcd,edh->ebch", inside, self.rise)
        inside = torch.einsum("ebch,ehd->ebcd", functional.gelu(inside), self.fall)
        return torch.einsum("btec,ebcd->btd", back, inside)


class Language(nn.Module):
    def __init__(
        self,
        width: int = 24,
        heads: int = 4,
        layers: int = 2,
        *,
        experts: bool = False,
        drop: float = 0.0,
    ):
        super().__init__()
        self.word, self.place = nn.Embedding(WORDS, width), nn.Embedding(TIME, width)
        feeds = [Experts(width) if experts else feed_forward(width) for _ in range(layers)]
        self.blocks = nn.ModuleList(Block(width, heads, feed, drop) for feed in feeds)
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.word(x) + self.place(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return self.head(self.last(h))


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int = 1) -> None:
        super().__init__()
        self.one = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm_one, self.norm_two = nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)
        same = stride == 1 and inside == outside
        self.skip = nn.Identity() if same else nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_two(self.two(functional.relu(self.norm_one(self.one(x)), inplace=True)))
        return functional.relu(y + self.skip(x), inplace=True)


class ResidualNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1)
        self.body = nn.Sequential(Residual(8, 8), Residual(8, 16, 2), nn.MaxPool2d(2))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(functional.adaptive_avg_pool2d(self.body(self.stem(x)), 1).flatten(1))


class Plain(nn.Module):
    """Convolutions, pools, then wide linear layers, as VGG."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 12, 3, padding=1)
        self.wide, self.head = nn.Linear(12 * 4 * 4, 40), nn.Linear(40, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.one(x)), 2)
        x = functional.max_pool2d(functional.relu(self.two(x)), 2)
        return self.head(functional.relu(self.wide(x.flatten(1))))


class Unet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.one, self.two = (
            nn.Conv2d(3, width, 3, padding=1),
            nn.Conv2d(width, 2 * width, 3, padding=1),
        )
        self.low = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up_two, self.up_one = (
            nn.ConvTranspose2d(2 * width, 2 * width, 2, 2),
            nn.ConvTranspose2d(2 * width, width, 2, 2),
        )
        self.mix_two, self.mix_one = (
            nn.Conv2d(4 * width, 2 * width, 3, padding=1),
            nn.Conv2d(2 * width, 3, 3, padding=1),
        )
        self.norm = nn.GroupNorm(2, width)

    def forward(self, x: Tensor) -> Tensor:
        one = functional.silu(self.norm(self.one(x)))
        two = functional.silu(self.two(functional.avg_pool2d(one, 2)))
        low = functional.silu(self.low(functional.avg_pool2d(two, 2)))
        up = functional.silu(self.mix_two(torch.cat([self.up_two(low), two], 1)))
        return self.mix_one(torch.cat([self.up_one(up), one], 1))


class Towers(nn.Module):
    """Two encoders and every pair of their results compared."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Perceptron(16, 32), Perceptron(16, 40)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        left, right = (
            functional.normalize(tower(x), dim=-1)
            for tower, x in zip((self.left, self.right), pair, strict=True)
        )
        return left @ right.T * 5.0


def perceptron() -> Any:
    return (
        Perceptron(),
        lambda model, x: functional.mse_loss(model(x[0]), x[1]),
        (torch.randn(BATCH, 24), torch.randn(BATCH, 24)),
    )


def language(**options: Any) -> Any:
    return Language(**options), token_loss, (words(), words())


def images(size: int = 16) -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, 3, size, size), torch.randint(0, 10, (BATCH,))


def convolution(model: Callable[[], nn.Module]) -> Any:
    return model(), class_loss, images()


def unet() -> Any:
    return Unet(), lambda model, x: functional.mse_loss(model(x), x), torch.randn(BATCH, 3, 16, 16)


def towers() -> Any:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch), torch.arange(len(batch[0])))

    return Towers(), loss, (torch.randn(BATCH, 16), torch.randn(BATCH, 16))


def _language_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def gpt2() -> Any:
    import transformers

    config = transformers.GPT2Config(
        n_layer=2, n_embd=24, n_head=4, vocab_size=WORDS, n_positions=TIME, use_cache=False, bos_token_id=0,
        eos_token_id=0, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, loss_type="ForCausalLM",
    )  # fmt: skip
    return (
        transformers.GPT2LMHeadModel(config),
        _language_loss,
        {"input_ids": words(), "labels": words()},
    )


def llama() -> Any:
    import transformers

    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=24, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=WORDS, use_cache=False,
    )  # fmt: skip
    return (
        transformers.LlamaForCausalLM(config),
        _language_loss,
        {"input_ids": words(), "labels": words()},
    )


def bert() -> Any:
    import transformers

    config = transformers.BertConfig(
        num_hidden_layers=2, hidden_size=24, intermediate_size=40, num_attention_heads=4, vocab_size=WORDS,
        max_position_embeddings=TIME, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return (
        transformers.BertForMaskedLM(config),
        _language_loss,
        {"input_ids": words(), "labels": words()},
    )


def vision() -> Any:
    import transformers

    config = transformers.ViTConfig(
        num_hidden_layers=2, hidden_size=24, intermediate_size=40, num_attention_heads=4, image_size=16, patch_size=4,
        num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    loss = lambda model, batch: functional.cross_entropy(model(batch[0]).logits, batch[1])  # noqa: E731
    return transformers.ViTForImageClassification(config), loss, images()


def t5() -> Any:
    import transformers

    config = transformers.T5Config(
        num_layers=2, d_model=24, d_kv=6, d_ff=40, num_heads=4, vocab_size=WORDS, use_cache=False,
        decoder_start_token_id=0, dropout_rate=0.0,
    )  # fmt: skip
    batch = {"input_ids": words(), "labels": words(time=10)}
    return transformers.T5ForConditionalGeneration(config), _language_loss, batch


def mixtral() -> Any:
    import transformers

    config = transformers.MixtralConfig(
        num_hidden_layers=2, hidden_size=24, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=WORDS, num_local_experts=4, use_cache=False, experts_implementation="batched_mm",
    )  # fmt: skip
    return (
        transformers.MixtralForCausalLM(config),
        _language_loss,
        {"input_ids": words(), "labels": words()},
    )


BUILDS: dict[str, Callable[[], Any]] = {
    "perceptron": perceptron,
    "language": language,
    "dropout": partial(language, drop=0.3),
    "experts": partial(language, experts=True),
    "residual": partial(convolution, ResidualNet),
    "plain": partial(convolution, Plain),
    "unet": unet,
    "towers": towers,
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "vision": vision,
    "t5": t5,
    "mixtral": mixtral,
}


def built(name: str, dtype: torch.dtype = torch.float64) -> Callable[[], Any]:
    """A model's ``build``, with parameters and batch of the given number format."""

    def build() -> Any:
        model, loss, batch = BUILDS[name]()
        return (
            model.to(dtype),
            loss,
            tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, batch),
        )

    return build


@cache
def captured(name: str, dtype: torch.dtype = torch.float64) -> Graph:
    """A model's step; captured once."""
    return capture(built(name, dtype), name=name)


def linear_graph(*, batch: int, width: int, out: int) -> Graph:
    """One linear layer without bias and a squared error."""

    def build() -> Any:
        model = nn.Linear(width, out, bias=False)
        loss = lambda layer, pair: functional.mse_loss(layer(pair[0]), pair[1])  # noqa: E731
        return model, loss, (torch.randn(batch, width), torch.randn(batch, out))

    return capture(build, name="linear")
