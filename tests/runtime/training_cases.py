"""Training under a plan and in one process, so that a test can compare the two."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from runtime.llama_models import EXPERT_LAYERS
from runtime.small_models import NUM_LAYERS, build
from torch import nn
from torch.utils._pytree import tree_map

from argosy.dtype import Dtype
from argosy.plan.offload import NO_OFFLOAD, parse_offload
from argosy.plan.plan import (
    Algorithm,
    ClusterRef,
    Collective,
    CollectiveChoice,
    ModelRef,
    Plan,
    PolicyRule,
    Recompute,
    Replica,
    Stage,
)
from argosy.runtime.communication.measured import clock_offsets
from argosy.runtime.sources.recipe import AUTOCAST
from argosy.runtime.stages.dropout import Masks
from argosy.runtime.stages.moment import Moment
from argosy.runtime.stages.tensor_stage import Sharing
from argosy.runtime.step.trainer import Trainer, parallelize
from argosy.runtime.weights import gradients
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.schedule.action import worker_of
from argosy.solve.programs.recorded import GroupSteps
from argosy.space.operations.sharding import State, sharded

RATE = 0.1
CLUSTER = json.dumps(
    {
        "name": "local",
        "nodes": [
            {
                "name": "n",
                "devices": [{"kind": "V100-32GB", "count": 8}],
                "intra": [{"medium": "nvlink", "bandwidth": "150 GB/s", "latency": "3 us"}],
                "nic": {"bandwidth": "25 Gbit/s", "latency": "20 us"},
            }
        ],
    }
)
"""Where tensor-parallel groups are planned for."""
AT_ONCE = CLUSTER.replace('"3 us"', '"0 us"')
"""The same with links that have no latency, so that two collectives cost no more than one."""
SMALL_CLIP = 0.05


@dataclass(frozen=True, kw_only=True)
class Case:
    """One cell of the matrix."""

    model: str = "gpt"
    kind: ScheduleKind = ScheduleKind.ONE_F_ONE_B
    k: int = 1
    shares: tuple[tuple[int, ...], ...] = ((2,), (2,))
    """Per stage, the samples of its replicas."""
    num_micro_batches: int = 5
    recompute: Recompute = Recompute.NONE
    zero: int = 0
    clip: bool = False
    tied: bool = False
    single: bool = False
    """float32, not float64."""
    dtype: Dtype = Dtype.FP32
    """Of products; another one needs single precision."""
    proportions: tuple[float, ...] = ()
    """How ZeRO divides rows; evenly where empty."""
    steps: int = 2
    algorithm: Algorithm = Algorithm.RING
    """By which replicas sum their gradients."""
    per_node: int = 8
    """Devices of a node."""
    work: tuple[float, ...] = ()
    """Shares of the work of stages made of operations; where empty, stages are as the runtime makes
    them."""
    offload: str = ""
    """What stages keep in host memory."""
    ratios: tuple[tuple[Any, ...], ...] = ()
    """Per stage, how the devices of each replica's tensor-parallel group share its work: ratios, or
    such for every replica; where empty, all are alone."""
    sequence: bool = False
    """Whether groups divide positions between products, because links have no latency."""
    context: bool = False
    """Whether these devices share the sequence instead of the weights."""
    members: int = 1
    """The devices of each part of a sequence, which share its weights."""
    experts: tuple[int, ...] = ()
    """Experts of a layer on each replica of a group, in stages with layers that have some."""

    def groups(self, stage: int) -> list[tuple[float, ...]]:
        """The ratios of every replica."""
        ratios = self.ratios[stage] if self.ratios else (1.0,)
        return list(ratios) if isinstance(ratios[0], tuple) else [ratios] * len(self.shares[stage])

    @property
    def num_ranks(self) -> int:
        return sum(
            len(group)
            for stage in range(len(self.shares) // self.chunks)
            for group in self.groups(stage)
        )

    @property
    def chunks(self) -> int:
        return 2 if self.kind.is_chunked else 1

    def __str__(self) -> str:
        shares = "|".join(":".join(map(str, samples)) for samples in self.shares)
        extras = [str(self.recompute)] if self.recompute is not Recompute.NONE else []
        extras += [f"zero{self.zero}"] if self.zero else []
        extras += [self.offload] if self.offload else []
        extras += [name for name in ("clip", "tied", "single", "sequence") if getattr(self, name)]
        extras += [str(self.dtype)] if self.dtype is not Dtype.FP32 else []
        extras += ["operations"] if self.work else []
        extras += (
            [
                "|".join(
                    "+".join(
                        ":".join(f"{ratio:g}" for ratio in group) for group in self.groups(stage)
                    )
                    for stage in range(len(self.ratios))
                )
            ]
            if self.ratios
            else []
        )
        extras += ["context"] if self.context else []
        extras += [f"of{self.members}"] if self.members > 1 else []
        extras += [f"experts{':'.join(map(str, self.experts))}"] if self.experts else []
        extras += (
            [f"{self.algorithm}{self.per_node}"] if self.algorithm is not Algorithm.RING else []
        )
        return "-".join(
            [self.model, f"{self.kind}{self.k}", shares, f"m{self.num_micro_batches}", *extras]
        )


@dataclass
class Outcome:
    """What training gave: losses by step; gradients of the last step and weights after it, by
    name."""

    losses: list[float]
    gradients: dict[str, list[tuple[tuple[int, ...], np.ndarray]]] = field(default_factory=dict)
    weights: dict[str, list[tuple[tuple[int, ...], np.ndarray]]] = field(default_factory=dict)
    """(First element in every dim, elements), for each holder one entry or several."""


def plan_of(case: Case) -> Plan:
    size = sum(case.shares[0])
    workers = len(case.shares) // case.chunks
    names: list[list[str]] = []
    for index in range(len(case.shares)):
        used = sum(map(len, names[:workers]))
        places = [
            divmod(used + at, case.per_node) for at in range(sum(map(len, case.groups(index))))
        ]
        worker = worker_of(case.kind, index, workers)
        names.append(
            names[worker] if index >= workers else [f"n{node}.{at}" for node, at in places]
        )
    layers = NUM_LAYERS.get(case.model, 6)
    links = AT_ONCE if case.sequence else CLUSTER
    cuts = [round(index * layers / len(case.shares)) for index in range(len(case.shares) + 1)]
    return Plan(
        model=ModelRef(name=case.model, sequence_length=1, dtype=case.dtype),
        cluster=ClusterRef(name="local", hash="", content=links if case.ratios else "{}"),
        global_batch=size * case.num_micro_batches,
        micro_batch_size=size,
        num_micro_batches=case.num_micro_batches,
        schedule=ScheduleSpec(
            kind=case.kind, k=case.k, chunks=1 if case.kind.is_v else case.chunks
        ),
        stages=tuple(
            Stage(
                first=cuts[index],
                end=cuts[index + 1],
                replicas=tuple(_replicas(case, index, names[index])),
                recompute=case.recompute,
                zero=case.zero,
                offload=parse_offload(case.offload) if case.offload else NO_OFFLOAD,
                context=max(1, len(case.groups(index)[0]) // case.members) if case.context else 1,
                **_experts(case, index, cuts[index], cuts[index + 1]),
            )
            for index in range(len(case.shares))
        ),
        collectives=tuple(
            CollectiveChoice(collective=Collective.WEIGHTS, stage=index, algorithm=case.algorithm)
            for index in range(len(case.shares))
        ),
    )


def _experts(case: Case, stage: int, first: int, end: int) -> dict[str, Any]:
    """Of a stage of these layers, in how many parts experts are shared out, and how many each has;
    none if its holders do not form such groups."""
    parts = max(1, len(case.groups(stage)[0]) // case.members) if case.context else 1
    holders = len(case.shares[stage]) * parts
    if not case.experts or holders % len(case.experts):
        return {}
    if not any(first <= layer < end for layer in EXPERT_LAYERS.get(case.model, (first,))):
        return {}
    return {
        "expert": len(case.experts),
        "experts": case.experts if len(set(case.experts)) > 1 else (),
    }


def _replicas(case: Case, stage: int, names: list[str]) -> Iterator[Replica]:
    left = list(names)
    for samples, ratios in zip(case.shares[stage], case.groups(stage), strict=True):
        devices, left = tuple(left[: len(ratios)]), left[len(ratios) :]
        yield Replica(devices=devices, samples=samples, ratios=ratios if len(ratios) > 1 else ())


def built(case: Case) -> Any:
    samples = sum(case.shares[0]) * case.num_micro_batches
    return build(
        case.model, samples, tied=case.tied, dtype=torch.float32 if case.single else torch.float64
    )


class KeepGradients(torch.optim.SGD):
    """SGD with momentum and decay that remembers the last gradients it saw."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, lr=RATE, momentum=0.9, weight_decay=0.01)
        self.seen: dict[int, torch.Tensor] = {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.seen |= {id(p): p.grad.clone() for p in group["params"] if p.grad is not None}
        super().step(closure)


def train_in_parallel(case: Case) -> Outcome:
    """To be called by every rank."""
    model, loss_fn, batch = built(case)
    proportions = (lambda stage: case.proportions) if case.proportions else None
    clip = SMALL_CLIP if case.clip else None
    trainer = parallelize(
        model,
        loss_fn,
        KeepGradients,
        batch,
        plan_of(case),
        clip_norm=clip,
        shard_proportions=proportions,
        cut=cut_of(case),
    )
    losses = [trainer.step(batch) for _ in range(case.steps)]
    return outcome_of(trainer, losses)


def train_with_early_sums(case: Case) -> Outcome:
    """Gradient sums begin during the last backward, as they do on GPUs."""
    with mock.patch.object(gradients, "is_on_device", lambda way: True):
        return train_in_parallel(case)


def train_with_rows(case: Case, name: str) -> Outcome:
    """With a weight that tensor-parallel groups cut by its rows, whatever they would choose
    themselves."""
    chosen = Sharing._search

    def search(sharing: Sharing, samples: int, stored: Mapping[int, State]) -> GroupSteps:
        rows = {
            number: sharded(0, value.shape[0])
            for number, value in enumerate(sharing.cut.graph.values)
            if value.name == name
        }
        return chosen(sharing, samples, {**stored, **rows})

    with mock.patch.object(Sharing, "_search", search):
        return train_in_parallel(case)


def cut_of(case: Case) -> tuple[int, ...] | None:
    """The captured step cut by FLOP; None where stages are not of operations."""
    from argosy.solve.programs.stagecut import cut_graph
    from argosy.workload.capture.trace import capture

    return cut_graph(capture(lambda: built(case)), case.work).stages if case.work else None


def outcome_of(trainer: Trainer, losses: list[float]) -> Outcome:
    result = Outcome(losses)
    for held in trainer.held():
        seen = None if trainer.optimizer is None else trainer.optimizer.seen.get(id(held.parameter))
        for box in held.boxes:
            if seen is not None:
                result.gradients.setdefault(held.name, []).append(
                    (box.whole, box.of(seen).cpu().numpy())
                )
            weight = box.of(held.parameter.detach()).clone()
            result.weights.setdefault(held.name, []).append((box.whole, weight.cpu().numpy()))
    return result


def train_alone(case: Case) -> Outcome:
    """The reference: one process, the same micro-batches."""
    model, loss_fn, batch = built(case)
    optimizer = KeepGradients(model.parameters())
    size, losses = sum(case.shares[0]), []
    for step in range(case.steps):
        total = 0.0
        for index in range(case.num_micro_batches):
            rows = slice(index * size, (index + 1) * size)
            with masks_of_layers(model, Moment(step, index * size, size)), autocast_of(case):
                loss = (
                    loss_fn(model, tree_map(lambda leaf, rows=rows: leaf[rows], batch))
                    / case.num_micro_batches
                )
            loss.backward()
            total += loss.item()
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), SMALL_CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    result = Outcome(losses)
    for name, parameter in model.named_parameters():
        if id(parameter) in optimizer.seen:
            result.gradients[name] = [((), optimizer.seen[id(parameter)].numpy())]
        result.weights[name] = [((), parameter.detach().numpy())]
    return result


