"""Count the bytes of memory that a stage holds on each of its devices.

A stage has P parameters, Q of them in experts. Its replicas cut the sequence into c parts, so that
there are n = replicas x c holders of the weights, and e holders divide the experts. A device does
the share r of the work of a replica that has n_samples. r c is 1 if a part of the sequence has one
device, whatever the part's size; Q / e is that of the holder with most experts.

    (1)  weights    = (r c (P - Q) + r c Q / e) b     b bytes per element of the dtype
    (2)  gradients  = (1) with the bytes of ``gradient_dtype`` for b if that is stated
    (3)  optimizer  = (1) with s for b                s from ``workload.optimizer``
         ZeRO 1 divides (3) by the number of holders that have the same weights: n, for experts
         n / e; ZeRO 2 also (2), ZeRO 3 also (1). PowerSGD keeps an error of 4 bytes for each weight
         that n > 1 holders have, in (2)
    (4)  activations of one micro-batch = r n_samples (sum of the layers' kept bytes, less what
         recomputation drops)
    (5)  recomputed in a backward = r n_samples (the largest that a layer of the stage has dropped)
    (6)  on their way between devices = r n_samples (the largest of a layer: if c > 1, keys and
         values twice over, and their gradients in a backward; if e > 1, routed tokens)
    (7)  passing through a backward = r n_samples (the largest over layers l of what l holds for a
         moment and the gradient it receives, less what the layers behind it have freed), for layers
         of which it was measured
    (8)  gathered for a moment = r c (the weights of the largest layer, experts over e holders) b w
         with w = 3 + 1 / n in a backward under ZeRO 2 and 3, and 2 + 1 / n in a forward under ZeRO
         3: one for a gradient, 1 / n for the part that stays of it, one for a vector with what is
         sent, one for what arrives meanwhile: parts of gradients (``cost.scatter``), or weights of
         the next layer; otherwise w = 0
    (9)  whole inputs and results = 2 n_samples / c (the largest output of a layer) in a
         tensor-parallel group, whose products read all of a gathered input and write all of a
         result before it is scattered
    (10) frozen weights = r c (their bytes, those of experts over e holders, and the largest matrix
         that is unpacked at a time), in (1) beside the trained ones that P and Q count; ZeRO leaves
         them whole. Layers that no backward runs through keep nothing, and nothing of them is
         computed again or passes through a backward; in a forward the largest of them holds its
         ``forward_bytes`` for a moment
    (11) offloaded (``Stage.offload``): moments of the optimizer leave (3), while an fp32 copy of
         16-bit weights stays; weights leave (1) and (10); of (4) only the input of the stage stays.
         In their place a device has what is copied at a time, never more than all of it: in an
         update two pieces of moments (``PIECE_BYTES``), or those of the two largest layers if the
         optimizer updates whole tensors only, and the optimizer's temporary bytes of one piece; in
         a forward and in a backward what the stage's layers keep on average, and what the layer at
         work keeps; and twice the weights of the largest

   (12) if buffers are torchtitan's, a loss makes other copies in (7), (9) has other factors
        (``workload.chain``), and in place of (8), under ZeRO 3, the weights of embedding and head
        stay gathered, as are those of two blocks; in a backward the gradient of the head waits for
        that of the embedding, and one block's is summed in the dtype of sums, also under ZeRO 1.
        Under ZeRO 3 its shards are in fp32 only, in (3), and are cast when they are gathered. Since
        August 2025 only the head's weights stay gathered, and its gradient waits for no other
   (13) hybrid sharding (``Chain.shard``) divides state over that number of holders in place of n

(4) and (5) are multiplied by the chain's ``activation_factor``, which is 1 unless a calibration
sets it. Tensor-parallel groups are assumed to split activations along the sequence outside the
matrix products too. If ``sequence_parallel`` is off, every device of a group has the activations
outside products (``stream_bytes``, and the inputs that full recomputation keeps) whole: of kept
bytes A with U outside, r (A - U) + U / c in place of r A. The schedule determines how many
micro-batches are in flight at a time; the simulator adds up (4) as it runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from argosy.errors import bad_input, closest
from argosy.plan.plan import Recompute, Stage
from argosy.units import MIB
from argosy.workload.chain import SUMMED_BYTES, Chain, Frozen, Layer
from argosy.workload.optimizer import OPTIMIZERS, optimizer_bytes_per_weight
from argosy.workload.systems import Buffers

# Share of a device's memory that a plan may fill: the rest is workspace and fragmentation.
USABLE = 0.92
# Number of layers whose activations, weights or moments a device holds while they are copied (11).
COPIED_LAYERS = 2
# Bytes of moments that an update copies and updates at a time (11).
PIECE_BYTES = 64 * MIB
# Bytes of moments on the device that the runtime updates together.
UPDATED_BYTES = 256 * MIB


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """A record of the bytes that a device holds of a stage between iterations."""

    weights: float
    """Bytes of trained and frozen weights."""
    gradients: float
    optimizer: float
    frozen: float = 0.0
    """Bytes of ``weights`` that are frozen."""
    outside_moments: float = 0.0
    """Bytes of optimizer state that are kept outside the device."""
    outside_weights: float = 0.0
    """Bytes of trained weights that are kept outside the device."""
    outside_frozen: float = 0.0
    """Bytes of frozen weights that are kept outside the device."""
    errors: float = 0.0
    """Bytes that PowerSGD keeps of gradients that it has not passed on."""

    @property
    def total(self) -> float:
        """Return the bytes on the device."""
        return self.weights + self.gradients + self.optimizer + self.errors

    @property
    def outside(self) -> float:
        """Return the bytes that are kept outside the device."""
        return self.outside_moments + self.outside_weights + self.outside_frozen

    @property
    def updated(self) -> float:
        """Return the bytes that an update reads and writes."""
        return self.total - self.frozen - self.errors + self.outside_moments + self.outside_weights


def master_bytes(chain: Chain) -> float:
    """Return the bytes per weight of the optimizer's copy in fp32; 0 if it keeps none."""
    return optimizer_bytes(chain) - OPTIMIZERS[chain.optimizer].state_bytes


