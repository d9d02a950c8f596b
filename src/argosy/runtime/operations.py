"""A model as operations: what ``parallelize`` needs of one that is not cut into layers.

A cut that is given decides: the stage of every operation, as ``solve.stagecut.cut_graph`` has it. Without one, the
model is cut here, in proportion to the numbers of layers that the plan gives its stages.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from argosy.plan.plan import Plan
from argosy.runtime.graphcut import GraphCut, aligned
from argosy.runtime.graphstage import GraphStage, graph_weights
from argosy.runtime.recipe import autocast_for
from argosy.runtime.stage import LossFunction
from argosy.runtime.world import gather_texts
from argosy.solve.stagecut import cut_graph
from argosy.workload.capture.forward import Forward, capture_forward
from argosy.workload.capture.trace import DETACH

Places = list[tuple[nn.Module, str]]


class GraphSource:
    """Stages made of operations."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        batch: Any,
        plan: Plan,
        device: torch.device,
        seed: int,
        *,
        cut: Sequence[int] | None,
    ) -> None:
        self.model, self.plan, self.device, self.seed = model, plan, device, seed
        forward = plain = capture_forward(model, loss_fn, batch, device=device, name=plan.model.name)
        autocast = autocast_for(plan, model.parameters())
        if autocast is not None:
            forward = capture_forward(model, loss_fn, batch, device=device, autocast=autocast, name=plan.model.name)
        stages = aligned(forward, cut if cut is not None else agreed_cut(plain, plan, device), plain)
        self.cut = GraphCut(forward, stages, len(plan.stages))
        self.cut.check_divided([len(stage.replicas) for stage in plan.stages])
        self.weights = graph_weights(model, self.cut)

    def buffers(self, mine: Sequence[int]) -> Places:
        return [place for index in mine for place in self._program(index).buffers.values()]

    def programs(self, mine: Sequence[int]) -> dict[int, GraphStage]:
        return {index: self._program(index) for index in mine}

    def _program(self, index: int) -> GraphStage:
        recompute = self.plan.stages[index].recompute
        return GraphStage(self.cut, index, self.model, recompute=recompute, device=self.device, seed=self.seed)


def agreed_cut(forward: Forward, plan: Plan, device: torch.device) -> tuple[int, ...]:
    """Rank 0's cut in proportion to the plan's layers, on every rank: a solver with a time limit may find others."""
    if len(plan.stages) == 1:
        return (0,) * sum(node.op != DETACH for node in forward.graph.nodes)
    text = ""
    if dist.get_rank() == 0:
        total = plan.stages[-1].end
        shares = [(stage.end - stage.first) / total for stage in plan.stages]
        stages = cut_graph(forward.graph, shares).stages
        kept = [at for at, node in zip(stages, forward.graph.nodes, strict=True) if node.op != DETACH]
        text = json.dumps(kept)
    return tuple(json.loads(gather_texts(text, device)[0]))