def autocast_of(case: Case) -> contextlib.AbstractContextManager[Any]:
    dtype = AUTOCAST.get(case.dtype)
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def _spans_of_layers(model: Any) -> list[tuple[nn.Module, nn.Module]]:
    """First and last module of each layer of a GPT-2, where the plan's layers begin and end."""
    if type(model).__name__ != "GPT2LMHeadModel":
        return []
    inside = model.transformer
    return [
        (inside.wte, inside.drop),
        *((block, block) for block in inside.h),
        (inside.ln_f, model.lm_head),
    ]


@contextlib.contextmanager
def masks_of_layers(model: nn.Module, moment: Moment) -> Iterator[None]:
    """What a single process needs to draw the masks that a plan draws: to know which layer it is
    in."""
    hooks: list[Any] = []
    for index, layer in enumerate(_spans_of_layers(model)):
        masks = Masks(0, index, moment)
        hooks.append(
            layer[0].register_forward_pre_hook(lambda *_, masks=masks: masks.__enter__() and None)
        )
        hooks.append(
            layer[-1].register_forward_hook(
                lambda *_, masks=masks: masks.__exit__(None, None, None)
            )
        )
    yield
    for hook in hooks:
        hook.remove()


def differences(case: Case, outcomes: list[Outcome]) -> list[str]:
    """Where ranks disagree with one process, in words; empty where nothing does."""
    wanted = train_alone(case)
    tolerance = (1e-3 if case.dtype in AUTOCAST else 1e-4) if case.single else 1e-9
    found = []
    for rank, outcome in enumerate(outcomes):
        if not np.allclose(outcome.losses, wanted.losses, rtol=tolerance, atol=tolerance):
            found.append(f"rank {rank}: losses {outcome.losses}, alone {wanted.losses}")
    for what in ("gradients", "weights"):
        for name, [(_, whole)] in getattr(wanted, what).items():
            parts = [part for outcome in outcomes for part in getattr(outcome, what).get(name, [])]
            found += _part_problems(f"{what} of {name}", whole, parts, tolerance)
    return found