def optimizer_bytes(chain: Chain) -> float:
    """Return s in (3): the bytes of optimizer state per weight."""
    if chain.optimizer not in OPTIMIZERS:
        expected = f"one of the optimizers {', '.join(OPTIMIZERS)}"
        raise bad_input(
            expected, chain.optimizer, "optimizer", suggestion=closest(chain.optimizer, OPTIMIZERS)
        )
    return optimizer_bytes_per_weight(chain.optimizer, chain.dtype.bytes)


def stage_parameters(chain: Chain, stage: Stage) -> int:
    """Return the number of trained weights that a stage holds: those of its layers, and once those
    that they share with a layer elsewhere."""
    layers = chain.layers_of(stage)
    shared: dict[int, int] = {}
    for layer in layers:
        if layer.tied_to is not None and not stage.first <= layer.tied_to < stage.end:
            shared[layer.tied_to] = max(shared.get(layer.tied_to, 0), layer.tied_parameters)
    return sum(layer.parameters for layer in layers) + sum(shared.values())


def shared_parameters(chain: Chain, stage: Stage) -> tuple[int, int]:
    """Return the number of weights that every holder of a stage has, P - Q, and of those of experts
    that its holders divide, Q; Q is 0 if experts are not split."""
    split = (
        sum(layer.expert_parameters for layer in chain.layers_of(stage)) if stage.expert > 1 else 0
    )
    return stage_parameters(chain, stage) - split, split


def summed_parameters(chain: Chain, stage: Stage) -> float:
    """Return the number of elements that the holders of a stage sum for its gradients under
    PowerSGD.

    For weights that layers share with one elsewhere the number is a lower bound.
    """
    layers = chain.layers_of(stage)
    own = sum(layer.parameters for layer in layers)
    summed = sum(
        layer.parameters if layer.summed_parameters is None else layer.summed_parameters
        for layer in layers
    )
    return summed + chain.least_summed_share * (stage_parameters(chain, stage) - own)


def error_bytes(chain: Chain, num_holders: int) -> int:
    """Return the bytes of the error that PowerSGD keeps per weight of a stage; 0 if gradients are
    not summed, because there is one holder."""
    return SUMMED_BYTES if chain.powersgd and num_holders > 1 else 0


