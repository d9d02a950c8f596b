"""How tensor-parallel groups share the segments of a captured step, against what is known of models
by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from argosy.dtype import Dtype
from argosy.solve.programs.tensor_segments import with_tensor_groups
from argosy.space.operations.segments import chain_of_step
from argosy.workload.capture.trace import Build, capture
from argosy.workload.chain import Chain

SAMPLES, WIDTH, WIDE = 8, 256, 2048


class Block(nn.Module):
    """A residual of two products, as in a transformer."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.wide, self.back = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.back(functional.gelu(self.wide(self.norm(x))))


def shared(build: Build, widest: int = 4) -> Chain:
    graph = capture(build, name="step")
    return with_tensor_groups(chain_of_step(graph, SAMPLES, Dtype.FP32), graph, SAMPLES, widest)


def blocks(count: int = 6) -> tuple[nn.Module, object, Tensor]:
    model = nn.Sequential(*(Block() for _ in range(count)))
    return model, lambda net, x: net(x).square().mean(), torch.randn(SAMPLES, WIDTH)


def test_a_block_is_all_reduced_once_in_its_forward() -> None:
    """Columns of the first product, rows of the second: one sum of its result, as Megatron-LM does
    it."""
    chain = shared(blocks)
    inner = [layer for layer in chain.layers if layer.parameters > WIDTH * WIDTH]
    assert len(inner) >= 6 and all(layer.max_tensor_width == 4 for layer in inner)
    whole = sum(layer.reduced_bytes for layer in chain.layers)
    assert whole == pytest.approx(6 * 4 * WIDTH, rel=0.1), "bytes of a result per sample and block"


def test_equal_blocks_stay_equal() -> None:
    kinds = [
        {layer.cost_key for layer in shared(lambda count=count: blocks(count)).layers}
        for count in (3, 6)
    ]
    assert len(kinds[1]) <= len(kinds[0])


def test_wide_results_between_two_products_are_not_kept_whole() -> None:
    chain = shared(blocks)
    kept = sum(layer.activation_bytes for layer in chain.layers)
    whole = sum(layer.stream_bytes for layer in chain.layers)
    assert 0 < whole < 0.5 * kept


def test_a_group_cannot_be_wider_than_what_it_cuts() -> None:
    """Attention of one head is done by one device."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(96, 288), nn.Linear(96, 96)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.into(x).view(SAMPLES, 16, 3, 1, 96).permute(2, 0, 3, 1, 4)
            return self.out(
                functional.scaled_dot_product_attention(q, k, v)
                .transpose(1, 2)
                .reshape(SAMPLES, 16, 96)
            )

    def build() -> tuple[nn.Module, object, Tensor]:
        return Heads(), lambda net, x: net(x).square().mean(), torch.randn(SAMPLES, 16, 96)

    chain = shared(build)
    assert min(layer.max_tensor_width for layer in chain.layers) == 1, "one head cannot be cut"


def test_tied_weights_are_left_to_one_device() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.body = (
                nn.Embedding(512, WIDTH),
                nn.Sequential(*(Block() for _ in range(4))),
            )

        def forward(self, ids: Tensor) -> Tensor:
            return self.body(self.table(ids)) @ self.table.weight.t()

    def tied() -> tuple[nn.Module, object, Tensor]:
        return Tied(), lambda net, x: net(x).square().mean(), torch.randint(0, 512, (SAMPLES,))

    layers = shared(tied).layers
    assert [layer.max_tensor_width for layer in layers if layer.tied_to is not None] == [1]
    assert max(layer.max_tensor_width for layer in layers) == 4


def test_tied_weights_do_not_keep_groups_out() -> None:
    """One table is read at both ends: its segments are shared by groups as all others are."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(16 * WIDTH, WIDTH)
            self.blocks = nn.Sequential(*(Block() for _ in range(3)))

        def forward(self, ids: Tensor) -> Tensor:
            return functional.linear(self.blocks(self.words(ids)), self.words.weight)

    def build() -> tuple[nn.Module, object, Tensor]:
        return (
            Tied(),
            lambda net, x: net(x).square().mean(),
            torch.zeros(SAMPLES, 2048, dtype=torch.int64),
        )

    chain = shared(build)
    tied = [layer for layer in chain.layers if layer.tied_parameters]
    assert tied
    assert all(layer.max_tensor_width == 4 for layer in (chain.layers[0], *tied))


