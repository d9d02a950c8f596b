"""Describe the shape of a transformer, and count its weights exactly.

h hidden width, a heads, g key-value heads, d head dim, f inner width, E experts, v vocabulary, e
table width:

    (1) Attention        h a d + 2 h g d + a d h; biases (a + 2 g) d and h; query and key norms 2 d
                         or (a + g) d; a table of relative positions, buckets x a; sinks a.
        latent, with widths q and c of compressed queries and of compressed keys and values,
        r rotary elements, u elements of a value: h q + q a d, h (c + r) + c a (d - r + u), a u h;
        norms q + c; biases q + c + r and h
    (2) FeedForward      m h f with m = 3 gated, 2 not; biases (m - 1) f + h
    (3) Experts          E times (2); router h E, its bias E; shared expert (2), its gate h if any
    (4) NormKind         h (root mean square), 2 h (layer norm) or 0 (nothing learned)
    (5) Block            (1), once more for cross attention; (2) or (3); its norms (4)
    (6) TokenEmbedding   v e; e h if e differs from h; h per position and per token type; (4)
    (7) PatchEmbedding   h per value of a patch; h bias; h class token; h per position
    (8) Head             (4); h e if e differs from h; v e unless tied; v bias. BERT adds a
                         transform h h + h + (4), a pooler h h + h and a classifier c h + c

*Matrix weights* multiply every token that meets them: weights without biases, norms and tables.
``transformer.py`` computes the FLOP and the kept bytes of a shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class NormKind(StrEnum):
    """A kind of norm that is applied to activations."""

    RMS = "rms"
    LAYER = "layer"
    PLAIN = "plain"
    """A layer norm that learns nothing."""

    def parameters(self, width: int) -> int:
        """Return the number of weights of a norm (4)."""
        return {"rms": 1, "layer": 2, "plain": 0}[self.value] * width


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (MLA), whose inputs are projected from compressed vectors."""

    query_rank: int | None
    """Width of the compressed queries; None: queries are projected from the hidden state."""
    key_value_rank: int
    """Width of the compressed keys and values."""
    rotary_dim: int
    """Elements of a query and of a key that are turned; all heads share those of the key."""
    value_dim: int
    """Elements of one head's value."""

    @property
    def widths(self) -> int:
        """Widths of all compressed vectors, each of which has a norm."""
        return (self.query_rank or 0) + self.key_value_rank


@dataclass(frozen=True, kw_only=True)
class Attention:
    """A multi-head attention, which shares keys and values between groups of heads if ``kv_heads <
    heads``."""

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["none", "head", "all"] = "none"
    """Root-mean-square norm of queries and keys: a weight per element of one head, or of all
    heads."""
    relative_buckets: int = 0
    """Rows of a learned table of relative positions; T5 keeps one in the first block of each
    side."""
    window: int | None = None
    """Number of keys that a query attends to; None: all."""
    dropout: bool = False
    """Whether the attention weights have dropout."""
    sinks: bool = False
    """A learned score per head that takes a share of the attention weights."""
    latent: Latent | None = None
    """How queries, keys and values are compressed; None: they are not."""

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def value_width(self) -> int:
        return self.kv_heads * self._value_dim

    @property
    def output_width(self) -> int:
        """Elements of the result that the output projection reads."""
        return self.heads * self._value_dim

    @property
    def _value_dim(self) -> int:
        return self.head_dim if self.latent is None else self.latent.value_dim

    def query_weights(self, hidden: int) -> int:
        """Matrix weights met by every query: the query and output projections."""
        rank = None if self.latent is None else self.latent.query_rank
        down, reads = (0, hidden) if rank is None else (hidden * rank, rank)
        return down + reads * self.query_width + self.output_width * hidden

    def key_weights(self, hidden: int) -> int:
        """Matrix weights met by every key: the key and value projections."""
        if self.latent is None:
            return hidden * (self.key_width + self.value_width)
        rank, rotary = self.latent.key_value_rank, self.latent.rotary_dim
        up = self.key_width - self.kv_heads * rotary + self.value_width
        return hidden * (rank + rotary) + rank * up

    def parameters(self, hidden: int) -> int:
        """Return the number of weights (1).

        >>> Attention(heads=32, kv_heads=8, head_dim=128).parameters(4096)
        41943040
        """
        biased = self.query_width + self.key_width + self.value_width
        compressed = 0
        if self.latent is not None:
            compressed = self.latent.widths
            biased = compressed + self.latent.rotary_dim
        biases = self.qkv_bias * biased + self.output_bias * hidden
        widths = {"none": 0, "head": 2 * self.head_dim, "all": self.query_width + self.key_width}
        norms = widths[self.qk_norm] + compressed
        tables = (self.relative_buckets + self.sinks) * self.heads
        return self.query_weights(hidden) + self.key_weights(hidden) + biases + norms + tables