def state_bytes(chain: Chain, stage: Stage, share: float) -> StateBytes:
    """Return the bytes of (1) to (3) for one device of a stage."""
    common, split = shared_parameters(chain, stage)
    tensor_share = stage.tensor_share(share)
    split_here = split * max(stage.expert_shares)
    num_shards = min(stage.num_holders, chain.shard * stage.context if chain.shard else math.inf)

    def held(width: float, level: int) -> float:
        """Return the bytes at ``width`` bytes per weight; under ZeRO of at least ``level`` each
        element is kept by one of the holders that have it, evenly, whether experts or not."""
        if stage.zero >= level:
            return (common + split_here * stage.expert) * tensor_share * width / num_shards
        return (common + split_here) * tensor_share * width

    frozen = tensor_share * frozen_bytes(chain, stage) if chain.frozen_parameters else 0.0
    casts = chain.buffers.is_torchtitan and stage.zero == 3 and master_bytes(chain) > 0
    state = StateBytes(
        weights=(0.0 if casts else held(chain.dtype.bytes, 3)) + frozen,
        gradients=held(chain.gradient_bytes, 2),
        optimizer=held(optimizer_bytes(chain), 1),
        frozen=frozen,
        errors=(common + split) * error_bytes(chain, stage.num_holders) if chain.powersgd else 0.0,
    )
    if not stage.offload:
        return state
    moments = held(OPTIMIZERS[chain.optimizer].state_bytes, 1) if stage.offload.optimizer else 0.0
    is_kept = stage.offload.weights is None
    return replace(
        state,
        weights=state.weights if is_kept else 0.0,
        optimizer=state.optimizer - moments,
        frozen=frozen if is_kept else 0.0,
        outside_moments=moments,
        outside_weights=0.0 if is_kept else state.weights - frozen,
        outside_frozen=0.0 if is_kept else frozen,
    )


def frozen_bytes(chain: Chain, stage: Stage) -> float:
    """Return the bytes of frozen weights (10) on a holder of all tensors of a stage; those that
    layers share with one elsewhere count once."""
    own = unpacked = 0.0
    shared: dict[int, float] = {}
    for layer in chain.layers_of(stage):
        if layer.frozen is not None:
            own += held_frozen_bytes(layer.frozen, stage.expert)
            unpacked = max(unpacked, layer.frozen.unpacked_bytes)
            if layer.tied_to is not None and not stage.first <= layer.tied_to < stage.end:
                shared[layer.tied_to] = max(shared.get(layer.tied_to, 0.0), layer.frozen.tied_bytes)
    return own + unpacked + sum(shared.values())


def held_frozen_bytes(frozen: Frozen, expert: int) -> float:
    """Return the bytes of frozen weights of one layer on one of the holders that its experts are
    split over."""
    return frozen.bytes - frozen.expert_bytes * (1 - 1 / expert)


def activation_bytes(chain: Chain, stage: Stage, samples: int, share: float) -> float:
    """Return the bytes of activations (4) that one micro-batch keeps on one device, with (11)."""
    kept = kept_bytes(chain, stage, samples, share)
    if (
        stage.offload.activations is None
        or not stage.first
        or not chain.layers[stage.first].has_backward
    ):
        return kept if stage.offload.activations is None else 0.0
    given = chain.layers[stage.first - 1].output_bytes
    return min(kept, samples * _on_device(chain, stage, given, given, share))


def kept_bytes(chain: Chain, stage: Stage, samples: int, share: float) -> float:
    """Return the bytes of activations (4) that one micro-batch of one device keeps, on the device
    or outside."""
    total = whole = 0.0
    for index in range(stage.first, stage.end):
        kept, outside = _kept_by_layer(chain, stage, index)
        total += kept
        whole += outside
    return samples * chain.activation_factor * _on_device(chain, stage, total, whole, share)


def _kept_by_layer(chain: Chain, stage: Stage, index: int) -> tuple[float, float]:
    """Return the bytes that one sample of a layer keeps for the backward, and how many of them are
    outside products."""
    layer = chain.layers[index]
    if not layer.has_backward:
        return 0.0, 0.0
    match stage.recompute:
        case Recompute.NONE:
            return layer.activation_bytes, layer.stream_bytes
        case Recompute.SELECTIVE:
            kept = layer.activation_bytes - layer.selective_bytes
            return kept, min(layer.stream_bytes, kept)
    given = chain.layers[index - 1].output_bytes if index else 0.0
    return given, given


