"""Compute what a transformer computes, keeps and sends: turn an ``Architecture`` into a ``Chain``.

All amounts are for one sample of s tokens; an encoder and its decoder have s tokens each. h hidden
width, a heads, g key-value heads, d head dim, f inner width, k active experts of E, v outputs, b
bytes per element.

FLOP = 2 x multiply-adds of matrix products. Norms, softmax, activation functions and table look-ups
count as 0: their cost is memory traffic.

    (1) projections, feed-forward   2 s x the matrix weights that a token meets
    (2) attention proper            4 s min(s, window) a d; counted in full under a causal mask;
                                    with values of u elements 2 s min(s, window) a (d + u)
    (3) logits                      2 s v e; for the first token only 2 v h
    (4) backward                    2 x forward; for patches, whose input needs no gradient, 1 x

Kept by a block from forward to backward, in elements of b bytes. Attention is fused (flash):
nothing of size s x s is kept. With f = 4 h, g = a, a d = h, b = 2 and dropout the sum is 34 s h
bytes, as in Korthikanti et al., "Reducing activation recomputation in large transformer models",
without their 5 a s^2:

    (5) residual stream     s h per norm (its input) and per part (what its projections read);
                            parallel: - s h
    (6) attention           s (2 a d + 2 g d): queries, keys, values, result; with norms s (a + g) d
                            more; latent: s (2 a d + 2 a u), and 2 s (q + c) around the norms of
                            compressed vectors
    (7) feed-forward        m s f, m = 3 gated, 2 not: every up projection, and what the down
                            projection reads
    (8) experts             k times (7); 2 k s h routed inputs and results; s E router; shared:
                            (7) + s h
    (9) cross attention     (6) and the encoder's output s h, in every decoder block although blocks
                            share it
   (10) dropout             s h bytes of mask per part
   (11) unfused attention   a s^2 weights; with dropout a s^2 more, and a s^2 bytes of mask

Selective recomputation drops what can be computed again without a projection: norm outputs,
activation function outputs, (11). It repeats (2) if attention is unfused, and about 8 operations
per element, whose time is memory traffic.

   (12) the embedding keeps 8 s bytes of ids or the pixels, what its norm and its projection read,
        and a mask
   (13) the head keeps s h per step before its logits, and their log-probabilities in fp32: 4 s v
        bytes; nothing follows. While the loss is computed and differentiated there are, for a
        moment, the logits and their gradient beside these, in fp32 and, where b < 4, in b bytes
        too: 2 (4 + b) s v bytes, or 8 s v
   (14) tensor parallelism all-reduces s h after each part, once if parallel. A table split by rows
        reduces s h in forward only, split logits in backward only: half of it is booked in each
        direction
   (15) a sequence in parts exchanges keys and values, 2 s g d per attention, latent s a (d + u);
        cut in at most s / 2 parts, because each takes a piece from the front and one from the back,
        so that a causal mask leaves all the same work
   (16) experts in parts exchange k s h routed inputs; their results are as many

   (17) after the last projection of a block, 2 s f h, nothing is kept unless a norm, a mask or
        weights of experts follow it
   (18) every second product, in the order queries, keys, values, result, up projections, down
        projection: 2 s h (g d + a d), and 2 s h f if gated

Not modelled: fp32 copies inside unfused norms, workspace, experts' padded or dropped tokens.
"""

from __future__ import annotations

from typing import NamedTuple

from argosy.dtype import Dtype
from argosy.workload.architecture import (
    Architecture,
    Attention,
    Block,
    Experts,
    FeedForward,
    PatchEmbedding,
    TokenEmbedding,
)
from argosy.workload.chain import Chain, Layer

# Operations per element of a norm or an activation function.
_OPERATIONS_PER_ELEMENT = 8
# Bytes of a token id: int64.
_ID_BYTES = 8
# Bytes of a logit in the loss: fp32.
_LOGIT_BYTES = 4


