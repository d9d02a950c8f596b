"""Many plans under many scenarios: the batch engine on pieces of the table of (scenario, candidate), side by side.

Every piece is a few scenarios with all candidates, at least ``LEAST`` simulations, so that sending it costs little
beside playing it. Pieces do not depend on who plays them: the table is the same, to the last bit, for any executor.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial

import numpy as np

from argosy.cluster.topology import Cluster
from argosy.cluster.trace import FloatArray
from argosy.sim.batch import Amounts, simulate_batch
from argosy.sim.graph import TaskGraph

LEAST = 16_384
"""Simulations of a piece; the last may be smaller."""


def sweep(
    graph: TaskGraph, clusters: Sequence[Cluster], amounts: Amounts, *, executor: Executor | None = None
) -> FloatArray:
    """Seconds of one iteration as an array (scenarios, candidates); without an executor, in this process."""
    width = amounts.values.shape[1]
    each = max(1, -(-LEAST // max(1, width)))
    pieces = [clusters[first : first + each] for first in range(0, len(clusters), each)]
    play = partial(_play, graph=graph, amounts=amounts)
    rows = list(executor.map(play, pieces) if executor is not None else map(play, pieces))
    return np.concatenate(rows) if rows else np.empty((0, width))


def _play(clusters: Sequence[Cluster], *, graph: TaskGraph, amounts: Amounts) -> FloatArray:
    return simulate_batch(graph, clusters, amounts)
