"""Price compute: the seconds of a layer by a roofline, or by a measured profile if there is one.

For n samples of a layer on a device, with share r of a replica's work, the sequence in c parts, the
experts over e holders, peak P of the device's kind for the dtype, peak P' for the format that the
dtype is stored in, memory bandwidth H and the device's own efficiency e':

    (1)  forward  = max( n r (FLOP_f - A_f) / (a_f e' P) + n r A_f / (a'_f e' P')
                         + p (r c weights + r n kept) / (e' H) + g n / c out / (e' H) + s_f,
                         l floor_f )
    (2)  backward = max( n r (FLOP_b - A_b) / (a_b e' P) + n r A_b / (a'_b e' P')
                         + 2 p (r c weights + r n kept) / (e' H) + 2 g n / c out / (e' H) + s_b,
                         l floor_b )
    (3)  with recomputation the backward also includes what it computes again. Full recomputation
         that stops early leaves out the last product of a block, as torch's checkpoints do since
         2.1 (non-reentrant): no result of it is needed
    (4)  update   = 2 u (trained weights + gradients + optimizer state on the device) / (e' H)
         with u passes of the optimizer (``workload.optimizer``)
    (5)  weights  = those outside experts, and of experts Q / e (1 - (1 - q)^t): the experts that
         any of the t tokens of a holder's group is sent to, each token to a share q of the experts
    (6)  attention that can run while keys and values arrive = (c - 1) / c of the time of its FLOP;
         the last of c pieces has nothing left to wait for
    (7)  under fp8 only the projections of blocks have the peak for fp8; attention, embeddings and
         heads have the peak for bf16, the format that fp8 is stored in (``Dtype.stored``)
    (8)  frozen weights are read like trained ones. Those stored in 8 or 4 bits are first unpacked,
         in every forward and backward: their bytes are read and their bytes in the dtype written,
         once over e' H. ``kept`` stands for memory traffic, so it is that of the layer as if it
         were trained (``Layer.moved_bytes``). Layers without a backward take no time in (2) and (3)
    (9)  a stage of n devices waits for its slowest: forward and backward take 1 + d (z_n - z_8)
         times as long if n > 8, where d is the relative standard deviation of the speeds of equal
         devices and z_n the expected largest of n standard normal numbers, by Blom's formula the
         quantile at (n - 3/8) / (n + 1/4)
    (10) under ZeRO 2 and 3 exchanges take multiprocessors from layers (``cost.taken``); their
         seconds are added to those of the stage

r c is the share of a tensor-parallel group's weights; it is 1 if a part of a sequence has one
device, whatever the part's size. If the experts or samples of a group are uneven, the FLOP of
experts are those of the tokens that a device's experts receive; every expert is taken to receive
the same number of tokens.

Matrix products reach a share a of the datasheet's peak, and attention proper (A, its part of the
FLOP) a share a' of its own. Everything between them (norms, activation functions, residuals) moves
the ``kept`` bytes p times through memory, one kernel after the other, so the terms add up. A host
that launches kernels one by one needs the floor on any device; a segment of a program needs the
part of it that its ``launches`` state. a, a' and p are constants of the device's generation, for a
framework's kernels or for tuned ones (``data/devices.toml``), unless a calibration sets them for
all kinds. a_f = 1.076 a and a_b = 0.966 a, at most 1, as measured on an H200
(``benchmarks/results/2026-11-15-h200-layers.md``). Likewise a'_f = 7/6 a' and a'_b = 14/15 a' if
attention is fused, otherwise both are a': a fused backward does 5 products for the 2 of a forward,
and A_b counts 4. Devices of a tensor-parallel group move a layer's whole output (out) g times,
however narrow their slices are; without sequence parallelism 1.33 times as often. A compiler that
fuses kernels reduces p to 0.65 p.

The constants of generations come mostly from steps on eight devices, so (9) counts from there; d
was fitted on pairs of published steps that differ in the number of devices. Two terms are used only
if a calibration sets them: the launches of a layer in a tensor-parallel group over those of a layer
on one device (l, otherwise 1), and the seconds s between kernels that no launch ahead of time
removes. A device's speed over time is not in here: it stretches these seconds in the simulator.

Measured times already contain a, p and the floor and replace (1) and (2), divided by e' and times a
factor that a calibration may set. A sequence in c parts is looked up as 1 / c of the samples; below
the fewest samples that were measured it takes a proportional part of their time, but at least the
floor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist
from typing import NamedTuple

from argosy.cluster.device import Device
from argosy.cost.memory import state_bytes
from argosy.cost.taken import taken_seconds
from argosy.dtype import Dtype
from argosy.errors import bad_input, impossible
from argosy.plan.plan import Recompute, Stage
from argosy.workload.chain import Chain, Frozen, Layer
from argosy.workload.optimizer import OPTIMIZERS
from argosy.workload.profile import Profile

# Share of the peak that a forward reaches over the mean share, which the catalogue has (1).
FORWARD_OVER_MEAN = 1.076
# Share of the peak that a backward reaches over the mean share, which the catalogue has (2).
BACKWARD_OVER_MEAN = 0.966
# Shares of the peak that attention reaches in a forward and in a backward over the mean share: a
# fused backward does 5 products for the 2 of a forward (Dao, arXiv:2307.08691), and counts as 4.
ATTENTION_FORWARD_OVER_MEAN = 7 / 6
ATTENTION_BACKWARD_OVER_MEAN = 14 / 15
# Passes of kept bytes with kernels that a compiler fuses, over those without: fitted on every
# second row of torchtitan's reports (docs/validation.md).
FUSED = 0.65
# g without sequence parallelism over g with it: slices measured alone on an H200 (8.4) over every
# second row of torchtitan's reports (6.3).
UNSPLIT = 1.33
# d of (9): fitted on the 25 pairs of steps of one model, length and kind in every second row of LLM
# Foundry's table that differ in the number of devices
# (docs/decisions/0051-waiting-for-the-slowest.md). For comparison: speeds of equal GPUs were found
# to differ by 8 % on average (Sinha et al., arXiv:2208.11035), in steady load and without a choice
# of nodes.
SPREAD = 0.031
# Times that PowerSGD reads or writes the error that it keeps per weight: the gradient and the error
# are read and their sum is written, the two factors read the sum, the factors' product is written,
# and the error is read and written.
FACTOR_PASSES = 8
# Number of devices of most steps that the constants of generations were fitted on.
_FITTED_DEVICES = 8
# Kinds of layers whose products are not multiplied in fp8 (7).
_OUTSIDE_BLOCKS = ("embedding", "head")


@dataclass(frozen=True, kw_only=True)
class ComputeModel:
    """A compute model that consists of the constants of the roofline and of measured profiles by
    device kind."""

    forward_peak: float | None = None
    """a_f in (1); None: the catalogue's value for the device's generation."""
    backward_peak: float | None = None
    """a_b in (2); None: the catalogue's value for the device's generation."""
    attention_peak: float | None = None
    """a' in (1) and (2); None: the catalogue's value for the device's generation."""
    passes: float | None = None
    """p in (1) and (2): times that kept bytes and weights cross the memory bus in a forward; None:
    the catalogue's value for the device's generation."""
    forward_floor: float = 0.3e-3
    """Seconds to launch the kernels of one layer's forward."""
    backward_floor: float = 1.0e-3
    """Seconds to launch the kernels of one layer's backward."""
    split_launches: float = 1.0
    """l: launches of a layer in a tensor-parallel group over those of a layer on one device."""
    gathered: float = 6.3
    """g: times that a layer's whole output crosses the memory bus in a forward of a tensor-parallel
    group."""
    forward_start: float = 0.0
    """s_f: seconds of a layer's forward beside its work."""
    backward_start: float = 0.0
    """s_b: seconds of a layer's backward beside its work."""
    profiles: Mapping[str, Profile] | None = None
    """Measured profiles by the name of the device kind."""
    spread: float = SPREAD
    """d: relative standard deviation of the speeds of equal devices."""
    reduction: float = 1.0
    """Share of a link's bandwidth that sums of gradients and exchanges of weights reach."""
    blocking: float = False
    """Share of the transfers between stages for which devices wait instead of computing on
    (``sim.tasks.blocking``)."""
    profile_factor: float = 1.0
    """Seconds of layers in a run over those of measured profiles."""
    tuned_kernels: bool = False
    """Whether the catalogue's values are those of kernels tuned by hand for a generation."""
    compiled: bool = False
    """Whether operations between matrix products are fused, so that kept bytes cross the memory bus
    less often."""
    prefetch: bool = False
    """Whether ZeRO 2 and 3 exchange weights and gradients layer by layer beside the action that
    needs or makes them, as FSDP does, instead of as a whole between actions."""

    def can_run(self, chain: Chain, device: Device) -> bool:
        """Return whether the device supports the chain's dtype or has a measured profile."""
        has_dtype = chain.dtype in dict(device.kind.flops) or chain.dtype is Dtype.TF32
        return has_dtype or self.profile_for(device) is not None

    def profile_for(self, device: Device) -> Profile | None:
        return self.profiles.get(device.kind.name) if self.profiles else None


