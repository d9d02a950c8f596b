"""The bundled plans, as code: the files in ``data/plans`` are written from here.

    ARGOSY_UPDATE_GOLDEN=1 python -m pytest tests/cli/test_bundled_plans.py

writes them again, after a change of a bundled cluster or of the plans below.
"""

from __future__ import annotations

from argosy.cluster.file import load_cluster
from argosy.dtype import Dtype
from argosy.plan.plan import ClusterRef, ModelRef, Plan, Recompute, Replica, Stage
from argosy.schedule import ScheduleKind, ScheduleSpec


def llama_on_mixed_16() -> Plan:
    """A stage per node, a replica per device; the A100 nodes take four to five times the layers of
    the V100 nodes.

    fp16, which both kinds have; ZeRO 1, so that four replicas share one optimizer state. Layer 0 is
    the embedding and layer 33 the head, which costs as much as two blocks.
    """
    cluster = load_cluster("mixed-16")
    bounds = {"a0": (0, 14), "a1": (14, 28), "v0": (28, 32), "v1": (32, 34)}
    stages = tuple(
        Stage(
            first=first,
            end=end,
            replicas=tuple(Replica(devices=(f"{node}.{index}",), samples=1) for index in range(4)),
            zero=1,
        )
        for node, (first, end) in bounds.items()
    )
    return Plan(
        model=ModelRef(name="llama-3-8b", sequence_length=2048, dtype=Dtype.FP16),
        cluster=ClusterRef.of(cluster),
        global_batch=128,
        micro_batch_size=4,
        num_micro_batches=32,
        schedule=ScheduleSpec(kind=ScheduleKind.KFKB, k=2),
        stages=stages,
    )


def gpt2_xl_on_two_cards() -> Plan:
    """The large cards take four fifths of the layers as two replicas; the small ones split theirs
    between them."""
    cluster = load_cluster("two-cards")
    large = tuple(Replica(devices=(f"box0.{index}",), samples=2) for index in (0, 1))
    small = (Replica(devices=("box0.2", "box0.3"), samples=4),)
    return Plan(
        model=ModelRef(name="gpt2-xl", sequence_length=1024, dtype=Dtype.FP16),
        cluster=ClusterRef.of(cluster),
        global_batch=64,
        micro_batch_size=4,
        num_micro_batches=16,
        schedule=ScheduleSpec(),
        stages=(
            Stage(first=0, end=41, replicas=large, recompute=Recompute.SELECTIVE, zero=1),
            Stage(first=41, end=50, replicas=small),
        ),
    )


PLANS = {"gpt2-xl-on-two-cards": gpt2_xl_on_two_cards, "llama-3-8b-on-mixed-16": llama_on_mixed_16}
