"""A plan as FlagScale's heterogeneous meshes, in YAML, with its hostfile.

Stages that follow one another with the same device kind, width and number of replicas are one mesh, written as five
numbers [tensor, context, expert, data, pipeline]; ``hetero_pipeline_layer_split`` has the blocks of every stage. Meshes
may differ in all but context, so many plans for unequal devices can be said. A replica of mesh m takes
micro_batch_size x data of mesh 0 / data of mesh m samples.

What FlagScale cannot express: kinds of device mixed in a stage, context parallelism that differs, stages without
blocks, blocks of two kinds, models in another shape than a GPT (``architecture``), fp8 without a recipe (final);
windows of attention; uneven shares and ratios; ZeRO beyond the optimizer's state; selective recomputation beside full;
schedules other than 1F1B; a policy; hosts whose ranks are apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from argosy.cluster.topology import Cluster
from argosy.dtype import Dtype
from argosy.export.architecture import Value, model_arguments, precision_arguments, shape_has_words
from argosy.export.form import (
    Export,
    Limit,
    head,
    limit,
    policy_is_absent,
    samples_are_even,
    schedule_is_one_of,
    settle,
    tensors_are_even,
    widths_are_alike,
    zero_is_one_of,
    zero_level,
)
from argosy.export.grid import hosts_are_whole, hosts_of
from argosy.export.megatron import layers_have_letters, selective_is_meant
from argosy.plan.plan import Plan, Recompute, Stage
from argosy.schedule import ScheduleKind
from argosy.workload.architecture import Architecture
from argosy.workload.chain import Chain

NAME = "FlagScale"
ZERO = (0, 1)


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Stages that are alike on one kind of device."""

    kind: str
    tensor: int
    context: int
    expert: int
    data: int
    pipeline: int

    @property
    def numbers(self) -> list[int]:
        return [self.tensor, self.context, self.expert, self.data, self.pipeline]


def export_flagscale(
    plan: Plan, chain: Chain, architecture: Architecture, cluster: Cluster, *, lossy: bool = False
) -> Export:
    """``train_hetero.yaml`` and ``hostfile``."""
    lost = settle(limits(plan, chain, architecture, cluster), lossy=lossy)
    content = {
        "experiment": {"exp_name": chain.name, "runner": {"hostfile": "hostfile", "nnodes": len(hosts_of(plan))}},
        "system": _system(plan, chain, cluster),
        "model": {
            **model_arguments(architecture, plan),
            "micro_batch_size": plan.micro_batch_size // len(plan.stages[0].replicas),
            "global_batch_size": plan.global_batch,
        },
    }
    hosts = "".join(
        f"{host.name} slots={len(host.devices)} type={cluster.device(f'{host.name}.{host.devices[0]}').kind.name}\n"
        for host in hosts_of(plan)
    )
    text = f"{head(NAME, plan, chain)}\n{_yaml(content)}"
    return Export(files=(("train_hetero.yaml", text), ("hostfile", hosts)), lost=lost)


def limits(plan: Plan, chain: Chain, architecture: Architecture, cluster: Cluster) -> Iterator[Limit]:
    yield from layers_have_letters(chain, NAME)
    yield from shape_has_words(architecture, plan, NAME)
    for index, stage in enumerate(plan.stages):
        kinds = _kinds(stage, cluster)
        if len(kinds) > 1:
            expected = f"one kind of device per stage: {NAME}'s meshes are of one kind"
            yield limit(f"stages[{index}]", " and ".join(kinds), expected, final=True)
        if stage.context != plan.stages[0].context:
            yield limit(f"stages[{index}].context", stage.context, f"one number for all of {NAME}'s meshes", final=True)
        if not _blocks(stage, chain):
            yield limit(f"stages[{index}].layers", "no block", f"a block in every stage of {NAME}'s", final=True)
        yield from widths_are_alike([stage], plan, NAME)
    yield from samples_are_even(plan, NAME)
    yield from tensors_are_even(plan, NAME)
    yield from zero_is_one_of(plan, NAME, ZERO)
    yield from schedule_is_one_of(plan, NAME, (ScheduleKind.ONE_F_ONE_B,))
    yield from policy_is_absent(plan, NAME)
    yield from hosts_are_whole(plan, NAME)
    found = {stage.recompute for stage in plan.stages}
    if Recompute.SELECTIVE in found and len(found) > 1:
        text = "/".join(stage.recompute for stage in plan.stages)
        expected = f"none or full by stage, or selective everywhere, in {NAME}; full is written for selective"
        yield limit("stages.recompute", text, expected)
    yield from selective_is_meant(plan, NAME)
    if plan.model.dtype is Dtype.FP8:
        yield limit("model.dtype", "fp8", f"bf16, fp16 or fp32: {NAME} needs a recipe for fp8", final=True)


def meshes(plan: Plan, cluster: Cluster) -> list[Mesh]:
    found: list[Mesh] = []
    for stage in plan.stages:
        (kind,) = _kinds(stage, cluster)
        mesh = Mesh(
            kind=kind,
            tensor=stage.replicas[0].width // stage.context,
            context=stage.context,
            expert=stage.expert,
            data=len(stage.replicas),
            pipeline=1,
        )
        if found and (found[-1].kind, found[-1].numbers[:4]) == (mesh.kind, mesh.numbers[:4]):
            mesh = Mesh(**{**vars(mesh), "pipeline": found.pop().pipeline + 1})
        found.append(mesh)
    return found


def _system(plan: Plan, chain: Chain, cluster: Cluster) -> dict[str, object]:
    found = meshes(plan, cluster)
    return {
        "tensor_model_parallel_size": found[0].tensor,
        "pipeline_model_parallel_size": len(plan.stages),
        "sequence_parallel": any(mesh.tensor > 1 for mesh in found),
        "use_distributed_optimizer": zero_level(plan, ZERO) == 1,
        "hetero": {
            "enable_hetero": True,
            "hetero_pipeline_layer_split": [_blocks(stage, chain) for stage in plan.stages],
            "hetero_process_meshes": [number for mesh in found for number in mesh.numbers],
            "hetero_device_types": [mesh.kind for mesh in found],
            "hetero_current_device_type": found[0].kind,
            "standalone_embedding_stage": False,
        },
        **_recompute(plan),
        "precision": precision_arguments(plan.model.dtype),
    }


def _recompute(plan: Plan) -> dict[str, object]:
    """Full recomputation by stage: [stages, micro-batches, whether], one row per stage."""
    kinds = {stage.recompute for stage in plan.stages}
    if kinds == {Recompute.NONE}:
        return {}
    if kinds == {Recompute.SELECTIVE}:
        return {"recompute": {"recompute_granularity": "selective"}}
    full: dict[str, Value | list[list[int]]] = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "recompute_granularity_per_stage_micro_batch": [
            [1, plan.num_micro_batches, int(stage.recompute is not Recompute.NONE)] for stage in plan.stages
        ],
    }
    return {"recompute": full}


def _kinds(stage: Stage, cluster: Cluster) -> Sequence[str]:
    return sorted({cluster.device(name).kind.name for name in stage.devices})


def _blocks(stage: Stage, chain: Chain) -> int:
    return sum(layer.kind == "block" for layer in chain.layers[stage.first : stage.end])


def _yaml(content: dict[str, object], indent: str = "") -> str:
    """Nested tables; every other value is JSON, which YAML reads as it is."""
    text = ""
    for key, value in content.items():
        if isinstance(value, dict):
            text += f"{indent}{key}:\n{_yaml(value, indent + '  ')}" if value else ""
        else:
            text += f"{indent}{key}: {json.dumps(value)}\n"
    return text