def box_of(first: tuple[int, ...], part: np.ndarray) -> tuple[slice, ...]:
    """Where in the whole a part is that begins with an element."""
    return tuple(slice(begin, begin + size) for begin, size in zip(first, part.shape, strict=True))


def _part_problems(what: str, whole: np.ndarray, parts: list[Any], tolerance: float) -> list[str]:
    problems = []
    covered = np.zeros(whole.shape, dtype=bool)
    for first, part in parts:
        box = box_of(first, part)
        covered[box] = True
        worst = np.abs(part - whole[box]).max(initial=0.0)
        if not worst <= tolerance * max(1.0, np.abs(whole).max(initial=0.0)):
            problems.append(f"{what}: off by {worst:.3g}")
    if not covered.all():
        problems.append(f"{what}: {int((~covered).sum())} elements that no rank holds")
    return problems


def train_with_changes(case: Case, changes: list[Any]) -> Outcome:
    """A step, then before each further one a change: a ``ScheduleSpec``, or (stage, samples)."""
    model, loss_fn, batch = built(case)
    trainer = parallelize(model, loss_fn, KeepGradients, batch, plan_of(case))
    losses = [trainer.step(batch)]
    for change in changes:
        if isinstance(change, ScheduleSpec):
            trainer.set_schedule(change)
        else:
            trainer.set_shares(*change)
        losses.append(trainer.step(batch))
    return outcome_of(trainer, losses)