def _kept_on_device(chain: Chain, stage: Stage, index: int, share: float) -> float:
    """Return the bytes of activations (4) of one sample of one layer."""
    return chain.activation_factor * _on_device(
        chain, stage, *_kept_by_layer(chain, stage, index), share
    )


def copied_at_a_time(
    chain: Chain, stage: Stage, samples: int, share: float, *, backward: bool
) -> float:
    """Return the bytes of activations and weights that a device has while a forward or a backward
    copies them (11).

    In a backward, ``working_bytes`` includes what the layer at work keeps.
    """
    held = 0.0
    if stage.offload.activations is not None:
        held += kept_bytes(chain, stage, samples, share) / stage.num_layers
        if not backward:
            layers = range(stage.first, stage.end)
            held += max(_kept_on_device(chain, stage, index, share) for index in layers) * samples
    if stage.offload.weights is not None:
        state = state_bytes(chain, stage, share)
        sizes = (layer_bytes(chain, layer, stage.expert) for layer in chain.layers_of(stage))
        copied = COPIED_LAYERS * share * stage.context * max(sizes)
        held += min(copied, state.outside_weights + state.outside_frozen)
    return held


def moments_at_a_time(chain: Chain, stage: Stage, share: float) -> float:
    """Return the bytes that a device has in addition while an update copies moments (11)."""
    if stage.offload.optimizer is None:
        return 0.0
    cost = OPTIMIZERS[chain.optimizer]
    moments = state_bytes(chain, stage, share).outside_moments
    if cost.is_elementwise:
        piece = min(moments, PIECE_BYTES)
        temporary = piece * cost.temporary_bytes / cost.state_bytes if piece else 0.0
        return min(moments, COPIED_LAYERS * PIECE_BYTES) + temporary
    sizes = sorted(layer_weights(layer, stage.expert) for layer in chain.layers_of(stage))
    holders = stage.num_holders if stage.zero else 1
    largest = sum(sizes[-COPIED_LAYERS:]) * cost.state_bytes
    return min(moments, largest * share * stage.context / holders)


def _on_device(chain: Chain, stage: Stage, total: float, whole: float, share: float) -> float:
    """Return the bytes that a device with ``share`` of its replica's work has of ``total`` kept
    bytes, of which ``whole`` are outside products."""
    if chain.splits_stream:
        return total * share
    return share * (total - whole) + whole * (share if stage.parts_are_alone else 1 / stage.context)


def passing_bytes(
    chain: Chain, stage: Stage, samples: int, share: float, *, backward: bool
) -> float:
    """Return the bytes (5) to (9) that the forward or backward of one micro-batch holds for a
    moment on one device."""
    if backward and stage.end <= chain.first_backward:
        return 0.0
    through = exchanged_bytes(chain, stage, samples, share, backward=backward)
    through += gathered_bytes(chain, stage, share, backward=backward)
    if stage.tensor_share(share) < 1:
        largest = max(layer.output_bytes for layer in chain.layers_of(stage))
        through += chain.whole_outputs * samples / stage.context * largest
    if not backward:
        through += forward_working_bytes(chain, stage, samples, share)
    if backward:
        through += recomputed_bytes(chain, stage, samples, share) + working_bytes(
            chain, stage, samples, share
        )
    if stage.offload:
        through += copied_at_a_time(chain, stage, samples, share, backward=backward)
    return through


def recomputed_bytes(chain: Chain, stage: Stage, samples: int, share: float) -> float:
    """Return the bytes (5) that a backward computes again on one device."""
    layers = [layer for layer in chain.layers_of(stage) if layer.has_backward]
    if not layers:
        return 0.0
    match stage.recompute:
        case Recompute.NONE:
            return 0.0
        case Recompute.SELECTIVE:
            largest = max(layer.selective_bytes for layer in layers)
        case Recompute.FULL:
            sizes = (
                _on_device(chain, stage, layer.activation_bytes, layer.stream_bytes, share)
                for layer in layers
            )
            return max(sizes) * samples * chain.activation_factor
    return largest * samples * share * chain.activation_factor


