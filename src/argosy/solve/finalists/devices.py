"""Place a complete plan of a search on devices, and choose algorithms for its collectives."""

from __future__ import annotations

from collections.abc import Sequence

from argosy.cluster.topology import Cluster
from argosy.plan.plan import ClusterRef, ModelRef, Plan
from argosy.schedule import ScheduleSpec
from argosy.sim.tasks.choose import with_collectives
from argosy.sim.tasks.known import Known
from argosy.solve.search.pipeline import Choice
from argosy.solve.search.shape import Shape
from argosy.space.place import place_stages
from argosy.space.price import Prices


def on_devices(
    shape: Shape,
    schedule: ScheduleSpec,
    choices: Sequence[Choice],
    prices: Prices,
    cluster: Cluster,
    known: Known | None = None,
) -> Plan:
    """The plan that runs these choices under a schedule; ``known`` has what was found for other
    plans of the cluster."""
    chain, known = prices.chain, known or Known()
    replicas = place_stages(prices.pools, [choice.option for choice in choices], known.placed)
    plan = Plan(
        model=ModelRef.of(chain),
        cluster=ClusterRef.of(cluster),
        global_batch=shape.micro_batch_size * shape.num_micro_batches,
        micro_batch_size=shape.micro_batch_size,
        num_micro_batches=shape.num_micro_batches,
        schedule=schedule,
        stages=tuple(
            choice.option.stage(choice.first, choice.end, group)
            for choice, group in zip(choices, replicas, strict=True)
        ),
    )
    return with_collectives(plan, chain, cluster, known)
