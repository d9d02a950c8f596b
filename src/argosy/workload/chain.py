"""Define a model as a chain of layers: what each computes, keeps, and passes to the next.

All amounts are for one sample (one sequence, one image) at the chain's own sequence length and
dtype, so a micro-batch of n samples costs n times as much. Parameters do not depend on the batch.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from argosy.dtype import Dtype
from argosy.workload.systems import Buffers, Selective
from argosy.workload.tuning import FULL, Tuning

_FP8_BYTES = 1
# Bytes of an element that PowerSGD sums, and of an error that it keeps: fp32.
SUMMED_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """A set of weights of a layer that training reads and does not change: they have no gradient
    and no optimizer state."""

    parameters: int
    """Number of frozen weights, beside ``Layer.parameters``."""
    bytes: float
    """Bytes that they take on a device that holds the layer."""
    expert_parameters: int = 0
    """Number of ``parameters`` that are in experts."""
    expert_bytes: float = 0.0
    """Number of ``bytes`` that are in experts."""
    active_share: float = 1.0
    """Share of the frozen experts that one token meets."""
    tied_bytes: float = 0.0
    """Frozen weights shared with ``Layer.tied_to``, beside ``bytes``."""
    packed_parameters: int = 0
    """Number of ``parameters`` stored in 8 or 4 bits, which every pass over the layer unpacks."""
    packed_bytes: float = 0.0
    """Number of ``bytes`` that the packed parameters take."""
    unpacked_bytes: float = 0.0
    """Of the largest matrix that is unpacked at a time."""
    forward_bytes: float = 0.0
    """Bytes per sample that its forward holds for a moment, including input and output, if it has
    no backward for which something is kept."""
    has_backward: bool = True
    """Whether a backward runs through the layer; False if nothing in it or before it is trained."""
    forward_share: float = 1.0
    """FLOP of its forward over those without adapters; times measured without adapters are scaled
    by it."""
    backward_share: float = 1.0
    """FLOP of its backward over those if all weights were trained; times measured so are scaled by
    it."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer of a chain, which is the smallest piece that a pipeline stage may begin or end
    with."""

    name: str
    kind: str
    """Kind of layer: ``embedding``, ``block``, ``head``, ... Layers of one kind and shape cost the
    same."""
    forward_flop: float
    """FLOP per sample; 0 if only measured times are known."""
    backward_flop: float
    """FLOP per sample for both gradients; 2x forward for matrix products."""
    parameters: int
    """Number of weights this layer trains; tied ones are not counted (see ``tied_to``)."""
    activation_bytes: float
    """Bytes per sample that are kept from this layer's forward to its backward, including its
    input."""
    output_bytes: float
    """Bytes per sample that are passed to the next layer; they cross the network if a stage ends
    here."""
    selective_bytes: float = 0.0
    """Number of ``activation_bytes`` that selective recomputation drops."""
    selective_flop: float = 0.0
    """FLOP per sample that selective recomputation repeats."""
    score_bytes: float = 0.0
    """Number of ``activation_bytes`` that are scores of unfused attention."""
    stream_bytes: float = 0.0
    """Number of ``activation_bytes`` outside the matrix products of a tensor-parallel group, which
    its devices keep whole unless they split the sequence there."""
    working_bytes: float = 0.0
    """Bytes per sample that its backward holds for a moment beside kept bytes and the gradient that
    it receives; 0 if that was not measured."""
    loss_bytes: float = 0.0
    """Number of ``working_bytes`` that are copies of logits and of their gradient."""
    reduced_bytes: float = 0.0
    """Bytes per sample that a tensor-parallel group all-reduces in one forward, and again in one
    backward."""
    active_parameters: int | None = None
    """Number of weights that one token meets, fewer than all in a mixture of experts; None: all of
    them."""
    expert_parameters: int = 0
    """Number of ``parameters`` that are in experts."""
    num_experts: int = 0
    routed_bytes: float = 0.0
    """Bytes per sample of inputs of experts, once for every expert that a token is sent to."""
    key_value_bytes: float = 0.0
    """Per sample: keys and values, which every part of a split sequence needs from every other."""
    moved_bytes: float | None = None
    """Per sample: bytes by which memory traffic is measured: what fused kernels would keep if all
    weights were trained. None: ``activation_bytes``."""
    attention_flop: float = 0.0
    """Number of ``forward_flop`` in which queries, keys and values meet."""
    last_flop: float = 0.0
    """Number of ``forward_flop`` in a last product whose result no backward needs."""
    second_flop: float = 0.0
    """Number of ``forward_flop`` in every second product; 0: half of those outside attention."""
    max_tensor_width: int = 1
    """Largest number of devices that tensor parallelism can split this layer over (its key-value
    heads)."""
    max_context: int = 1
    """Largest number of parts that the sequence can be cut into; 1 if no cut is known to be
    possible."""
    launches: float | None = None
    """Kernels that its forward starts, over those of a transformer's block; None: one block's, if
    it has any FLOP."""
    operations: tuple[int, int] | None = None
    """First forward operation in a captured program, and one past the last; None for other
    models."""
    tied_to: int | None = None
    """Index of the layer whose weights this one shares."""
    tied_parameters: int = 0
    """Number of trained weights shared with ``tied_to``. Layers that are tied to one layer share
    the same weights of it; smaller numbers are parts of the larger ones."""
    frozen: Frozen | None = None
    """Weights that are not trained; None if there are none."""
    summed_parameters: int | None = None
    """Number of elements that are summed for the gradients of ``parameters``
    (``workload.powersgd``); None: one each."""

    @property
    def has_backward(self) -> bool:
        """Return whether a backward runs through the layer, so that the gradient of its output is
        needed."""
        return self.frozen is None or self.frozen.has_backward

    @property
    def active_share(self) -> float:
        """Return the share of its experts that one token meets; 1 without experts."""
        if not self.expert_parameters or self.active_parameters is None:
            return 1.0
        return 1 - (self.parameters - self.active_parameters) / self.expert_parameters

    @property
    def cost_key(self) -> tuple[object, ...]:
        """Return all fields except name, place and tied layer: equal for layers that cost the
        same."""
        return tuple(
            value
            for name, value in vars(self).items()
            if name not in ("name", "operations", "tied_to")
        )

    def __repr__(self) -> str:
        parameters, flop = self.parameters / 1e6, self.forward_flop / 1e9
        return f"{self.name}: {parameters:.4g} M parameters, {flop:.4g} GFLOP forward"


class LayerSection(Protocol):
    """A range of layers that ends before ``end``, such as a stage."""

    @property
    def first(self) -> int: ...
    @property
    def end(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A model that is given layer by layer, at one sequence length and dtype."""

    name: str
    layers: tuple[Layer, ...]
    sequence_length: int
    """Tokens per sample; 1 if a sample is not a sequence."""
    dtype: Dtype
    optimizer: str = "adamw"
    source: str = ""
    """Source of the figures."""
    activation_factor: float = 1.0
    """Memory that live activations take over their bytes; a calibration sets what an allocator
    adds."""
    gradient_dtype: Dtype | None = None
    """Format in which gradients are kept; None: that of the weights."""
    reduce_dtype: Dtype | None = None
    """Format in which gradients are summed over devices; None: that in which they are kept."""
    selective: Selective = Selective.ELEMENTWISE
    """Meaning of selective recomputation."""
    stops_early: bool = False
    """Whether full recomputation ends as soon as everything that a backward needs is there."""
    shard: int | None = None
    """Number of holders over which ZeRO divides state; None: all."""
    repeats_exchanges: bool = False
    """Whether backwards repeat exchanges of tensor-parallel groups whose results were not kept."""
    fused_loss: bool = False
    """Whether the loss is computed from the logits without copies of them."""
    buffers: Buffers = Buffers.ARGOSY
    """System whose temporary tensors are counted."""
    sequence_parallel: bool = True
    """Whether tensor-parallel groups split the sequence outside their matrix products."""
    tuning: Tuning = FULL
    """Choice of the model's weights that are trained."""
    async_tensor: bool = False
    """Whether tensor-parallel groups exchange in pieces beside their matrix products."""
    powersgd: int = 0
    """Rank of the matrices as which gradients are summed; 0: gradients are summed whole."""

    def layers_of(self, stage: LayerSection) -> tuple[Layer, ...]:
        """Return the layers of a stage."""
        return self.layers[stage.first : stage.end]

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes of one gradient that is kept."""
        return (self.gradient_dtype or self.dtype).bytes

    def exchanged_bytes(self, zero: int) -> float:
        """Return the mean bytes of one weight that go once around the devices that hold it; a lower
        bound under PowerSGD.

        A sum scatters and gathers gradients; ZeRO scatters gradients and gathers weights, ZeRO 3
        twice.
        """
        if self.powersgd:
            return SUMMED_BYTES * self.least_summed_share
        summed = (self.reduce_dtype or self.gradient_dtype or self.dtype).bytes
        gathers = {0: 0, 3: 2}.get(zero, 1)
        gathered = _FP8_BYTES if self.gathers_fp8 else self.dtype.bytes
        return (summed + gathers * gathered) / (1 + gathers)

    @property
    def gathers_fp8(self) -> bool:
        """Return whether weights and inputs of products are gathered in fp8, as by torchtitan."""
        return self.buffers.is_torchtitan and self.dtype is Dtype.FP8

    @cached_property
    def least_summed_share(self) -> float:
        """Return elements summed over weights, for the layer whose gradients shrink most while they
        are summed."""
        pairs = (
            (layer.summed_parameters, layer.parameters) for layer in self.layers if layer.parameters
        )
        return min(
            (1.0 if summed is None else summed / number for summed, number in pairs), default=1.0
        )

    @property
    def is_captured(self) -> bool:
        """Return whether its layers are segments of a program (``space.operations.segments``)."""
        return bool(self.layers) and self.layers[0].operations is not None

    @property
    def splits_stream(self) -> bool:
        """Return whether tensor-parallel groups split the sequence outside their products; those of
        a captured program never do."""
        return self.sequence_parallel and not self.is_captured

    @cached_property
    def parameters(self) -> int:
        """Return the number of trained weights; tied ones count once."""
        return sum(layer.parameters for layer in self.layers)

    @cached_property
    def frozen_parameters(self) -> int:
        """Return the number of weights that are not trained; tied ones count once."""
        return sum(layer.frozen.parameters for layer in self.layers if layer.frozen is not None)

    @cached_property
    def frozen_bytes(self) -> float:
        """Return the bytes of one copy of the frozen weights."""
        return sum(layer.frozen.bytes for layer in self.layers if layer.frozen is not None)

    @cached_property
    def first_backward(self) -> int:
        """Return the first layer that a backward runs through: no gradient crosses a cut before
        it."""
        return next(
            (index for index, layer in enumerate(self.layers) if layer.has_backward),
            len(self.layers),
        )

    def returned_bytes(self, layer: int) -> float:
        """Return the bytes per sample of the gradient that a stage sends back to this layer."""
        return self.layers[layer].output_bytes if layer >= self.first_backward else 0.0

    @cached_property
    def shared(self) -> tuple[tuple[tuple[int, ...], int], ...]:
        """Return the layers that share trained weights, the one that others are tied to first, and
        the number of shared weights."""
        users: dict[int, list[int]] = {}
        for index, layer in enumerate(self.layers):
            if layer.tied_to is not None:
                users.setdefault(layer.tied_to, []).append(index)
        numbers = {
            home: max(self.layers[index].tied_parameters for index in tied)
            for home, tied in users.items()
        }
        return tuple(
            ((home, *tied), numbers[home]) for home, tied in users.items() if numbers[home]
        )

    @cached_property
    def forward_flop(self) -> float:
        """Return the FLOP of a forward per sample."""
        return sum(layer.forward_flop for layer in self.layers)

    @property
    def states_work(self) -> bool:
        """Return whether layers can be priced without a profile; captured ones may have bytes to
        move and no FLOP."""
        return self.forward_flop > 0 or self.is_captured

    def with_selective(self, selective: Selective, *, compiled: bool) -> Chain:
        """Return the chain with another meaning of selective recomputation than that of Argosy's
        own runtime. A compiler drops a kept result that no backward reads."""
        assert self.selective is Selective.ELEMENTWISE, "what selective means is set once"
        if selective is Selective.ELEMENTWISE:
            return self
        layers = tuple(_with_selective(layer, selective, compiled) for layer in self.layers)
        return replace(self, layers=layers, selective=selective)

    def with_loss(self, *, fused: bool, buffers: Buffers) -> Chain:
        """Return the chain with the copies of logits that a system makes; none if the loss is
        fused."""
        assert not self.fused_loss, "whether a loss is fused is set once"
        if not fused and buffers is Buffers.ARGOSY:
            return self
        layers = tuple(
            _with_loss(layer, 0.0 if fused else _COPIES_OF_LOGITS[buffers])
            if layer.loss_bytes
            else layer
            for layer in self.layers
        )
        return replace(self, layers=layers, fused_loss=fused, buffers=buffers)

    @property
    def whole_outputs(self) -> int:
        """Return the number of tensors of a layer's whole output that a tensor-parallel group holds
        at a time (``cost.memory``, (9))."""
        if self.buffers is Buffers.ARGOSY:
            return _WHOLE_OUTPUTS
        return _WHOLE_OUTPUTS_OF_TORCHTITAN + (not self.async_tensor)

    def split_loss_bytes(self, layer: Layer) -> float:
        """Return the bytes per sample that a loss over shards of the vocabulary holds beside
        ``working_bytes``."""
        if self.fused_loss or self.buffers is Buffers.ARGOSY:
            return 0.0
        return layer.loss_bytes * _MORE_IF_SPLIT / _COPIES_OF_LOGITS[Buffers.ARGOSY]

    @property
    def kept_logit_bytes(self) -> float:
        """Return the bytes per sample of 16-bit logits that a pipeline keeps to the end of an
        iteration."""
        if self.buffers is Buffers.ARGOSY:
            return 0.0
        return self.layers[-1].loss_bytes * _LOGIT / _COPIES_OF_LOGITS[Buffers.ARGOSY]

    def with_tensor_exchange(self, *, is_async: bool) -> Chain:
        """Return the chain with the part of its reductions that tensor-parallel groups wait for, if
        the rest runs beside compute; torchtitan gathers in fp8 if products are in fp8."""
        assert not self.async_tensor, "whether exchanges are asynchronous is set once"
        part = (_EXPOSED if is_async else 1.0) * (_GATHERED_IN_FP8 if self.gathers_fp8 else 1.0)
        layers = tuple(
            replace(layer, reduced_bytes=part * layer.reduced_bytes) for layer in self.layers
        )
        return replace(self, layers=layers, async_tensor=is_async)

    def runs(self) -> list[tuple[Layer, int]]:
        """Return the runs of consecutive layers that differ only in name, with their lengths.

        A 32-layer transformer is [(embedding, 1), (block, 32), (head, 1)].
        """
        groups = [
            list(group)
            for _, group in itertools.groupby(self.layers, key=lambda layer: layer.cost_key)
        ]
        return [(group[0], len(group)) for group in groups]

    @property
    def counted_parameters(self) -> str:
        """Return ``0.1244 B parameters``, or with frozen ones ``8.03 B parameters of which 6.816 M
        are trained``."""
        if not self.frozen_parameters:
            return f"{self.parameters / 1e9:.4g} B parameters"
        everything = (self.parameters + self.frozen_parameters) / 1e9
        trained = (
            f"{self.parameters / 1e6:.4g} M"
            if self.parameters < 1e9
            else f"{self.parameters / 1e9:.4g} B"
        )
        return f"{everything:.4g} B parameters of which {trained} are trained"

    def __repr__(self) -> str:
        return (
            f"{self.name}: {len(self.layers)} layers, {self.counted_parameters}, "
            f"sequence {self.sequence_length}, {self.dtype}"
        )


def captured_chain(
    name: str,
    layers: tuple[Layer, ...],
    dtype: Dtype,
    optimizer: str,
    powersgd: int = 0,
    sequence_length: int = 1,
) -> Chain:
    """Return the chain of a captured program; its sequences have one token unless they can be
    cut."""
    return Chain(
        powersgd=powersgd,
        name=name,
        layers=layers,
        sequence_length=sequence_length,
        dtype=dtype,
        optimizer=optimizer,
        source="captured",
    )


# Share of a block's kept bytes that is neither its input, nor the result of attention, nor of every
# second product: 9.7 of 17 times the residual stream in a Llama block whose feed-forward is 3.5
# times as wide, and about as much in other models.
_OF_PRODUCTS = 0.57
# Whole tensors of a group: the input of a product and its result.
_WHOLE_OUTPUTS = 2
# Whole tensors of torchtitan's groups in a backward: the gathered inputs of attention and
# feed-forward, a gradient of the latter, and the sum that is scattered. What is gathered or
# scattered along the sequence is copied once more, unless exchanges are asynchronous.
_WHOLE_OUTPUTS_OF_TORCHTITAN = 4
# Bytes of copies of a logit, and of its gradient, beside the 4 that are kept, with 16-bit weights.
# Torchtitan frees 16-bit logits before the backward, but its allocator finds no other tensor for
# their 2 bytes; beside them are the fp32 logits and the gradient of the log-probabilities.
_COPIES_OF_LOGITS = {
    Buffers.ARGOSY: 12.0,
    Buffers.TORCHTITAN: 10.0,
    Buffers.TORCHTITAN_2025: 10.0,
}
# Bytes of a 16-bit logit.
_LOGIT = 2.0
# Bytes of a logit that a loss over shards of the vocabulary holds more: exponentials in fp32.
_MORE_IF_SPLIT = 4.0


def _with_loss(layer: Layer, copies: float) -> Layer:
    """Return a layer whose loss makes ``copies`` bytes of copies of a logit of 16 bits."""
    less = 1 - copies / _COPIES_OF_LOGITS[Buffers.ARGOSY]
    return replace(layer, working_bytes=layer.working_bytes - less * layer.loss_bytes)


# Share of a tensor-parallel group's exchange that asynchronous tensor parallelism leaves exposed:
# steps that torchtitan publishes with and without it differ by a third, in the mean of four pairs.
_EXPOSED = 0.66
# Bytes of a reduction of which the gather, but not the scatter, is in fp8, over those in 16 bits.
_GATHERED_IN_FP8 = 0.75


def _with_selective(layer: Layer, selective: Selective, compiled: bool) -> Layer:
    """Return a layer with another meaning of selective recomputation than that of Argosy's own
    runtime; an eager program keeps the result of the last product, although no backward reads
    it."""
    if not layer.attention_flop:
        return replace(layer, selective_bytes=0.0, selective_flop=0.0)
    if selective is Selective.ATTENTION:
        again = layer.attention_flop if layer.score_bytes else 0.0
        return replace(layer, selective_bytes=layer.score_bytes, selective_flop=again)
    dropped = layer.score_bytes + _OF_PRODUCTS * (layer.activation_bytes - layer.score_bytes)
    dropped -= 0.0 if compiled else layer.output_bytes
    again = layer.second_flop or (layer.forward_flop - layer.attention_flop) / 2
    if selective is Selective.PRODUCTS_ALONE:
        dropped += layer.output_bytes
        again += layer.attention_flop
    return replace(layer, selective_bytes=dropped, selective_flop=again)
