"""The few constants of the cost model that depend on the software that runs a plan, as one value
and one file.

``argosy calibrate`` fits them to measured runs (``calibrate.fit``); everything else of the cost
model comes from datasheets and the model's shape. What a calibration changes:

    (1)  the shares of a device's peak that matrix products and attention reach, how often kept
         bytes and, where tensors are split, whole outputs cross its memory bus, seconds beside the
         work of a layer, its least seconds, and how many times as many they are where tensors are
         split, and how far the speeds of equal devices differ (``cost.compute``)
    (2)  the share of a link's stated bandwidth that reaches the program, inside nodes and between
         them, what a message takes beside its bytes, and what of a link sums of gradients reach
    (3)  what share of a transfer between stages keeps both its ends waiting
         (``sim.tasks.blocking``), and whether weights under ZeRO 3 arrive layer by layer beside the
         action that needs them (``sim.tasks.compile``)
    (4)  what a process takes of every device's memory before the model, and how much more live
         activations take than their bytes: an allocator's slack, inputs that every device of a
         tensor-parallel group repeats
    (5)  what a system keeps, recomputes and sums: the formats of gradients, the meaning of
         selective recomputation, sequence parallelism, asynchronous tensor parallelism, fused
         kernels, a fused loss
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from argosy.cluster.fitted import fitted
from argosy.cluster.topology import CalibrationFactors, Cluster
from argosy.cost.compute import ComputeModel
from argosy.dtype import Dtype
from argosy.workload.chain import Chain, Selective
from argosy.workload.profile import Profile

_DEFAULT = ComputeModel()


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Constants of the cost model; the defaults are those of the model itself."""

    forward_peak: float | None = _DEFAULT.forward_peak
    """Share of the datasheet's peak that matrix products reach; None: as the catalogue has it for
    each kind."""
    backward_peak: float | None = _DEFAULT.backward_peak
    attention_peak: float | None = _DEFAULT.attention_peak
    """Share of the datasheet's peak that attention proper reaches; None: as the catalogue has
    it."""
    passes: float | None = _DEFAULT.passes
    """None: as the catalogue has it. How often kept bytes and weights cross the memory bus in a
    forward."""
    forward_floor: float = _DEFAULT.forward_floor
    """Seconds of a layer at least."""
    backward_floor: float = _DEFAULT.backward_floor
    split_launches: float = _DEFAULT.split_launches
    """Launches of a layer whose tensors are split over those of a whole one."""
    gathered: float = _DEFAULT.gathered
    """How often a layer's whole output crosses the memory bus in a forward where tensors are
    split."""
    forward_start: float = _DEFAULT.forward_start
    """Seconds beside the work of a layer."""
    backward_start: float = _DEFAULT.backward_start
    profile_factor: float = _DEFAULT.profile_factor
    """Seconds of layers in a run over those of measured profiles, which were taken one layer at a
    time."""
    spread: float = _DEFAULT.spread
    """Relative standard deviation of the speeds of equal devices, the slowest of which a stage
    waits for."""
    bandwidth: float = 1.0
    """Share of a link's stated bandwidth."""
    nic_bandwidth: float | None = None
    """The same for links outside nodes; None: as inside."""
    latency: float = 0.0
    """Seconds more for every message."""
    reduction: float = 1.0
    """Share of ``bandwidth`` that sums of gradients reach."""
    blocking: float = False
    """For which share of transfers between stages devices wait; True is all of them."""
    prefetch: bool = False
    """Whether ZeRO 2 and 3 exchange layer by layer, beside the action that needs it."""
    process_bytes: float = 0.0
    """Of every device, taken before the model."""
    activation_factor: float = 1.0
    """Memory of live activations over their bytes."""
    compiled: bool = False
    """Whether what lies between matrix products is fused into few kernels, by a compiler or by
    hand."""
    fused_loss: bool = False
    """Whether the loss is computed from the logits without copies of them."""
    sequence_parallel: bool = True
    """Whether tensor-parallel groups split the sequence outside their matrix products."""
    selective: Selective = Selective.ELEMENTWISE
    """What selective recomputation means."""
    gradient_dtype: Dtype | None = None
    """In which gradients are kept; None: as the weights are."""
    reduce_dtype: Dtype | None = None
    """In which gradients are summed; None: as they are kept."""
    async_tensor: bool = False
    """Whether tensor-parallel groups exchange in pieces beside their matrix products."""

    def compute_model(self, profiles: Mapping[str, Profile] | None = None) -> ComputeModel:
        """(1) and (3)"""
        return ComputeModel(
            forward_peak=self.forward_peak,
            backward_peak=self.backward_peak,
            attention_peak=self.attention_peak,
            passes=self.passes,
            forward_floor=self.forward_floor,
            backward_floor=self.backward_floor,
            split_launches=self.split_launches,
            gathered=self.gathered,
            forward_start=self.forward_start,
            backward_start=self.backward_start,
            spread=self.spread,
            profiles=profiles,
            reduction=self.reduction,
            blocking=self.blocking,
            profile_factor=self.profile_factor,
            prefetch=self.prefetch,
            compiled=self.compiled,
        )

    def cluster(self, cluster: Cluster) -> Cluster:
        """Return the cluster with (2) and the process's part of (4) applied."""
        fit = CalibrationFactors(
            bandwidth=self.bandwidth,
            nic_bandwidth=self.nic_bandwidth,
            latency=self.latency,
            process_bytes=self.process_bytes,
        )
        return fitted(cluster, fit)

    def chain(self, chain: Chain) -> Chain:
        """The chain with the activations' part of (4), and with (5)."""
        return replace(
            chain.with_selective(self.selective)
            .with_loss(fused=self.fused_loss, compiled=self.compiled)
            .with_tensor_exchange(is_async=self.async_tensor),
            activation_factor=self.activation_factor,
            sequence_parallel=self.sequence_parallel,
            gradient_dtype=self.gradient_dtype,
            reduce_dtype=self.reduce_dtype,
        )