def build_chain(
    architecture: Architecture,
    *,
    name: str,
    sequence_length: int,
    dtype: Dtype,
    optimizer: str = "adamw",
    source: str = "",
    fused_attention: bool = True,
) -> Chain:
    """Return the chain of embedding, blocks and head; with an encoder: embedding, encoder,
    decoder's embedding, decoder, head."""
    layers = TransformerLayers(architecture, sequence_length, dtype, fused_attention)
    body = [layers.embedding()]
    if architecture.encoder:
        body += [
            layers.block(f"encoder.{i}", "encoder", block)
            for i, block in enumerate(architecture.encoder)
        ]
        body.append(layers.decoder_embedding())
    kind = "decoder" if architecture.encoder else "block"
    last = len(architecture.blocks) - 1
    body += [
        layers.block(
            f"{kind}.{i}", kind, block, carries_encoder=block.cross is not None and i < last
        )
        for i, block in enumerate(architecture.blocks)
    ]
    return Chain(
        name=name,
        layers=(*body, layers.head()),
        sequence_length=sequence_length,
        dtype=dtype,
        optimizer=optimizer,
        source=source,
    )


class BlockElements(NamedTuple):
    """A record of what a block keeps if all its weights are trained, piece by piece; in elements
    unless the name ends in bytes."""

    attention: float
    """Elements of (6) without norms of queries and keys."""
    normed: float
    """Inputs of norms of queries and keys."""
    encoder: float
    """The encoder's output, of (9)."""
    inner: float
    """Elements of (7), or of (8) without routed inputs and results."""
    activated: float
    """Elements of ``inner`` that projections down read."""
    routed: float
    """Routed inputs and results, half of each."""
    mask_bytes: float
    score_bytes: float