class LayerRates(NamedTuple):
    """A set of rates that a device reaches for one layer."""

    forward: float
    """FLOP/s of matrix products in a forward: a_f e' P."""
    backward: float
    """FLOP/s of matrix products in a backward: a_b e' P."""
    attention: float
    """FLOP/s of attention proper in a forward: a'_f e' P'."""
    attention_backward: float
    """FLOP/s of attention proper in a backward: a'_b e' P'."""
    traffic: float
    """Bytes/s of kept bytes, per crossing in a forward: e' H / p."""


def rates_of(model: ComputeModel, chain: Chain, layer: Layer, device: Device) -> LayerRates:
    """Return the rates that (1) and (2) divide by, with (7)."""
    kind, dtype = device.kind, chain.dtype
    reached = kind.tuned if model.tuned_kernels else kind.reached
    stored = dtype.stored
    dtype = stored if layer.kind in _OUTSIDE_BLOCKS else dtype
    peak = device.efficiency * kind.peak(dtype)
    share = reached.share(dtype)
    forward, backward = model.forward_peak, model.backward_peak
    forward = min(1.0, FORWARD_OVER_MEAN * share) if forward is None else forward
    backward = min(1.0, BACKWARD_OVER_MEAN * share) if backward is None else backward
    attention = reached.attention if model.attention_peak is None else model.attention_peak
    passes = (reached.passes if model.passes is None else model.passes) * (
        FUSED if model.compiled else 1.0
    )
    attention_peak = peak if stored is dtype else device.efficiency * kind.peak(stored)
    ahead = back = attention
    if not layer.score_bytes:
        ahead = min(1.0, ATTENTION_FORWARD_OVER_MEAN * attention)
        back = ATTENTION_BACKWARD_OVER_MEAN * attention
    return LayerRates(
        forward * peak,
        backward * peak,
        ahead * attention_peak,
        back * attention_peak,
        device.efficiency * kind.memory_bandwidth / passes,
    )


