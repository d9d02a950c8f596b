"""Export a plan as FlagScale's heterogeneous meshes in YAML, with its hostfile.

Consecutive stages with the same device kind, width and number of replicas are one mesh, written as
five numbers [tensor, context, expert, data, pipeline]; ``hetero_pipeline_layer_split`` has the
blocks of every stage. Meshes may differ in all but context, so many plans for unequal devices can
be expressed. A replica of mesh m takes micro_batch_size x data of mesh 0 / data of mesh m samples.
FlagScale sorts ranks by the first position of their device type in ``hetero_device_types``, so a
kind that occurs again after another one gets a name of its own there and in the hostfile.

FlagScale cannot express: kinds of device mixed in a stage, context parallelism, stages without
blocks, blocks of two kinds, models in another shape than a GPT (``architecture``), tied tables in
stages of unequal widths, fp8 without a recipe, hosts whose ranks are not consecutive (final);
windows of attention in some blocks; uneven shares and ratios; ZeRO beyond the optimizer's state;
selective recomputation beside full; schedules other than 1F1B; a policy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from argosy.cluster.topology import Cluster
from argosy.exporters.architecture import Value, model_arguments, precision_arguments
from argosy.exporters.form import Export, Limit, head, limit, settle, target_limits, zero_level
from argosy.exporters.grid import Run, hosts_are_whole, runs_of
from argosy.exporters.megatron import OPTIMIZERS, model_limits, selective_is_meant
from argosy.plan.plan import Plan, Recompute, Stage
from argosy.plan.targets import TARGETS, TargetName
from argosy.workload.architecture import Architecture
from argosy.workload.chain import Chain

# What the target can express, and its name.
TARGET = TARGETS[TargetName.FLAGSCALE]
NAME = TARGET.name


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """A group of consecutive stages that have equal widths on one kind of device."""

    kind: str
    """The kind of device, with a number if other kinds are between this mesh and earlier ones of
    the kind."""
    tensor: int
    context: int
    expert: int
    data: int
    pipeline: int
    hosts: tuple[str, ...]

    @property
    def numbers(self) -> list[int]:
        """Return the five numbers that FlagScale reads."""
        return [self.tensor, self.context, self.expert, self.data, self.pipeline]


def export_flagscale(
    plan: Plan, chain: Chain, architecture: Architecture, cluster: Cluster, *, lossy: bool = False
) -> Export:
    """``train_hetero.yaml`` and ``hostfile``."""
    lost = settle(
        limits(plan, chain, architecture, cluster), lossy=lossy, target=TargetName.FLAGSCALE
    )
    found_meshes = meshes(plan, cluster)
    types = {host: mesh.kind for mesh in found_meshes for host in mesh.hosts}
    runs = runs_of(plan)
    content = {
        "experiment": {
            "exp_name": chain.name,
            "exp_dir": "./outputs",
            "task": {
                "type": "train",
                "backend": "megatron",
                "entrypoint": "./flagscale/train/train_gpt.py",
            },
            "runner": {"hostfile": "./hostfile", "rdzv_backend": "static"},
            "envs": {
                "CUDA_DEVICE_MAX_CONNECTIONS": 1,
                "node_specific": {run.address: _environment(run) for run in runs},
            },
        },
        "train": {
            "system": _system(plan, chain, found_meshes),
            "model": {
                **model_arguments(architecture, plan.model),
                "micro_batch_size": plan.micro_batch_size // len(plan.stages[0].replicas),
                "global_batch_size": plan.global_batch,
            },
            "data": {},
        },
        "action": "run",
        "hydra": {"run": {"dir": "${experiment.exp_dir}/hydra"}},
    }
    hosts = "".join(
        f"{run.address} slots={len(run.devices)} type={types[run.host]}\n" for run in runs
    )
    text = f"{head(TARGET, plan, chain)}\n{_yaml(content)}"
    return Export(files=(("train_hetero.yaml", text), ("hostfile", hosts)), lost=lost)


def _environment(run: Run) -> dict[str, str]:
    """Return the variables of a host: its devices, and the interface that the cluster file
    names."""
    interface = run.machine.interface
    names = () if interface is None else ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    devices = ",".join(map(str, run.devices))
    return {"CUDA_VISIBLE_DEVICES": devices, **dict.fromkeys(names, interface or "")}


def limits(
    plan: Plan, chain: Chain, architecture: Architecture, cluster: Cluster
) -> Iterator[Limit]:
    """Yield everything in a plan that the target cannot express."""
    yield from model_limits(plan.model, chain, architecture, TARGET)
    for index, stage in enumerate(plan.stages):
        kinds = _kinds(stage, cluster)
        if len(kinds) > 1:
            expected = f"one kind of device per stage: {NAME}'s meshes are of one kind"
            yield limit(f"stages[{index}]", " and ".join(kinds), expected, final=True)
        if not _blocks(stage, chain):
            yield limit(
                f"stages[{index}].layers",
                "no block",
                f"a block in every stage of {NAME}'s",
                final=True,
            )
    yield from target_limits(plan, TARGET)
    yield from hosts_are_whole(plan, NAME)
    yield from _tied_ends_are_alike(plan, architecture)
    yield from selective_is_meant(plan, TARGET)


def _tied_ends_are_alike(plan: Plan, architecture: Architecture) -> Iterator[Limit]:
    """Yield a limit if first and last stage share a table but have different widths or replicas.

    FlagScale splits and sums such a table equally in both.
    """
    first, last = plan.stages[0], plan.stages[-1]
    if not architecture.head.tied:
        return
    for name, first_value, last_value in (
        ("width", first.replicas[0].width, last.replicas[0].width),
        ("replicas", len(first.replicas), len(last.replicas)),
    ):
        if first_value != last_value:
            expected = (
                f"{first_value}, as in stage 0: both hold the token table, which {NAME} splits in "
                "one way"
            )
            yield limit(f"stages[{len(plan.stages) - 1}].{name}", last_value, expected, final=True)


def meshes(plan: Plan, cluster: Cluster) -> list[Mesh]:
    """Return the stages of a plan as meshes."""
    merged: list[Mesh] = []
    seen: list[str] = []
    for stage in plan.stages:
        (kind,) = _kinds(stage, cluster)
        if not seen or seen[-1] != kind:
            seen.append(kind)
        times = seen.count(kind)
        mesh = Mesh(
            kind=kind if times == 1 else f"{kind}-{times}",
            tensor=stage.replicas[0].width // stage.context,
            context=stage.context,
            expert=stage.expert,
            data=len(stage.replicas),
            pipeline=1,
            hosts=tuple(dict.fromkeys(name.rpartition(".")[0] for name in stage.devices)),
        )
        if merged and (merged[-1].kind, merged[-1].numbers[:4]) == (mesh.kind, mesh.numbers[:4]):
            before = merged.pop()
            mesh = replace(mesh, pipeline=before.pipeline + 1, hosts=before.hosts + mesh.hosts)
        merged.append(mesh)
    return merged


def _system(plan: Plan, chain: Chain, found_meshes: Sequence[Mesh]) -> dict[str, object]:
    """Return the parallelism and precision of the configuration."""
    return {
        "tensor_model_parallel_size": found_meshes[0].tensor,
        "pipeline_model_parallel_size": len(plan.stages),
        "sequence_parallel": any(mesh.tensor > 1 for mesh in found_meshes),
        "use_distributed_optimizer": zero_level(plan, TARGET) == 1,
        **OPTIMIZERS.get(plan.model.optimizer, {}),
        "hetero": {
            "enable_hetero": True,
            "hetero_pipeline_layer_split": [_blocks(stage, chain) for stage in plan.stages],
            "hetero_process_meshes": [number for mesh in found_meshes for number in mesh.numbers],
            "hetero_device_types": [mesh.kind for mesh in found_meshes],
            "hetero_current_device_type": found_meshes[0].kind,
        },
        **_recompute(plan),
        "precision": precision_arguments(plan),
    }


def _recompute(plan: Plan) -> dict[str, object]:
    """Return full recomputation by stage: [stages, micro-batches, whether], one row per stage."""
    kinds = {stage.recompute for stage in plan.stages}
    if kinds == {Recompute.NONE}:
        return {}
    if kinds == {Recompute.SELECTIVE}:
        return {"recompute": {"recompute_granularity": "selective"}}
    full: dict[str, Value | list[list[int]]] = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    count = plan.num_micro_batches
    if Recompute.NONE in kinds:  # 1: recompute; method 0: uniform; one layer at a time
        again = [[1, count, int(stage.recompute is not Recompute.NONE)] for stage in plan.stages]
        full["recompute_granularity_per_stage_micro_batch"] = again
        full["recompute_method_per_stage_micro_batch"] = [[1, count, 0] for _ in plan.stages]
        full["recompute_num_layers_per_stage_micro_batch"] = [[1, count, 1] for _ in plan.stages]
    return {"recompute": full}


def _kinds(stage: Stage, cluster: Cluster) -> Sequence[str]:
    """Return the device kinds of a stage."""
    return sorted({cluster.device(name).kind.name for name in stage.devices})


def _blocks(stage: Stage, chain: Chain) -> int:
    """Return the number of blocks of a stage."""
    return sum(layer.kind == "block" for layer in chain.layers_of(stage))


def _yaml(content: dict[str, object], indent: str = "") -> str:
    """Return nested tables as YAML; every other value is JSON, which is valid YAML."""
    text = ""
    for key, value in content.items():
        if isinstance(value, dict):
            text += (
                f"{indent}{key}:\n{_yaml(value, indent + '  ')}"
                if value
                else f"{indent}{key}: {{}}\n"
            )
        else:
            text += f"{indent}{key}: {json.dumps(value)}\n"
    return text