def working_bytes(chain: Chain, stage: Stage, samples: int, share: float) -> float:
    """Return the bytes of gradients (7) on their way through the backward of one micro-batch, on
    one device."""
    most = freed = 0.0
    is_kept = stage.recompute is Recompute.NONE and stage.offload.activations is None
    for index in reversed(range(stage.first, stage.end)):
        layer = chain.layers[index]
        own = (
            _kept_on_device(chain, stage, index, share)
            if stage.offload.activations is not None
            else 0.0
        )
        held = layer.working_bytes
        held += chain.split_loss_bytes(layer) if stage.tensor_share(share) < 1 else 0.0
        if held or own:
            # The gradient of the stage's last output has a buffer of its own.
            given = layer.output_bytes if index + 1 < stage.end else 0.0
            most = max(most, share * (held + given - freed) + own)
        freed += layer.activation_bytes if is_kept else 0.0
    return most * samples


def forward_working_bytes(chain: Chain, stage: Stage, samples: int, share: float) -> float:
    """Return the bytes (10) that the forward of layers without a backward holds for a moment, on
    one device."""
    if stage.first >= chain.first_backward:
        return 0.0
    layers = chain.layers[stage.first : min(stage.end, chain.first_backward)]
    return (
        max(layer.frozen.forward_bytes for layer in layers if layer.frozen is not None)
        * samples
        * share
    )


def gathered_bytes(chain: Chain, stage: Stage, share: float, *, backward: bool) -> float:
    """Return the bytes of gathered weights and gradients (8) on one device."""
    if chain.buffers.is_torchtitan:
        return _gathered_by_fsdp(chain, stage, share, backward=backward)
    times = times_whole(stage.zero, stage.num_holders, backward=backward)
    if not times:
        return 0.0
    largest = max(layer_weights(layer, stage.expert) for layer in chain.layers_of(stage))
    return times * largest * chain.dtype.bytes * stage.tensor_share(share)


def _gathered_by_fsdp(chain: Chain, stage: Stage, share: float, *, backward: bool) -> float:
    """Return the bytes (12) on one device."""
    if not stage.zero or stage.num_holders < 2:
        return 0.0
    layers = chain.layers_of(stage)
    root = [layer for layer in layers if layer in (chain.layers[0], chain.layers[-1])]
    blocks = [layer for layer in layers if layer not in root]
    block = max((layer_weights(layer, stage.expert) for layer in blocks), default=0.0)
    held = 0.0
    keeps_root = chain.buffers is Buffers.TORCHTITAN
    if stage.zero == 3:
        kept = root if keeps_root else [layer for layer in root if layer is chain.layers[-1]]
        held += sum(layer_weights(layer, stage.expert) for layer in kept) + 2 * block
    if keeps_root and backward and stage.zero > 1 and chain.layers[-1] in root:
        held += layer_weights(chain.layers[-1], stage.expert)
    summed = block * (chain.reduce_dtype or chain.dtype).bytes if backward else 0.0
    return (held * chain.dtype.bytes + summed) * stage.tensor_share(share)


def times_whole(zero: int, holders: int, *, backward: bool) -> float:
    """Return w in (8): copies of the largest layer's weights that are gathered for a moment."""
    if holders < 2 or zero < (2 if backward else 3):
        return 0.0
    return (3 if backward else 2) + 1 / holders


def layer_weights(layer: Layer, expert: int) -> float:
    """Return the number of weights of a layer on one holder; a tied table counts fully in each
    layer that uses it."""
    return layer.parameters + layer.tied_parameters - layer.expert_parameters * (1 - 1 / expert)


def layer_bytes(chain: Chain, layer: Layer, expert: int) -> float:
    """Return the bytes of the weights of a layer, trained and frozen, on one holder."""
    frozen = 0.0 if layer.frozen is None else held_frozen_bytes(layer.frozen, expert)
    return layer_weights(layer, expert) * chain.dtype.bytes + frozen


def exchanged_bytes(
    chain: Chain, stage: Stage, samples: int, share: float, *, backward: bool
) -> float:
    """Return the bytes (6) that one micro-batch has on its way to other parts of the sequence and
    to experts, on one device."""
    largest = max(
        exchange_buffers(layer, stage.context, stage.expert, backward=backward)
        for layer in chain.layers_of(stage)
    )
    return largest * samples * share


def exchange_buffers(layer: Layer, context: int, expert: int, *, backward: bool) -> float:
    """Return the bytes (6) per sample, for one layer on all devices of a replica."""
    parts = (4 if backward else 2) * layer.key_value_bytes if context > 1 else 0.0
    return parts + (layer.routed_bytes if expert > 1 else 0.0)