@dataclass(frozen=True, kw_only=True)
class FeedForward:
    """A feed-forward part that consists of up projection, activation function and down projection;
    if gated, a second up projection is multiplied in."""

    inner: int
    gated: bool = False
    bias: bool = False

    def matrix_weights(self, hidden: int) -> int:
        return (3 if self.gated else 2) * hidden * self.inner

    def parameters(self, hidden: int) -> int:
        """Return the number of weights (2)."""
        biases = (2 if self.gated else 1) * self.inner + hidden
        return self.matrix_weights(hidden) + self.bias * biases

    def active_parameters(self, hidden: int) -> int:
        return self.parameters(hidden)


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts, in which a router sends each token to ``active`` of ``count``
    experts."""

    expert: FeedForward
    count: int
    active: int
    shared: FeedForward | None = None
    """An expert that every token meets."""
    shared_gate: bool = True
    """Whether a learned gate scales the result of the shared expert."""
    router_bias: bool = False
    normalized: bool = True
    """Whether the weights of the active experts of a token add up to 1."""

    def _common(self, hidden: int) -> int:
        shared = 0
        if self.shared is not None:
            shared = self.shared.parameters(hidden) + self.shared_gate * hidden
        return hidden * self.count + self.router_bias * self.count + shared

    def matrix_weights(self, hidden: int) -> int:
        """Those that one token meets."""
        shared = 0
        if self.shared is not None:
            shared = self.shared.matrix_weights(hidden) + self.shared_gate * hidden
        return self.active * self.expert.matrix_weights(hidden) + hidden * self.count + shared

    def parameters(self, hidden: int) -> int:
        """Return the number of weights (3)."""
        return self.count * self.expert.parameters(hidden) + self._common(hidden)

    def active_parameters(self, hidden: int) -> int:
        return self.active * self.expert.parameters(hidden) + self._common(hidden)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A transformer block, which has attention, cross attention if a decoder reads an encoder, and
    feed-forward."""

    attention: Attention
    feed_forward: FeedForward | Experts
    norm: NormKind
    cross: Attention | None = None
    num_norms: int = 2
    pre_norm: bool = True
    """Whether norms are before attention and feed-forward rather than after the residual sum."""
    parallel: bool = False
    """Whether attention and feed-forward read the same input and are summed once."""
    dropout: bool = False
    """Whether the results of attention and feed-forward have dropout."""

    @property
    def num_parts(self) -> int:
        """Return the number of residual sums: one each for attention, cross attention and
        feed-forward."""
        return 2 if self.cross is None else 3

    def parameters(self, hidden: int) -> int:
        """Return the number of weights (5)."""
        return self._around(hidden) + self.feed_forward.parameters(hidden)

    def active_parameters(self, hidden: int) -> int:
        return self._around(hidden) + self.feed_forward.active_parameters(hidden)

    def _around(self, hidden: int) -> int:
        attentions = [self.attention] if self.cross is None else [self.attention, self.cross]
        norms = self.num_norms * self.norm.parameters(hidden)
        return sum(attention.parameters(hidden) for attention in attentions) + norms