def train_by_policy(
    case: Case, policy: tuple[PolicyRule, ...], bandwidths: list[float]
) -> tuple[Outcome, list[str]]:
    """A step at each bandwidth of the policy's edge, and the schedules that were used."""
    model, loss_fn, batch = built(case)
    planned = replace(plan_of(case), policy=policy)
    trainer = parallelize(model, loss_fn, KeepGradients, batch, planned)
    losses, used = [], []
    for bandwidth in bandwidths:
        trainer.set_schedule(planned.schedule_at({policy[0].edge: bandwidth}))
        used.append(repr(trainer.plan.schedule))
        losses.append(trainer.step(batch))
    return outcome_of(trainer, losses), used


def ways_of_summing(case: Case) -> list[str]:
    """How this rank sums gradients, before anything is trained."""
    model, loss_fn, batch = built(case)
    gradients = parallelize(model, loss_fn, KeepGradients, batch, plan_of(case)).gradients
    ways = [way for way, _, _ in gradients.shared if way is not None] + [
        shards.way for shards in gradients.shards
    ]
    return sorted(
        {f"{type(way).__name__}{' by trees' * getattr(way, 'is_tree', False)}" for way in ways}
    )


def measured_run(case: Case) -> str | None:
    """The timeline of a run, as JSON, on rank 0."""
    from argosy.timeline.file import dumps_timeline

    model, loss_fn, batch = built(case)
    trainer = parallelize(model, loss_fn, KeepGradients, batch, plan_of(case))
    for _ in range(case.steps):
        trainer.step(batch)
    timeline = trainer.timeline()
    return None if timeline is None else dumps_timeline(timeline)


def offsets_of_skewed_clocks(skew: float) -> list[tuple[float, float]]:
    """Each rank's clock runs ``skew`` times its number ahead."""
    rank = torch.distributed.get_rank()
    offsets = clock_offsets(torch.device("cpu"), clock=lambda: time.perf_counter() + skew * rank)
    return [(offset.seconds, offset.uncertainty) for offset in offsets]
