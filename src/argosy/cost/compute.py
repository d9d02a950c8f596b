"""Seconds of compute: a roofline per layer, or a measured profile where there is one.

For n samples of a layer on a device, with share r of the layer's tensors (tensor parallelism), peak P of the device's kind
for the dtype, memory bandwidth H and the device's own efficiency e:

    (1)  forward  = max( n r FLOP_f / (a e P),  r (weights + n kept) / (e H) ) + launch
    (2)  backward = max( n r FLOP_b / (a e P),  2 r (weights + n kept) / (e H) ) + 2 launch
    (3)  with recomputation the backward also pays for what it computes again
    (4)  update   = 2 r (weights + gradients + optimizer state) / (e H)

where a is the share of the datasheet's peak that large matrix products reach and ``kept`` the activation bytes. A device's
speed over time is not in here: it stretches these seconds in the simulator. Measured times already contain a, e and
launch overheads and replace (1) and (2) as they are, divided by e.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from argosy.cluster.device import Device
from argosy.cost.memory import state_bytes
from argosy.errors import bad_input
from argosy.plan.plan import Recompute, Stage
from argosy.workload.chain import Chain, Layer
from argosy.workload.profile import Profile


@dataclass(frozen=True, kw_only=True)
class ComputeModel:
    """The constants of the roofline, and measured profiles by device kind."""

    achievable: float = 0.6
    """a in (1): share of the datasheet peak that large matrix products reach."""
    launch: float = 20e-6
    """Seconds per layer and direction in which a device only starts kernels."""
    profiles: Mapping[str, Profile] | None = None
    """By the name of the device kind."""

    def profile_for(self, device: Device) -> Profile | None:
        return self.profiles.get(device.kind.name) if self.profiles else None


def layer_seconds(
    model: ComputeModel, chain: Chain, layer: Layer, device: Device, samples: int, share: float, width: int
) -> tuple[float, float]:
    """(1) and (2): forward and backward of one layer."""
    profile = model.profile_for(device)
    if profile is not None:
        measured = profile.row_name(layer)
        if measured is None:
            raise bad_input(f"a measurement of it in the profile of {profile.model} for {profile.device}", where=layer.name)
        forward = profile.forward_seconds(measured, samples, width, chain.dtype)
        backward = profile.backward_seconds(measured, samples, width, chain.dtype)
        stretch = share * width / device.efficiency
        return forward * stretch, backward * stretch
    if layer.forward_flop == 0 and layer.parameters > 0 and all(one.forward_flop == 0 for one in chain.layers):
        raise bad_input(
            f"a measured profile of {chain.name} for {device.kind.name}, because the model states no FLOP",
            where=f"layer {layer.name}",
        )
    rate = model.achievable * device.efficiency * device.kind.peak(chain.dtype)
    bandwidth = device.efficiency * device.kind.memory_bandwidth
    weights = (layer.active_parameters or layer.parameters) + layer.tied_parameters
    moved = share * (weights * chain.dtype.bytes + samples * layer.activation_bytes)
    work = samples * share
    forward = max(work * layer.forward_flop / rate, moved / bandwidth) + model.launch
    backward = max(work * layer.backward_flop / rate, 2 * moved / bandwidth) + 2 * model.launch
    return forward, backward


def stage_seconds(
    model: ComputeModel, chain: Chain, stage: Stage, device: Device, samples: int, share: float, width: int
) -> tuple[float, float]:
    """Forward and backward of a whole stage on one device, (3) included."""
    forward = backward = 0.0
    for layer in chain.layers[stage.first : stage.end]:
        ahead, back = layer_seconds(model, chain, layer, device, samples, share, width)
        forward += ahead
        backward += back + _again_seconds(model, chain, stage, layer, device, samples, share, ahead)
    return forward, backward


def _again_seconds(
    model: ComputeModel, chain: Chain, stage: Stage, layer: Layer, device: Device, samples: int, share: float, forward: float
) -> float:
    """(3). Selective recomputation drops cheap results that are large: what it costs is mostly memory traffic."""
    match stage.recompute:
        case Recompute.NONE:
            return 0.0
        case Recompute.FULL:
            return forward
    rate = model.achievable * device.efficiency * device.kind.peak(chain.dtype)
    traffic = layer.selective_bytes / (device.efficiency * device.kind.memory_bandwidth)
    return samples * share * max(layer.selective_flop / rate, traffic)


def update_seconds(chain: Chain, stage: Stage, device: Device, share: float) -> float:
    """(4): the optimizer reads and writes everything it keeps."""
    held = state_bytes(chain, stage, share)
    return 2 * held.total / (device.efficiency * device.kind.memory_bandwidth)