@dataclass(frozen=True, kw_only=True)
class Portion:
    """A part of a stage's work that one device does."""

    device: Device
    samples: int
    """Samples of every micro-batch."""
    share: float = 1.0
    """Share of its replica's work."""
    width: int = 1
    """Number of devices in its replica."""
    context: int = 1
    """Parts of the sequence in its replica."""
    expert: int = 1
    """Number of holders over which the experts are divided."""
    routed: float = 1.0
    """Tokens that its experts receive over those that it routes."""

    @property
    def tensor_width(self) -> int:
        """Return the number of devices of its tensor-parallel group."""
        return self.width // self.context


def layer_seconds(
    model: ComputeModel,
    chain: Chain,
    layer: Layer,
    portion: Portion,
    rates: LayerRates | None = None,
) -> tuple[float, float]:
    """Return the seconds of forward (1) and backward (2) of one layer; ``rates`` are those of
    ``rates_of``, if the caller has them."""
    device, samples, share = portion.device, portion.samples, portion.share
    profile = model.profile_for(device)
    if profile is not None:
        return _measured_seconds(model, profile, chain, layer, portion)
    if not chain.states_work:
        action = f"predict the time of layer {layer.name} on {device.kind.name}"
        reason = f"{chain.name} states no FLOP"
        raise impossible(action, reason, "a measured profile")
    rates = rates or rates_of(model, chain, layer, device)
    weights = read_weights(chain, layer, portion) * chain.dtype.bytes
    held = 1.0 if portion.context > 1 and portion.tensor_width == 1 else share * portion.context
    kept = layer.activation_bytes if layer.moved_bytes is None else layer.moved_bytes
    moving = (held * weights + share * samples * kept) / rates.traffic
    if portion.tensor_width > 1:
        bandwidth = device.efficiency * device.kind.memory_bandwidth
        times = model.gathered * (1.0 if chain.splits_stream else UNSPLIT)
        moving += times * samples / portion.context * layer.output_bytes / bandwidth
    work = samples * share
    has_products = layer.forward_flop > 0
    attention = attention_flops(layer)
    more = 1.0 + (portion.routed - 1.0) * _expert_share(layer)
    forward = work * (
        more * (layer.forward_flop - attention[0]) / rates.forward + attention[0] / rates.attention
    )
    backward = work * (
        more * (layer.backward_flop - attention[1]) / rates.backward
        + attention[1] / rates.attention_backward
    )
    forward += moving + model.forward_start * has_products
    backward += 2 * moving + model.backward_start * has_products
    if layer.frozen is not None and layer.frozen.packed_parameters:
        unpacking = _unpack_seconds(chain, layer.frozen, portion)
        forward, backward = forward + unpacking, backward + unpacking
    ahead, back = _floors(model, portion)
    launches = float(has_products) if layer.launches is None else layer.launches
    forward = max(forward, ahead * launches)
    return forward, max(backward, back * launches) if layer.has_backward else 0.0