@dataclass(frozen=True, kw_only=True)
class TokenEmbedding:
    """An embedding that has tables of tokens and, if learned, of positions and token types."""

    vocabulary: int
    width: int
    """Width of a row of the token table; projected if it is not the hidden width (OPT-350m)."""
    position_rows: int = 0
    token_types: int = 0
    norm: NormKind | None = None
    dropout: bool = False

    def parameters(self, hidden: int) -> int:
        """Return the number of weights (6)."""
        projection = self.width * hidden if self.width != hidden else 0
        norm = 0 if self.norm is None else self.norm.parameters(hidden)
        return (
            self.vocabulary * self.width
            + projection
            + (self.position_rows + self.token_types) * hidden
            + norm
        )


@dataclass(frozen=True, kw_only=True)
class PatchEmbedding:
    """An embedding that cuts an image into patches and projects each to one token, after a class
    token."""

    patches: int
    values: int
    """Values per patch: channels x height x width."""
    dropout: bool = False

    def parameters(self, hidden: int) -> int:
        """Return the number of weights (7)."""
        return (self.values + 1) * hidden + hidden + (self.patches + 1) * hidden


@dataclass(frozen=True, kw_only=True)
class Head:
    """A head that leads from the last block to logits: over words for every token, or over classes
    for the first token."""

    outputs: int
    width: int
    """Width of the rows that logits are products with."""
    norm: NormKind | None
    """The final norm of the model."""
    tied: bool
    """Whether the rows are those of the token table."""
    bias: bool = False
    transform: NormKind | None = None
    """BERT only: the norm after a dense layer in front of the logits."""
    pooled_classes: int = 0
    """BERT only: classes of the sentence-pair task, read from a pooled first token; 0: no
    pooler."""
    first_token_only: bool = False

    def parameters(self, hidden: int) -> int:
        """Return the number of weights (8)."""
        dense = hidden * hidden + hidden
        final = 0 if self.norm is None else self.norm.parameters(hidden)
        transform = 0 if self.transform is None else dense + self.transform.parameters(hidden)
        pooler = dense + self.pooled_classes * (hidden + 1) if self.pooled_classes else 0
        projection = hidden * self.width if self.width != hidden else 0
        rows = 0 if self.tied else self.outputs * self.width
        return final + transform + pooler + projection + rows + self.bias * self.outputs


class Length(StrEnum):
    """A rule that relates the sequence length to ``Architecture.context``."""

    ANY = "any"
    """Positions are computed: any length is possible; the context is the length the model was made
    for."""
    AT_MOST = "at most"
    """Positions are learned: a longer sequence has none."""
    EXACTLY = "exactly"
    """The sequence is an image."""


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """A kind of position that is given by rotation: queries and keys are turned by angles that fall
    with the element."""

    base: float = 10_000.0
    """Base of the falling angles; ``rope_theta`` in Hugging Face's configs."""
    share: float = 1.0
    """Share of the elements of a head that are turned."""
    scaling: float | None = None
    """Llama 3.1's factor for slow angles, with bands from 1 to 4 and 8192 tokens before; None: not
    scaled."""
    other_scaling: str | None = None
    """Name of any other way to scale; None: there is none."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A transformer, which has embedding, blocks and head; an encoder-decoder has ``encoder``
    blocks before ``blocks``."""

    hidden: int
    embedding: TokenEmbedding | PatchEmbedding
    blocks: tuple[Block, ...]
    head: Head
    context: int
    """Tokens; ``length`` states the rule."""
    length: Length = Length.ANY
    encoder: tuple[Block, ...] = ()
    rotary: Rotary | None = None
    """Rotary positions; None: positions are learned."""
    norm_epsilon: float = 1e-5
    """Number added to a variance before its root is taken."""
    activation: str = "gelu"
    """Activation function in feed-forwards, as Hugging Face's configs name it."""

    @property
    def parameters(self) -> int:
        """Return the number of weights; tied ones count once."""
        blocks = sum(block.parameters(self.hidden) for block in self.encoder + self.blocks)
        return self.embedding.parameters(self.hidden) + blocks + self.head.parameters(self.hidden)
