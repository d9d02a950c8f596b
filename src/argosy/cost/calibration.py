"""Hold the few constants of the cost model that depend on the software that runs a plan.

``argosy calibrate`` fits them to measured runs (``calibrate.fit``); the rest of the cost model
comes from datasheets and the model's shape. A calibration sets:

    (1)  compute (``cost.compute``): the shares of a device's peak that matrix products and
         attention reach; how often kept bytes and, in tensor-parallel groups, whole outputs cross
         the memory bus; the seconds of a layer beside its work; its least seconds, and their factor
         in a tensor-parallel group; and how far the speeds of equal devices differ
    (2)  network: the share of a link's stated bandwidth that reaches the program, inside nodes and
         between them; the latency added to a message; the share that sums of gradients reach
    (3)  overlap: the share of transfers between stages that keeps both ends waiting
         (``sim.tasks.blocking``), and whether weights under ZeRO 3 arrive layer by layer beside the
         action that needs them (``sim.tasks.compile``)
    (4)  memory: the bytes that a process takes of every device before the model, and the factor of
         live activations over their bytes (allocator slack, and inputs that every device of a
         tensor-parallel group repeats)
    (5)  the training system's choices: the formats of gradients, the meaning of selective
         recomputation, sequence parallelism, asynchronous tensor parallelism, fused kernels, a
         fused loss, temporary tensors
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from argosy.cluster.fitted import fitted
from argosy.cluster.topology import CalibrationFactors, Cluster
from argosy.cost.compute import ComputeModel
from argosy.dtype import Dtype
from argosy.workload.chain import Chain
from argosy.workload.profile import Profile
from argosy.workload.systems import Buffers, Selective

# The compute model whose constants are the defaults of a calibration.
_DEFAULT = ComputeModel()


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A set of constants that the cost model uses; the defaults are those of the cost model
    itself."""

    forward_peak: float | None = _DEFAULT.forward_peak
    """Share of the datasheet's peak that matrix products of a forward reach; None: the catalogue's
    value for each device kind."""
    backward_peak: float | None = _DEFAULT.backward_peak
    """Share of the datasheet's peak that matrix products of a backward reach; None: the catalogue's
    value."""
    attention_peak: float | None = _DEFAULT.attention_peak
    """Share of the datasheet's peak that attention proper reaches; None: the catalogue's value."""
    passes: float | None = _DEFAULT.passes
    """Times that kept bytes and weights cross the memory bus in a forward; None: the catalogue's
    value."""
    forward_floor: float = _DEFAULT.forward_floor
    """Least seconds of a layer's forward."""
    backward_floor: float = _DEFAULT.backward_floor
    """Least seconds of a layer's backward."""
    split_launches: float = _DEFAULT.split_launches
    """Kernel launches of a layer in a tensor-parallel group over those of a layer on one device."""
    gathered: float = _DEFAULT.gathered
    """Times that a layer's whole output crosses the memory bus in a forward of a tensor-parallel
    group."""
    forward_start: float = _DEFAULT.forward_start
    """Seconds of a layer's forward beside its work."""
    backward_start: float = _DEFAULT.backward_start
    """Seconds of a layer's backward beside its work."""
    profile_factor: float = _DEFAULT.profile_factor
    """Seconds of layers in a run over those of measured profiles, which were taken one layer at a
    time."""
    spread: float = _DEFAULT.spread
    """Relative standard deviation of the speeds of equal devices; a stage waits for its slowest
    device."""
    bandwidth: float = 1.0
    """Share of a link's stated bandwidth that reaches the program."""
    nic_bandwidth: float | None = None
    """Share of the stated bandwidth for links between nodes; None: ``bandwidth``."""
    latency: float = 0.0
    """Seconds added to the latency of every message."""
    reduction: float = 1.0
    """Share of ``bandwidth`` that sums of gradients reach."""
    blocking: float = False
    """Share of the transfers between stages for which devices wait; True means all of them."""
    prefetch: bool = False
    """Whether ZeRO 2 and 3 exchange layer by layer, beside the action that needs the data."""
    process_bytes: float = 0.0
    """Bytes of every device that a process takes before the model."""
    activation_factor: float = 1.0
    """Memory of live activations over their bytes."""
    tuned_kernels: bool = _DEFAULT.tuned_kernels
    """Whether kernels were tuned by hand for the device generation, as Transformer Engine's."""
    compiled: bool = False
    """Whether operations between matrix products are fused into few kernels, by a compiler or by
    hand."""
    fused_loss: bool = False
    """Whether the loss is computed from the logits without copies of them."""
    buffers: Buffers = Buffers.ARGOSY
    """System whose temporary tensors are counted."""
    sequence_parallel: bool = True
    """Whether tensor-parallel groups split the sequence outside their matrix products."""
    selective: Selective = Selective.ELEMENTWISE
    """Meaning of selective recomputation."""
    stops_early: bool = False
    """Whether full recomputation ends as soon as everything that a backward needs is there, so that
    the last product of a block is not repeated."""
    shard: int | None = None
    """Number of holders over which ZeRO divides state (hybrid sharding); None: all. Only bytes
    depend on it."""
    repeats_exchanges: bool = False
    """Whether a backward repeats exchanges of tensor-parallel groups: with full recomputation those
    of the forward, otherwise the gathers of inputs that a group which splits the sequence does not
    keep."""
    gradient_dtype: Dtype | None = None
    """Format in which gradients are kept; None: that of the weights."""
    reduce_dtype: Dtype | None = None
    """Format in which gradients are summed; None: that in which they are kept."""
    async_tensor: bool = False
    """Whether tensor-parallel groups exchange in pieces beside their matrix products."""

    def compute_model(self, profiles: Mapping[str, Profile] | None = None) -> ComputeModel:
        """Return the compute model with (1) and (3)."""
        constants = {field.name for field in fields(ComputeModel)} - {"profiles"}
        return ComputeModel(profiles=profiles, **{name: getattr(self, name) for name in constants})

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
        """Return the chain with the activations' part of (4), and with (5)."""
        return replace(
            chain.with_selective(self.selective, compiled=self.compiled)
            .with_loss(fused=self.fused_loss, buffers=self.buffers)
            .with_tensor_exchange(is_async=self.async_tensor),
            activation_factor=self.activation_factor,
            sequence_parallel=self.sequence_parallel,
            stops_early=self.stops_early,
            shard=self.shard,
            repeats_exchanges=self.repeats_exchanges,
            gradient_dtype=self.gradient_dtype,
            reduce_dtype=self.reduce_dtype,
        )