def _expert_share(layer: Layer) -> float:
    """Return the share of the FLOP of a layer's products that experts have: their share of the
    weights that a token meets."""
    if not layer.expert_parameters or not layer.active_parameters:
        return 0.0
    return layer.active_share * layer.expert_parameters / layer.active_parameters


def _unpack_seconds(chain: Chain, frozen: Frozen, portion: Portion) -> float:
    """Return the seconds to read the packed weights of a layer and write them in the dtype once
    (8)."""
    device = portion.device
    held = portion.context * portion.share / portion.expert
    moved = frozen.packed_bytes + frozen.packed_parameters * chain.dtype.bytes
    return held * moved / (device.efficiency * device.kind.memory_bandwidth)


def attention_flops(layer: Layer) -> tuple[float, float]:
    """Return A_f and A_b: the FLOP of a layer in which queries, keys and values meet."""
    if not layer.attention_flop:
        return 0.0, 0.0
    return layer.attention_flop, layer.attention_flop * layer.backward_flop / layer.forward_flop


def _floors(model: ComputeModel, portion: Portion) -> tuple[float, float]:
    """Return the seconds that the launches of a layer take, forward and backward."""
    launches = model.split_launches if portion.tensor_width > 1 else 1.0
    return launches * model.forward_floor, launches * model.backward_floor


def read_weights(chain: Chain, layer: Layer, portion: Portion) -> float:
    """Return the number of weights (5) of a layer that a forward reads on a holder with all of its
    tensors."""
    frozen = 0.0 if layer.frozen is None else _read_frozen(chain, layer.frozen, portion)
    if not layer.expert_parameters:
        return layer.parameters + layer.tied_parameters + frozen
    tokens = portion.samples * chain.sequence_length * portion.expert / portion.context
    met = 1 - math.pow(1 - layer.active_share, tokens)
    outside = layer.parameters - layer.expert_parameters + layer.tied_parameters
    return outside + layer.expert_parameters / portion.expert * met + frozen


def _read_frozen(chain: Chain, frozen: Frozen, portion: Portion) -> float:
    """Return the number of frozen weights (5) that a forward reads, including tied ones."""
    outside = frozen.parameters - frozen.expert_parameters + frozen.tied_bytes / chain.dtype.bytes
    if not frozen.expert_parameters:
        return outside
    tokens = portion.samples * chain.sequence_length * portion.expert / portion.context
    met = 1 - math.pow(1 - frozen.active_share, tokens)
    return outside + frozen.expert_parameters / portion.expert * met


def hidden_seconds(
    model: ComputeModel, chain: Chain, layer: Layer, portion: Portion, seconds: tuple[float, float]
) -> tuple[float, float]:
    """Return the part of ``seconds``, forward and backward of a layer, in which attention can hide
    an exchange (6)."""
    if portion.context == 1 or not layer.attention_flop:
        return 0.0, 0.0
    if model.profile_for(portion.device) is None:
        work = portion.samples * portion.share
        rates = rates_of(model, chain, layer, portion.device)
        ahead, back = attention_flops(layer)
        alone = (
            min(seconds[0], work * ahead / rates.attention),
            min(seconds[1], work * back / rates.attention_backward),
        )
    else:
        share = layer.attention_flop / layer.forward_flop
        alone = (seconds[0] * share, seconds[1] * share)
    steps = 1 - 1 / portion.context
    return alone[0] * steps, alone[1] * steps


def _measured_seconds(
    model: ComputeModel, profile: Profile, chain: Chain, layer: Layer, portion: Portion
) -> tuple[float, float]:
    """Return the measured seconds of forward and backward of one layer, interpolated between
    measured micro-batches.

    A layer that the profile does not have raises an ``InputError`` with its name.
    """
    name = profile.row_name(layer)
    if name is None:
        raise bad_input(
            f"a measurement of it in the profile of {profile.model} for {profile.device}",
            where=layer.name,
        )
    stretch = model.profile_factor * portion.share * portion.width / portion.device.efficiency
    width = portion.tensor_width
    samples: float = portion.samples
    looked_up = samples
    if portion.context > 1:
        samples = samples / portion.context
        looked_up = max(samples, profile.fewest_samples(name, width, chain.dtype))
    forward = profile.forward_seconds(name, looked_up, width, chain.dtype) * samples / looked_up
    backward = profile.backward_seconds(name, looked_up, width, chain.dtype) * samples / looked_up
    if samples < looked_up:
        floors = _floors(model, portion)
        forward, backward = max(forward, floors[0]), max(backward, floors[1])
    if layer.frozen is not None:
        forward *= layer.frozen.forward_share
        backward *= layer.frozen.backward_share if layer.frozen.has_backward else 0.0
    return forward * stretch, backward * stretch