class TransformerLayers:
    """A builder that makes the layers of one architecture at one sequence length and dtype."""

    def __init__(self, architecture: Architecture, tokens: int, dtype: Dtype, fused: bool) -> None:
        self.architecture, self.tokens, self.width, self.fused = (
            architecture,
            tokens,
            dtype.bytes,
            fused,
        )
        self.hidden = architecture.hidden
        self.stream = float(tokens * self.hidden)
        """Elements of the residual stream."""
        self.tensor_width = architecture.blocks[0].attention.kv_heads
        self.max_context = max(1, tokens // 2)
        """Largest number of parts of a sequence (15)."""

    def embedding(self) -> Layer:
        """Return the layer of the embedding (12)."""
        embedding = self.architecture.embedding
        if isinstance(embedding, PatchEmbedding):
            pixels = embedding.patches * embedding.values
            flop = backward = 2.0 * pixels * self.hidden
            kept, reduced = float(pixels * self.width), 0.0
        else:
            flop, kept = self._projected(embedding.width)
            kept += (
                _ID_BYTES * self.tokens + (embedding.norm is not None) * self.stream * self.width
            )
            backward, reduced = 2 * flop, self.stream * self.width / 2
        return Layer(
            name="embedding",
            kind="embedding",
            forward_flop=flop,
            backward_flop=backward,
            parameters=embedding.parameters(self.hidden),
            activation_bytes=kept + embedding.dropout * self.stream,
            output_bytes=self.stream * self.width,
            reduced_bytes=reduced,
            max_tensor_width=self.tensor_width,
            max_context=self.max_context,
        )

    def _projected(self, table_width: int) -> tuple[float, float]:
        """Return the FLOP and kept bytes of the projection between a narrow token table and the
        residual stream."""
        if table_width == self.hidden:
            return 0.0, 0.0
        return 2.0 * self.tokens * table_width * self.hidden, float(
            self.tokens * table_width * self.width
        )

    def decoder_embedding(self) -> Layer:
        """Return the layer of the decoder's tokens, from the encoder's table; the encoder's output
        passes through it."""
        embedding = self.architecture.embedding
        return Layer(
            name="decoder.embedding",
            kind="embedding",
            forward_flop=0.0,
            backward_flop=0.0,
            parameters=0,
            activation_bytes=_ID_BYTES * self.tokens + embedding.dropout * self.stream,
            output_bytes=2 * self.stream * self.width,
            reduced_bytes=self.stream * self.width / 2,
            max_tensor_width=self.tensor_width,
            max_context=self.max_context,
            tied_to=0,
            tied_parameters=embedding.parameters(self.hidden),
        )

    def block(self, name: str, kind: str, block: Block, *, carries_encoder: bool = False) -> Layer:
        """Return the layer of a block, by (1) to (11) and (14) to (16)."""
        flop = self._block_flop(block)
        kept, selective_bytes, selective_flop = self._block_memory(block)
        experts = block.feed_forward if isinstance(block.feed_forward, Experts) else None
        reductions = 1 if block.parallel else block.num_parts
        attentions = _attentions(block)
        keys_and_values = sum(
            attention.key_width + attention.value_width for attention in attentions
        )
        squares = (
            0.0 if self.fused else sum(self._square_bytes(attention) for attention in attentions)
        )
        around = (
            block.num_norms + block.num_parts - block.parallel
        ) * self.width + block.dropout * block.num_parts
        return Layer(
            name=name,
            kind=kind,
            forward_flop=flop,
            backward_flop=2 * flop,
            parameters=block.parameters(self.hidden),
            activation_bytes=kept,
            score_bytes=squares,
            stream_bytes=around * self.stream,
            output_bytes=(2 if carries_encoder else 1) * self.stream * self.width,
            selective_bytes=selective_bytes,
            selective_flop=selective_flop,
            reduced_bytes=reductions * self.stream * self.width,
            active_parameters=block.active_parameters(self.hidden) if experts else None,
            expert_parameters=experts.count * experts.expert.parameters(self.hidden)
            if experts
            else 0,
            num_experts=experts.count if experts else 0,
            routed_bytes=experts.active * self.stream * self.width if experts else 0.0,
            key_value_bytes=float(keys_and_values * self.tokens * self.width),
            attention_flop=sum(self.core_flop(attention) for attention in attentions),
            last_flop=self._last_flop(block),
            second_flop=self._second_flop(block),
            max_tensor_width=block.attention.kv_heads,
            max_context=self.max_context,
        )

    def _block_flop(self, block: Block) -> float:
        attentions = sum(self._attention_flop(attention) for attention in _attentions(block))
        return attentions + 2.0 * self.tokens * block.feed_forward.matrix_weights(self.hidden)

    def _last_flop(self, block: Block) -> float:
        """Return the FLOP of the projection that ends a block (17); 0 if a norm, a mask or weights
        of experts follow it, which keep its result."""
        part = block.feed_forward
        is_last = block.pre_norm and block.num_norms <= block.num_parts and not block.dropout
        if isinstance(part, Experts) or not is_last:
            return 0.0
        return 2.0 * self.tokens * part.inner * self.hidden

    def _second_flop(self, block: Block) -> float:
        """Return the FLOP of every second product (18): of keys, results of attention and, if
        gated, the second up projection; 0 if the order of products is not this one."""
        part, attention = block.feed_forward, block.attention
        if isinstance(part, Experts) or block.cross is not None or attention.latent is not None:
            return 0.0
        widths = attention.key_width + attention.output_width + part.gated * part.inner
        return 2.0 * self.tokens * self.hidden * widths

    def _attention_flop(self, attention: Attention) -> float:
        """Return the FLOP of attention with its projections, (1) and (2)."""
        weights = attention.query_weights(self.hidden) + attention.key_weights(self.hidden)
        return 2.0 * self.tokens * weights + self.core_flop(attention)

    def core_flop(self, attention: Attention) -> float:
        """Return the FLOP of attention proper (2)."""
        keys = min(self.tokens, attention.window or self.tokens)
        return 2.0 * self.tokens * keys * (attention.query_width + attention.output_width)

    def _block_memory(self, block: Block) -> tuple[float, float, float]:
        """Return the bytes kept, the bytes that selective recomputation drops, and the FLOP that it
        repeats, by (5) to (11)."""
        attentions = _attentions(block)
        kept_inner, activated = self._feed_forward_elements(block.feed_forward)
        normed = sum(_normed_width(attention) for attention in attentions) * self.tokens
        kept = (
            (block.num_norms + block.num_parts - block.parallel) * self.stream + kept_inner + normed
        )
        kept += sum(_kept_width(attention) for attention in attentions) * self.tokens
        kept += (block.cross is not None) * self.stream
        norm_outputs = (block.num_parts if block.pre_norm else block.num_parts - 1) * self.stream
        dropped = norm_outputs + activated + normed
        squares = (
            0.0 if self.fused else sum(self._square_bytes(attention) for attention in attentions)
        )
        repeated = 0.0 if self.fused else sum(self.core_flop(attention) for attention in attentions)
        masks = block.dropout * block.num_parts * self.stream
        return (
            kept * self.width + masks + squares,
            dropped * self.width + squares,
            _OPERATIONS_PER_ELEMENT * dropped + repeated,
        )

    def block_elements(self, block: Block) -> BlockElements:
        """Return the amounts of (6) to (11) separately."""
        attentions = _attentions(block)
        inner, activated = self._feed_forward_elements(block.feed_forward)
        experts = block.feed_forward if isinstance(block.feed_forward, Experts) else None
        routed = 2 * experts.active * self.stream if experts is not None else 0.0
        widths = sum(_kept_width(attention) for attention in attentions)
        return BlockElements(
            attention=float(widths * self.tokens),
            normed=float(sum(_normed_width(attention) for attention in attentions) * self.tokens),
            encoder=(block.cross is not None) * self.stream,
            inner=inner - routed,
            activated=activated,
            routed=routed,
            mask_bytes=block.dropout * block.num_parts * self.stream,
            score_bytes=0.0
            if self.fused
            else sum(self._square_bytes(attention) for attention in attentions),
        )

    def _feed_forward_elements(self, part: FeedForward | Experts) -> tuple[float, float]:
        """Return the elements kept, and those of them that the activation function can compute
        again, by (7) and (8)."""
        if isinstance(part, FeedForward):
            return float(self.tokens * part.inner * (3 if part.gated else 2)), float(
                self.tokens * part.inner
            )
        kept, activated = (
            part.active * amount for amount in self._feed_forward_elements(part.expert)
        )
        kept += 2 * part.active * self.stream + self.tokens * part.count
        if part.shared is not None:
            shared_kept, shared_activated = self._feed_forward_elements(part.shared)
            kept, activated = kept + shared_kept + self.stream, activated + shared_activated
        return kept, activated

    def _square_bytes(self, attention: Attention) -> float:
        """Return the bytes of scores of unfused attention (11)."""
        bytes_per_score = self.width + attention.dropout * (self.width + 1)
        return float(attention.heads * self.tokens * self.tokens * bytes_per_score)

    def head(self) -> Layer:
        """Return the layer of the head (13)."""
        head, embedding = self.architecture.head, self.architecture.embedding
        rows = 1 if head.first_token_only else self.tokens
        projection_flop, projection_bytes = self._projected(head.width)
        transforms = (head.transform is not None) * self.tokens + (head.pooled_classes > 0)
        flop = (
            2.0 * rows * head.outputs * head.width
            + projection_flop
            + 2.0 * transforms * self.hidden**2
        )
        flop += 2.0 * head.pooled_classes * self.hidden
        inputs = (
            (1 + (head.norm is not None) + 3 * (head.transform is not None))
            * self.stream
            * self.width
        )
        tied = (
            head.outputs * head.width if head.tied and isinstance(embedding, TokenEmbedding) else 0
        )
        return Layer(
            name="head",
            kind="head",
            forward_flop=flop,
            backward_flop=2 * flop,
            parameters=head.parameters(self.hidden),
            activation_bytes=inputs + projection_bytes + _LOGIT_BYTES * rows * head.outputs,
            stream_bytes=inputs,
            working_bytes=_loss_bytes(self.width) * rows * head.outputs,
            loss_bytes=_loss_bytes(self.width) * rows * head.outputs,
            output_bytes=0.0,
            reduced_bytes=0.0 if head.first_token_only else self.stream * self.width / 2,
            max_tensor_width=self.tensor_width,
            max_context=self.max_context,
            tied_to=0 if tied else None,
            tied_parameters=tied,
        )


def _loss_bytes(width: int) -> float:
    """Return the bytes of one logit while the loss is differentiated, beside kept bytes (13)."""
    return 2.0 * (_LOGIT_BYTES + (width if width < _LOGIT_BYTES else 0))


def _attentions(block: Block) -> tuple[Attention, ...]:
    return (block.attention,) if block.cross is None else (block.attention, block.cross)


def _kept_width(attention: Attention) -> int:
    """Elements of a token that attention keeps, without what norms give again: (6)."""
    compressed = 0 if attention.latent is None else attention.latent.widths
    inputs = attention.query_width + attention.key_width + attention.value_width
    return inputs + attention.output_width + compressed


def _normed_width(attention: Attention) -> int:
    """Return the elements per token that norms inside attention write."""
    heads = 0 if attention.qk_norm == "none" else attention.query_width + attention.key_width
    return heads if attention.latent is None else heads + attention.latent.widths
