"""Build the layers of a transformer with frozen weights: what they compute, keep and hold if only
some are trained.

With w the weights of a frozen matrix (out x in), r the rank of its adapter, s tokens, and a token
that meets k of E experts (1 of 1 elsewhere):

    (1) trained      r (in + out) per adapter, E times in experts
    (2) forward      2 s k r (in + out) more per adapter
    (3) backward     2 s k w for the gradient of its input, if that is needed, and none for its
                     weights; attention proper as always; 4 s k r (in + out) per adapter, less
                     2 s k r in if no input gradient is needed
    (4) needed       an input gradient is needed if something before, in the layer or in a layer
                     before, is trained; a layer that neither is trained nor follows one that is has
                     no backward and keeps nothing
    (5) kept         the input of a matrix product only if the matrix has an adapter, and s k r more
                     per adapter; as always what norms, activation functions and attention need for
                     the gradient of their input
    (6) tied tables  layers that share a table are frozen together: a weight is frozen wherever it
                     is used

A block's parts follow one another: projections to queries, keys and values; attention; output
projection; projections up; activation function; projection down. Dropout in front of adapters is
not modelled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from argosy.errors import bad_input, impossible, refused
from argosy.workload.architecture import Architecture, Attention, Block, Experts, FeedForward
from argosy.workload.chain import Chain, Frozen, Layer
from argosy.workload.transformer import TransformerLayers
from argosy.workload.tuning import TARGETS, Train, Tuning

# Name of the matrix of a router.
_ROUTER = "router"
_INPUT, _ATTENTION, _INNER = range(3)
"""What a matrix reads: the input of a part, the result of attention, the result of the activation
function."""


@dataclass(frozen=True)
class _Matrix:
    """A matrix that belongs to a block; matrices are in the order in which a forward meets them."""

    name: str
    rows: int
    columns: int
    reads: int
    copies: int = 1
    """Copies in all experts."""
    active: float = 1
    """Copies that a token meets."""
    in_experts: bool = False
    attention: Attention | None = None
    """Attention whose result it reads; None for other inputs."""

    @property
    def is_packable(self) -> bool:
        return self.name != _ROUTER

    @property
    def weights(self) -> int:
        return self.rows * self.columns


def tuned_chain(
    chain: Chain, architecture: Architecture, tuning: Tuning, *, fused_attention: bool = True
) -> Chain:
    """Return the chain of an architecture in which the weights are frozen that a tuning does not
    train."""
    if tuning.is_full:
        return chain
    if any(block.attention.latent is not None for block in architecture.blocks):
        reason = "frozen latent attention is not modelled"
        raise impossible(f"use {tuning.options}", reason, "training all weights")
    frozen_names = _frozen_names(chain, tuning)
    _check_targets(chain, architecture, tuning)
    layers = TransformerLayers(architecture, chain.sequence_length, chain.dtype, fused_attention)
    blocks = iter((*architecture.encoder, *architecture.blocks))
    tuned: list[Layer] = []
    needed = False
    for layer in chain.layers:
        block = next(blocks) if layer.kind in ("block", "encoder", "decoder") else None
        targets = (
            tuning.targets if tuning.train is Train.LORA and layer.name not in frozen_names else ()
        )
        is_trained = tuning.train is Train.FULL and layer.name not in frozen_names
        if is_trained:
            tuned.append(
                layer
                if needed or layer.kind == "embedding"
                else _first_trained(layers, layer, block)
            )
        elif block is not None:
            tuned.append(_FrozenBlock(layers, block, tuning, targets).layer(layer, needed))
        else:
            tuned.append(_frozen_embedding_or_head(layers, layer, chain, needed))
        needed = needed or tuned[-1].parameters > 0 or tuned[-1].tied_parameters > 0
    if not needed:
        raise refused(f"{tuning.options} leaves no weight to train")
    return replace(chain, layers=tuple(tuned), tuning=tuning)


def _check_targets(chain: Chain, architecture: Architecture, tuning: Tuning) -> None:
    """Raise an ``InputError`` for a target that no block of the model has, unless all are named."""
    if tuning.train is not Train.LORA or tuning.targets == TARGETS:
        return
    blocks = (*architecture.encoder, *architecture.blocks)
    matrices = {
        matrix.name for block in blocks for matrix in block_matrices(block, architecture.hidden)
    }
    for target in tuning.targets:
        if target not in matrices:
            listed = ", ".join(name for name in TARGETS if name in matrices)
            expected = f"matrices of {chain.name}: {listed}"
            raise bad_input(expected, target, "--lora targets")


def _first_trained(layers: TransformerLayers, layer: Layer, block: Block | None) -> Layer:
    """Return a layer that is trained and whose input needs no gradient: (4) for the matrices that
    read it, unless a norm in front of them is trained too."""
    head = layers.architecture.head
    if block is None:
        is_plain = head.norm is None and head.transform is None and head.width == layers.hidden
        return replace(layer, backward_flop=layer.backward_flop / 2) if is_plain else layer
    if block.pre_norm and block.norm.parameters(1):
        return layer
    first = next(_in_order(list(block_matrices(block, layers.hidden))))
    saved = 2.0 * layers.tokens * sum(matrix.weights for matrix in first)
    return replace(layer, backward_flop=layer.backward_flop - saved)


def _frozen_names(chain: Chain, tuning: Tuning) -> set[str]:
    """Return the layers that patterns name; raise an ``InputError`` for a pattern that names
    none."""
    names = [layer.name for layer in chain.layers]
    frozen: set[str] = set()
    for pattern in tuning.freeze:
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            listed = f"{names[0]}, {names[1]} to {names[-2]}, {names[-1]}"
            expected = f"a pattern of layer names of {chain.name}: {listed}"
            raise bad_input(expected, pattern, "--freeze")
        frozen.update(matching)
    tied = [
        (layer.name, names[layer.tied_to]) for layer in chain.layers if layer.tied_to is not None
    ]
    for _ in tied:  # (6), along chains of ties
        frozen.update(name for pair in tied if not frozen.isdisjoint(pair) for name in pair)
    return frozen


def _frozen_embedding_or_head(
    layers: TransformerLayers, layer: Layer, chain: Chain, needed: bool
) -> Layer:
    """Return an embedding or a head that is not trained."""
    width = chain.dtype.bytes
    has_backward = needed
    backward = layer.backward_flop / 2 if needed else 0.0
    moved = layer.activation_bytes
    kept = moved if has_backward else 0.0
    if layer.kind == "head" and has_backward:
        kept -= layers.stream * width  # what the logits' product reads
    frozen = Frozen(
        parameters=layer.parameters,
        bytes=float(layer.parameters * width),
        tied_bytes=float(layer.tied_parameters * width),
        has_backward=has_backward,
        backward_share=backward / layer.backward_flop if layer.backward_flop else 1.0,
    )
    working = layer.working_bytes if has_backward else 0.0
    return replace(
        layer,
        parameters=0,
        tied_parameters=0,
        backward_flop=backward,
        activation_bytes=max(kept, 0.0),
        moved_bytes=moved,
        stream_bytes=min(layer.stream_bytes, max(kept, 0.0)),
        working_bytes=working,
        loss_bytes=layer.loss_bytes if has_backward else 0.0,
        frozen=frozen,
    )


class _FrozenBlock:
    """A builder that applies (1) to (5) to one block."""

    def __init__(
        self, layers: TransformerLayers, block: Block, tuning: Tuning, targets: tuple[str, ...]
    ) -> None:
        self.layers, self.block, self.tuning, self.targets = layers, block, tuning, targets
        self.matrices = list(block_matrices(block, layers.hidden))
        self.adapted = [matrix for matrix in self.matrices if matrix.name in targets]

    def layer(self, layer: Layer, needed: bool) -> Layer:
        """Return the layer with its weights frozen; ``needed``: whether the gradient of its input
        is needed."""
        rank, tokens = self.tuning.rank, self.layers.tokens
        adapters = [(matrix, rank * (matrix.rows + matrix.columns)) for matrix in self.adapted]
        more = sum(2.0 * tokens * matrix.active * weights for matrix, weights in adapters)
        backward, kept, dropped = self._backward(needed), 0.0, 0.0
        if needed or adapters:
            kept, dropped = self._kept(needed)
        in_experts = sum(
            matrix.copies * weights for matrix, weights in adapters if matrix.in_experts
        )
        trained = sum(matrix.copies * weights for matrix, weights in adapters)
        frozen = self._frozen(layer, has_backward=needed or bool(adapters))
        if not frozen.has_backward:
            frozen = replace(frozen, forward_bytes=self._forward_bytes())
        forward = layer.forward_flop + more
        shares = (forward / layer.forward_flop, backward / layer.backward_flop)
        return replace(
            layer,
            forward_flop=forward,
            backward_flop=backward,
            parameters=trained,
            active_parameters=None if layer.active_parameters is None else trained - in_experts,
            expert_parameters=in_experts,
            activation_bytes=kept,
            moved_bytes=layer.activation_bytes,
            stream_bytes=min(layer.stream_bytes, kept),
            score_bytes=layer.score_bytes if kept else 0.0,
            selective_bytes=min(dropped, kept),
            selective_flop=layer.selective_flop if dropped else 0.0,
            frozen=replace(frozen, forward_share=shares[0], backward_share=shares[1]),
        )

    def _frozen(self, layer: Layer, *, has_backward: bool) -> Frozen:
        width = self.layers.width
        packed = [
            matrix
            for matrix in self.matrices
            if matrix.is_packable and self.tuning.base is not None
        ]
        unpacked = max((width * matrix.weights for matrix in packed), default=0)
        in_experts = [matrix for matrix in packed if matrix.in_experts]
        num_packed = sum(matrix.copies * matrix.weights for matrix in packed)
        num_in_experts = sum(matrix.copies * matrix.weights for matrix in in_experts)
        return Frozen(
            parameters=layer.parameters,
            bytes=(layer.parameters - num_packed) * width + self._packed_bytes(packed),
            expert_parameters=layer.expert_parameters,
            expert_bytes=(layer.expert_parameters - num_in_experts) * width
            + self._packed_bytes(in_experts),
            active_share=layer.active_share,
            packed_parameters=num_packed,
            packed_bytes=self._packed_bytes(packed),
            unpacked_bytes=float(unpacked),
            has_backward=has_backward,
        )

    def _forward_bytes(self) -> float:
        """Return the bytes that a forward that keeps nothing holds for a moment: the larger part,
        with its input and the residual."""
        full, layers = self.layers.block_elements(self.block), self.layers
        larger = max(full.attention + full.normed + full.encoder, full.inner + full.routed)
        return (larger + 2 * layers.stream) * layers.width + full.score_bytes

    def _packed_bytes(self, matrices: list[_Matrix]) -> float:
        base = self.tuning.base
        if base is None:
            return 0.0
        return sum(
            matrix.copies * base.matrix_bytes(matrix.rows, matrix.columns) for matrix in matrices
        )

    def _backward(self, needed: bool) -> float:
        """Return the FLOP of the backward (3)."""
        rank, tokens = self.tuning.rank, self.layers.tokens
        flop = 0.0
        is_needed = needed
        for group in _in_order(self.matrices):
            if group[0].attention is not None:
                flop += self._core_backward(group[0].attention, is_needed=needed)
            for matrix in group:
                per_weight = 2.0 * tokens * matrix.active
                flop += per_weight * matrix.weights if is_needed else 0.0
                if matrix.name in self.targets:
                    flop += 2 * per_weight * rank * (matrix.rows + matrix.columns)
                    flop -= 0.0 if is_needed else per_weight * rank * matrix.columns
            is_needed = is_needed or any(matrix.name in self.targets for matrix in group)
        return flop

    def _core_backward(self, attention: Attention, *, is_needed: bool) -> float:
        """Return the FLOP of the backward of attention proper.

        The forward has two products. The backward has one for values, one for scores, and one each
        for queries and keys; a fused kernel does all of them or none.
        """
        forward = self.layers.core_flop(attention)
        named = {name: is_needed or name in self.targets for name in "qkv"}
        if self.layers.fused:
            return 2 * forward if any(named.values()) else 0.0
        return forward / 2 * (named["v"] + (named["q"] or named["k"]) + named["q"] + named["k"])

    def _kept(self, needed: bool) -> tuple[float, float]:
        """Return the kept bytes (5), and how many of them selective recomputation drops."""
        block, layers = self.block, self.layers
        full = layers.block_elements(block)
        names = set(self.targets)
        reads_input = (
            bool(names & {"q", "k", "v"}),
            *((bool(names & {"q", "k", "v"}),) if block.cross is not None else ()),
            bool(names & {"gate", "up"}),
        )
        kept_inputs = 1 if block.parallel and any(reads_input) else sum(reads_input)
        inputs = kept_inputs * layers.stream
        attention_needed = needed or bool(names & {"q", "k", "v"})
        inner_needed = attention_needed or bool(names & {"o", "gate", "up"})
        has_result = attention_needed or "o" in names
        num_norms = block.num_norms if needed else max(0, block.num_norms - 2 + has_result)
        results = layers.tokens * sum(
            matrix.columns for matrix in self.matrices if matrix.attention is not None
        )
        attention = full.attention + full.normed if attention_needed else results * has_result
        norms = num_norms * layers.stream
        activated = full.activated if "down" in names else 0.0
        inner = full.inner - full.activated + activated if inner_needed else activated
        routed = full.routed if names & {"gate", "up"} else full.routed / 2
        adapters = sum(layers.tokens * matrix.active * self.tuning.rank for matrix in self.adapted)
        elements = norms + inputs + inner + routed + attention + full.encoder + adapters
        scores = full.score_bytes * attention_needed
        normed = full.normed * attention_needed
        kept = elements * layers.width + full.mask_bytes + scores
        return kept, (inputs + activated + normed) * layers.width + scores


def _in_order(matrices: list[_Matrix]) -> Iterator[list[_Matrix]]:
    """Yield groups of consecutive matrices that read the same input."""
    group: list[_Matrix] = []
    for matrix in matrices:
        if group and matrix.reads != group[0].reads:
            yield group
            group = []
        group.append(matrix)
    if group:
        yield group


def block_matrices(block: Block, hidden: int) -> Iterator[_Matrix]:
    """Yield the matrices of a block that can have adapters and can be packed."""
    for attention in (block.attention, block.cross):
        if attention is not None:
            yield from _attention_matrices(attention, hidden)
    part = block.feed_forward
    if isinstance(part, FeedForward):
        yield from _feed_forward_matrices(part, hidden)
        return
    yield _Matrix(_ROUTER, part.count, hidden, _INPUT)
    if part.shared is not None:
        yield from _feed_forward_matrices(part.shared, hidden)
    yield from _expert_matrices(part, hidden)


def _attention_matrices(attention: Attention, hidden: int) -> Iterator[_Matrix]:
    yield _Matrix("q", attention.query_width, hidden, _INPUT)
    yield _Matrix("k", attention.key_width, hidden, _INPUT)
    yield _Matrix("v", attention.key_width, hidden, _INPUT)
    yield _Matrix("o", hidden, attention.query_width, _ATTENTION, attention=attention)


def _feed_forward_matrices(part: FeedForward, hidden: int) -> Iterator[_Matrix]:
    if part.gated:
        yield _Matrix("gate", part.inner, hidden, _INPUT)
    yield _Matrix("up", part.inner, hidden, _INPUT)
    yield _Matrix("down", hidden, part.inner, _INNER)


def _expert_matrices(part: Experts, hidden: int) -> Iterator[_Matrix]:
    for matrix in _feed_forward_matrices(part.expert, hidden):
        yield replace(matrix, copies=part.count, active=part.active, in_experts=True)