@cache
def waiting(spread: float, num_devices: int) -> float:
    """Return how many times as long a stage of ``num_devices`` takes as each of its devices alone
    (9).

    >>> [round(waiting(0.031, count), 4) for count in (1, 8, 16, 128, 512)]
    [1.0, 1.0, 1.0104, 1.0357, 1.0495]
    """
    if num_devices <= _FITTED_DEVICES:
        return 1.0
    return 1.0 + spread * (largest_of(num_devices) - largest_of(_FITTED_DEVICES))


def largest_of(count: int) -> float:
    """Return z_n of (9): the expected largest of ``count`` standard normal numbers, by Blom's
    formula."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """A record of the seconds that one micro-batch takes on one device."""

    forward: float
    backward: float
    """Seconds for both gradients, including recomputation."""
    hidden_forward: float = 0.0
    """Seconds of ``forward`` during which keys and values may arrive."""
    hidden_backward: float = 0.0
    """Seconds of ``backward`` during which keys and values may arrive."""


def stage_seconds(
    model: ComputeModel, chain: Chain, stage: Stage, portion: Portion
) -> tuple[float, float]:
    """Return the seconds of forward and backward of a whole stage on one device, with (3), (9) and
    (10)."""
    seconds = split_stage_seconds(model, chain, stage, portion)
    return seconds.forward, seconds.backward


def split_stage_seconds(
    model: ComputeModel, chain: Chain, stage: Stage, portion: Portion
) -> StageSeconds:
    """Return the seconds of forward and backward of a whole stage on one device, with (3), (6), (9)
    and (10)."""
    portion = replace(portion, context=stage.context, expert=stage.expert)
    forward = backward = hidden_forward = hidden_backward = 0.0
    for layer in chain.layers_of(stage):
        ahead, back = layer_seconds(model, chain, layer, portion)
        beside = hidden_seconds(model, chain, layer, portion, (ahead, back))
        forward += ahead
        backward += back + recompute_seconds(model, chain, layer, portion, stage.recompute, ahead)
        hidden_forward += beside[0]
        hidden_backward += beside[1] + (beside[0] if stage.recompute is Recompute.FULL else 0.0)
    times = waiting(model.spread, stage.num_devices)
    taken = taken_seconds(chain, stage, portion.device, portion.share)
    return StageSeconds(
        times * forward + taken[0],
        times * backward + taken[1],
        times * hidden_forward,
        times * hidden_backward,
    )


def recompute_seconds(
    model: ComputeModel,
    chain: Chain,
    layer: Layer,
    portion: Portion,
    recompute: Recompute,
    forward: float,
) -> float:
    """Return the seconds that recomputation adds to the backward of a layer (3).

    Selective recomputation drops cheap results that are large, so it costs mostly memory traffic.
    """
    if not layer.has_backward:
        return 0.0
    match recompute:
        case Recompute.NONE:
            return 0.0
        case Recompute.FULL:
            return forward - _skipped_seconds(model, chain, layer, portion, forward)
    device = portion.device
    flop = layer.selective_flop / rates_of(model, chain, layer, device).forward
    traffic = layer.selective_bytes / (device.efficiency * device.kind.memory_bandwidth)
    return portion.samples * portion.share * max(flop, traffic)


def _skipped_seconds(
    model: ComputeModel, chain: Chain, layer: Layer, portion: Portion, forward: float
) -> float:
    """Return the seconds of a forward that a recomputation leaves out, because no result of the
    last product is needed."""
    if not (chain.stops_early and layer.last_flop):
        return 0.0
    if model.profile_for(portion.device) is not None:
        return forward * layer.last_flop / layer.forward_flop
    rate = rates_of(model, chain, layer, portion.device).forward
    return min(portion.samples * portion.share * layer.last_flop / rate, forward)


def update_seconds(chain: Chain, stage: Stage, portion: Portion) -> float:
    """Return the seconds of an update (4): the optimizer reads and writes all it keeps, and
    PowerSGD first reads and writes its errors."""
    held = state_bytes(chain, stage, portion.share)
    moved = 2 * OPTIMIZERS[chain.optimizer].passes * held.updated + FACTOR_PASSES * held.errors
    return moved / (portion.device.efficiency * portion.device.kind.memory_bandwidth)
