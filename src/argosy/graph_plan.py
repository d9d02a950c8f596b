"""What was found for a captured program as a ``Plan``, so that it can be kept in a file and carried out.

(1)  A stage that every device of its group holds all weights of is divided by samples: one replica per device, with
     samples in proportion to the ratios.
(2)  Any other is one replica, shared by the group as a tensor-parallel group with these ratios. How it is cut is
     found again where it runs, among cuts of weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from argosy.cluster.topology import Cluster
from argosy.dtype import Dtype
from argosy.graph_planner import SCHEDULE, GraphPlan
from argosy.plan.plan import ClusterRef, ModelRef, Plan, Predicted, Replica, Stage
from argosy.solve.spmd import Program
from argosy.space.sharding import REPLICATED, unit_counts
from argosy.workload.part import forward_order


def as_plan(found: GraphPlan, cluster: Cluster, dtype: Dtype, samples: int, *, divided: bool = True) -> Plan:
    """The plan of what was found; without ``divided``, (2) for all stages, which a program that mixes samples needs."""
    if found.is_pipeline:
        assert found.pipeline is not None
        pipeline = found.pipeline
        programs = [stage.program for stage in pipeline.stages]
        graph, schedule, count = pipeline.graph, pipeline.schedule, pipeline.micro_batches
        placed = [pipeline.parts.of_node[index] for index in forward_order(graph)]
        slowest = max(range(len(programs)), key=lambda at: pipeline.stages[at].seconds)
    else:
        assert found.program is not None
        programs, graph, schedule, count, slowest = [found.program], found.program.graph, SCHEDULE, 1, 0
        placed = [0] * len(forward_order(graph))
    size = samples // count
    memory = {n: b for program in programs for n, b in zip(program.group.names, program.device_bytes, strict=True)}
    return Plan(
        model=ModelRef(name=graph.name, sequence_length=1, dtype=dtype),
        cluster=ClusterRef.of(cluster),
        global_batch=samples,
        micro_batch_size=size,
        num_micro_batches=count,
        schedule=schedule,
        stages=tuple(
            Stage(
                first=index,
                end=index + 1,
                replicas=tuple(_replicas(program, size, divided=divided)),
                ops=tuple(_ranges(placed, index)),
            )
            for index, program in enumerate(programs)
        ),
        predicted=Predicted(
            iteration_seconds=found.seconds,
            samples_per_second=samples / found.seconds,
            peak_memory_bytes=tuple(memory.items()),
            bottleneck=f"stage {slowest}",
        ),
    )


def _replicas(program: Program, samples: int, *, divided: bool) -> Iterator[Replica]:
    """(1), (2)."""
    names, ratios = program.group.names, program.ratios
    whole = all(program.deliveries[value].stored == REPLICATED for value in program.graph.parameters)
    if len(names) > 1 and whole and divided and samples >= len(names):
        for name, count in zip(names, unit_counts(samples, ratios), strict=True):
            yield Replica(devices=(name,), samples=count)
    else:
        yield Replica(devices=names, samples=samples, ratios=ratios if len(names) > 1 else ())


def _ranges(placed: Sequence[int], stage: int) -> Iterator[tuple[int, int]]:
    """The operations of a stage.

    >>> list(_ranges([0, 0, 1, 0, 1, 1], 1))
    [(2, 3), (4, 6)]
    """
    at = 0
    for owner, run in itertools.groupby(placed):
        length = len(list(run))
        if owner == stage:
            yield at, at + length
        at += length