class Attention(nn.Module):
    """Attention of eight heads of queries that share key heads, and a feed-forward block."""

    def __init__(self, key_heads: int) -> None:
        super().__init__()
        self.key_heads = key_heads
        self.norm, self.out, self.rest = nn.LayerNorm(WIDE), nn.Linear(WIDE, WIDE), Block(WIDE)
        self.queries = nn.Linear(WIDE, WIDE)
        self.keys, self.values = (nn.Linear(WIDE, WIDE // 8 * key_heads) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)

        def heads(product: nn.Module, count: int) -> Tensor:
            return product(y).view(*x.shape[:2], count, WIDE // 8).transpose(1, 2)

        seen = functional.scaled_dot_product_attention(
            heads(self.queries, 8),
            heads(self.keys, self.key_heads),
            heads(self.values, self.key_heads),
            is_causal=True,
            enable_gqa=self.key_heads < 8,
        )
        return self.rest(x + self.out(seen.transpose(1, 2).reshape(x.shape)))


@pytest.mark.parametrize("key_heads", [4, 8])
def test_what_is_kept_between_products_is_divided_by_positions(key_heads: int) -> None:
    """A block sends as much as with all-reduces, one after attention and one after the rest, but
    what it keeps whole are the gathered inputs of products, not norms and residuals."""

    def build() -> tuple[nn.Module, object, Tensor]:
        model = nn.Sequential(*(Attention(key_heads) for _ in range(4)))
        return model, lambda net, x: net(x).square().mean(), torch.randn(SAMPLES, 256, WIDE)

    chain = shared(build)
    inner = [layer for layer in chain.layers if layer.parameters > WIDE * WIDE]
    assert inner and all(layer.max_tensor_width == 4 for layer in inner)
    whole = sum(layer.reduced_bytes for layer in chain.layers)
    assert whole == pytest.approx(4 * 2 * 256 * 4 * WIDE, rel=0.1)
    stream = sum(layer.stream_bytes for layer in chain.layers)
    assert stream == pytest.approx(4 * 4 * 256 * 4 * WIDE, rel=0.01), "inputs of four products"


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_output_matrix_of_a_language_model_stays_divided(is_tied: bool) -> None:
    """Neither the matrix nor the logits are gathered: the devices exchange one number for each
    token, and each keeps its own classes only."""
    words, tokens = 32 * WIDTH, 64

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.blocks = nn.Embedding(words, WIDTH), nn.Sequential(Block(), Block())
            self.head = nn.Linear(WIDTH, words, bias=False)
            if is_tied:
                self.head.weight = self.words.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.blocks(self.words(ids)))

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    def build() -> tuple[nn.Module, object, Tensor]:
        return Language(), loss, torch.zeros(SAMPLES, tokens, dtype=torch.int64)

    chain = shared(build)
    logits = 4 * tokens * words
    assert all(layer.max_tensor_width == 4 for layer in chain.layers)
    assert sum(layer.stream_bytes for layer in chain.layers) < logits / 2
    sent = sum(layer.reduced_bytes for layer in chain.layers)
    sums = 3 * 4 * tokens * WIDTH
    assert sent <= sums + 4 * tokens + 8, "table and two blocks; a number for each token"


def test_a_little_work_that_stays_whole_keeps_no_group_out() -> None:
    """Every device computes the angles of all positions, which is nothing beside the blocks."""

    class Angles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            places = torch.arange(x.shape[1], dtype=x.dtype).unsqueeze(-1)
            return (places * self.scale).cos()

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.angles = nn.Sequential(Block(WIDE), Block(WIDE)), Angles()

        def forward(self, x: Tensor) -> Tensor:
            turns = self.angles(x)
            return self.blocks[1](self.blocks[0](x) * turns) * turns

    def build() -> tuple[nn.Module, object, Tensor]:
        return Turned(), lambda net, x: net(x).square().mean(), torch.randn(SAMPLES, 64, WIDE)

    assert all(layer.max_tensor_width == 4 for layer in shared(build).layers)
