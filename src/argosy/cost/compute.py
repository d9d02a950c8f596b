"""Seconds of compute: a roofline per layer, or a measured profile where there is one.

For n samples of a layer on a device, with share r of the layer's tensors (tensor parallelism), peak P of the device's
kind for the dtype, memory bandwidth H and the device's own efficiency e:

    (1)  forward  = max( n r FLOP_f / (a_f e P) + p r (weights + n kept) / (e H),  floor_f )
    (2)  backward = max( n r FLOP_b / (a_b e P) + 2 p r (weights + n kept) / (e H),  floor_b )
    (3)  with recomputation the backward also pays for what it computes again
    (4)  update   = 2 r (weights + gradients + optimizer state) / (e H)

Matrix products reach a share a of the datasheet's peak; everything between them (norms, activation functions,
residuals) moves the ``kept`` bytes p times through memory, one kernel after the other, so the two add up; and a host
that launches kernels one by one needs the floor whatever the device. The constants come from 128 measurements on an
H200 (``benchmarks/results/2026-11-15-h200-layers.md``). Not in here: a device's speed over time, which stretches
these seconds in the simulator. Measured times already contain a, p and the floor and replace (1) and (2), divided by
e.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from argosy.cluster.device import Device
from argosy.cost.memory import state_bytes
from argosy.dtype import Dtype
from argosy.errors import bad_input
from argosy.plan.plan import Recompute, Stage
from argosy.workload.chain import Chain, Layer
from argosy.workload.profile import Profile


@dataclass(frozen=True, kw_only=True)
class ComputeModel:
    """The constants of the roofline, and measured profiles by device kind."""

    forward_peak: float = 0.78
    """a_f in (1)."""
    backward_peak: float = 0.70
    """a_b in (2)."""
    passes: float = 2.5
    """p: how often kept bytes and weights cross the memory bus in a forward."""
    forward_floor: float = 0.3e-3
    """Seconds to launch the kernels of one layer."""
    backward_floor: float = 1.0e-3
    profiles: Mapping[str, Profile] | None = None
    """By the name of the device kind."""

    def can_run(self, chain: Chain, device: Device) -> bool:
        """Whether the device has the chain's dtype, or was measured."""
        has_dtype = chain.dtype in dict(device.kind.flops) or chain.dtype is Dtype.TF32
        return has_dtype or self.profile_for(device) is not None

    def profile_for(self, device: Device) -> Profile | None:
        return self.profiles.get(device.kind.name) if self.profiles else None


@dataclass(frozen=True, kw_only=True)
class Portion:
    """What one device does of a stage."""

    device: Device
    samples: int
    """Of every micro-batch."""
    share: float = 1.0
    """Of the stage's tensors."""
    width: int = 1
    """Number of devices in its replica."""


def layer_seconds(model: ComputeModel, chain: Chain, layer: Layer, portion: Portion) -> tuple[float, float]:
    """(1) and (2): forward and backward of one layer."""
    device, samples, share = portion.device, portion.samples, portion.share
    profile = model.profile_for(device)
    if profile is not None:
        return _measured_seconds(profile, chain, layer, portion)
    if not chain.forward_flop:
        expected = f"a measured profile of {chain.name} for {device.kind.name}, because the model states no FLOP"
        raise bad_input(expected, where=f"layer {layer.name}")
    peak = device.efficiency * device.kind.peak(chain.dtype)
    bandwidth = device.efficiency * device.kind.memory_bandwidth
    weights = (layer.active_parameters or layer.parameters) + layer.tied_parameters
    moving = model.passes * share * (weights * chain.dtype.bytes + samples * layer.activation_bytes) / bandwidth
    work = samples * share / peak
    has_products = layer.forward_flop > 0
    forward = max(work * layer.forward_flop / model.forward_peak + moving, model.forward_floor * has_products)
    backward = max(work * layer.backward_flop / model.backward_peak + 2 * moving, model.backward_floor * has_products)
    return forward, backward


def _measured_seconds(profile: Profile, chain: Chain, layer: Layer, portion: Portion) -> tuple[float, float]:
    """A hole in a profile is refused by name; between measured micro-batches it interpolates."""
    name = profile.row_name(layer)
    if name is None:
        raise bad_input(f"a measurement of it in the profile of {profile.model} for {profile.device}", where=layer.name)
    stretch = portion.share * portion.width / portion.device.efficiency
    forward = profile.forward_seconds(name, portion.samples, portion.width, chain.dtype)
    backward = profile.backward_seconds(name, portion.samples, portion.width, chain.dtype)
    return forward * stretch, backward * stretch


def stage_seconds(model: ComputeModel, chain: Chain, stage: Stage, portion: Portion) -> tuple[float, float]:
    """Forward and backward of a whole stage on one device, (3) included."""
    forward = backward = 0.0
    for layer in chain.layers[stage.first : stage.end]:
        ahead, back = layer_seconds(model, chain, layer, portion)
        forward += ahead
        backward += back + recompute_seconds(model, chain, layer, portion, stage.recompute, ahead)
    return forward, backward


def recompute_seconds(
    model: ComputeModel, chain: Chain, layer: Layer, portion: Portion, recompute: Recompute, forward: float
) -> float:
    """(3). Selective recomputation drops cheap results that are large: what it costs is mostly memory traffic."""
    match recompute:
        case Recompute.NONE:
            return 0.0
        case Recompute.FULL:
            return forward
    device = portion.device
    flop = layer.selective_flop / (model.forward_peak * device.efficiency * device.kind.peak(chain.dtype))
    traffic = layer.selective_bytes / (device.efficiency * device.kind.memory_bandwidth)
    return portion.samples * portion.share * max(flop, traffic)


def update_seconds(chain: Chain, stage: Stage, portion: Portion) -> float:
    """(4): the optimizer reads and writes everything it keeps."""
    held = state_bytes(chain, stage, portion.share)
    return 2 * held.total / (portion.device.efficiency * portion.device.kind.memory_bandwidth)
