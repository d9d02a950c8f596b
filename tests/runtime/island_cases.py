"""Islands on the ranks of a pool, and the same algorithm in one process, written without the
product's code."""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from runtime.small_models import build
from runtime.training_cases import Case, plan_of
from torch.utils._pytree import tree_map

from argosy.adapt.sync import SyncLimits
from argosy.cluster.file import cluster_from_content
from argosy.cluster.topology import canonical
from argosy.plan.islands import Compression, IslandPlan, OuterOptimizer
from argosy.plan.islands_file import dumps_island_plan
from argosy.plan.plan import ClusterRef
from argosy.runtime.islands.keeping import load_island, save_island
from argosy.runtime.islands.lead import Lead
from argosy.runtime.islands.membership import Membership
from argosy.runtime.islands.training import IslandTrainer
from argosy.runtime.processes.run_folder import checkpoints
from argosy.runtime.step.trainer import parallelize


@dataclass(frozen=True, kw_only=True)
class IslandCase:
    """Islands that train a small model together."""

    islands: tuple[Case, ...]
    every: int = 2
    steps: int = 6
    fragments: int = 1
    overlap: int = 0
    mixing: float = 0.5
    rate: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    compression: Compression = Compression.NONE
    inner: str = "adamw"
    save_at: int | None = None
    """Steps after which a checkpoint is written."""
    folder: str = ""
    resumes: bool = False
    limits: SyncLimits | None = None
    silent_at: int | None = None
    """Steps after which island 1 gives no sign of life until the others have gone on without it."""

    @property
    def plan(self) -> IslandPlan:
        plans = []
        for at, case in enumerate(self.islands):
            plan = plan_of(case)
            stages = tuple(
                replace(
                    stage,
                    replicas=tuple(
                        replace(r, devices=tuple(f"i{at}{name}" for name in r.devices))
                        for r in stage.replicas
                    ),
                )
                for stage in plan.stages
            )
            plans.append(replace(plan, stages=stages))
        return IslandPlan(
            islands=tuple(plans),
            sync_every=self.every,
            fragments=self.fragments,
            overlap=self.overlap,
            mixing=self.mixing,
            outer=OuterOptimizer(
                learning_rate=self.rate, momentum=self.momentum, nesterov=self.nesterov
            ),
            compression=self.compression,
        )

    @property
    def shares(self) -> list[int]:
        return [sum(case.shares[0]) * case.num_micro_batches for case in self.islands]

    @property
    def num_ranks(self) -> int:
        return sum(case.num_ranks for case in self.islands)

    def place(self, rank: int) -> tuple[int, int]:
        """The island and the rank in it of a rank of the pool."""
        for at, case in enumerate(self.islands):
            if rank < case.num_ranks:
                return at, rank
            rank -= case.num_ranks
        raise AssertionError("a rank of no island")

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        if self.inner == "sgd":
            return torch.optim.SGD(parameters, lr=0.1)
        return torch.optim.AdamW(parameters, lr=0.01)

    def batch(self, step: int) -> Any:
        """The global batch of a step."""
        generator = torch.Generator().manual_seed(1000 + step)
        _, _, example = build("gpt", sum(self.shares), tied=False, dtype=torch.float64)

        def redrawn(leaf: Any) -> Any:
            return (
                leaf[torch.randperm(len(leaf), generator=generator)]
                if isinstance(leaf, torch.Tensor)
                else leaf
            )

        return tree_map(redrawn, example)

    def rows(self, batch: Any, island: int) -> Any:
        begin = sum(self.shares[:island])
        end = begin + self.shares[island]
        return tree_map(
            lambda leaf: leaf[begin:end] if isinstance(leaf, torch.Tensor) else leaf, batch
        )


def train_islands(case: IslandCase) -> dict[str, Any]:
    """One rank of the pool: its island, its part of the final weights, and what the lead wrote
    down."""
    torch.manual_seed(0)
    island, rank = case.place(dist.get_rank())
    is_first = dist.get_rank() == 0
    server = (
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if is_first else None
    )
    port = torch.tensor(0 if server is None else server.port)
    dist.broadcast(port, 0)
    dist.destroy_process_group()
    size = case.islands[island].num_ranks

    def connect() -> dist.Store:
        return dist.TCPStore("127.0.0.1", int(port), is_master=False)

    inner = dist.PrefixStore(f"island-{island}", connect())
    dist.init_process_group("gloo", store=inner, rank=rank, world_size=size)
    model, loss_fn, example = build("gpt", sum(case.shares), tied=False, dtype=torch.float64)
    plan = case.plan
    trainer = parallelize(
        model, loss_fn, case.optimizer, case.rows(example, island), plan.islands[island]
    )
    training = IslandTrainer(trainer, plan, island)
    outer = training.initial_state()
    kept = Path(case.folder) / f"island-{island}"
    if case.resumes:
        (saved,) = checkpoints(kept)
        trainer.load(saved)
        load_island(training, outer, saved)
    lines: list[dict[str, Any]] = []
    if outer is not None:
        membership = Membership(
            connect, island, len(plan.islands), lost_after=10.0 if case.silent_at is None else 5.0
        )
        training.lead = Lead(plan, outer, membership, limits=case.limits, note=lines.append)
    assert training.begin("same")
    losses = []
    silent_at = case.silent_at
    while trainer.steps < case.steps:
        if silent_at is not None and outer is not None and trainer.steps >= silent_at:
            silent_at = _out_of_reach(membership, silent_at)
        losses.append(training.step(case.rows(case.batch(trainer.steps), island)))
        if trainer.steps == case.save_at:
            save_island(training, kept)
    training.end()
    weights = {
        (held.name, box.whole): box.of(held.parameter.data).clone().numpy()
        for held in trainer.held()
        for box in held.boxes
    }
    connect().set(f"done/{island}/{rank}", "1")
    if server is not None:  # it serves until nobody needs it
        server.wait(
            [
                f"done/{at}/{one}"
                for at, other in enumerate(case.islands)
                for one in range(other.num_ranks)
            ]
        )
    return {"island": island, "losses": losses, "weights": weights, "lines": lines}


def _out_of_reach(membership: Membership, silent_at: int) -> int | None:
    """Island 1 is silent until the others have missed it; island 0, once it has missed it, waits
    until it is back. None once that is done."""
    if membership.island == 1:
        membership._stop.set()
        membership._thread.join()
        membership.store.wait(["members/1"])
        membership._stop.clear()
        membership._thread = threading.Thread(target=membership._live, daemon=True)
        membership._thread.start()
        return None
    if membership.generation == 0:
        return silent_at
    membership.store.wait(["joining/1"])
    return None


def catch_up_alone() -> tuple[list[float], list[float]]:
    """One rank with a scheduler takes over a state of step 7 after two of its own: rates and first
    moments before and after."""
    case = IslandCase(islands=(Case(shares=((2,),), num_micro_batches=2),) * 2)
    model, loss_fn, example = build("gpt", sum(case.shares), tied=False, dtype=torch.float64)
    plan = case.plan

    def scheduler(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 + step)

    rows = case.rows(example, 0)
    trainer = parallelize(
        model, loss_fn, case.optimizer, rows, plan.islands[0], scheduler=scheduler
    )
    training = IslandTrainer(trainer, plan, 0)
    outer = training.initial_state()
    assert outer is not None
    trainer.step(rows)
    trainer.step(rows)
    outer.step = 7

    def seen() -> list[float]:
        assert trainer.optimizer is not None
        (group,) = trainer.optimizer.param_groups
        moments = [
            trainer.optimizer.state[one]["exp_avg"].abs().sum().item() for one in group["params"]
        ]
        return [group["lr"] / 0.01, trainer.steps, sum(moments)]

    before = seen()
    training.lead = Lead(plan, outer, mock.Mock())
    training.lead.caught_up = True
    training._take_up([], mixing=0.0)
    return before, seen()


def train_alone(case: IslandCase) -> tuple[dict[str, torch.Tensor], list[list[float]]]:
    """The algorithm in one process: a model and an optimizer for each island, and the shared
    parameters."""
    torch.manual_seed(0)
    model, loss_fn, _ = build("gpt", sum(case.shares), tied=False, dtype=torch.float64)
    copies = [copy.deepcopy(model) for _ in case.islands]
    inner = [case.optimizer(one.parameters()) for one in copies]
    names = sorted(name for name, _ in model.named_parameters())
    shared = {name: value.detach().clone() for name, value in model.named_parameters()}
    velocity = {name: torch.zeros_like(value) for name, value in shared.items()}
    total = sum(value.numel() for value in shared.values())
    part, seen = {}, 0
    for name in names:
        part[name] = min(
            case.fragments - 1, int(case.fragments * (seen + shared[name].numel() / 2) / total)
        )
        seen += shared[name].numel()
    share = [count / sum(case.shares) for count in case.shares]
    losses: list[list[float]] = [[] for _ in copies]
    late: list[tuple[int, int, dict[str, torch.Tensor]]] = []
    turn, last = 0, -1

    def outer_step(fragment: int) -> dict[str, torch.Tensor]:
        chosen = [name for name in names if part[name] == fragment]
        for name in chosen:
            mean = sum(
                weight * dict(one.named_parameters())[name].detach()
                for weight, one in zip(share, copies, strict=True)
            )
            delta = shared[name] - mean
            velocity[name] = case.momentum * velocity[name] + delta
            if case.momentum == 0:
                move = delta
            else:
                move = delta + case.momentum * velocity[name] if case.nesterov else velocity[name]
            shared[name] = shared[name] - case.rate * move
        return {name: shared[name].clone() for name in chosen}

    def use(values: dict[str, torch.Tensor], mixing: float) -> None:
        with torch.no_grad():
            for one in copies:
                for name, value in one.named_parameters():
                    if name in values:
                        value.copy_(mixing * value + (1 - mixing) * values[name])

    for step in range(case.steps):
        batch = case.batch(step)
        for at, one in enumerate(copies):
            loss = loss_fn(one, case.rows(batch, at))
            loss.backward()
            inner[at].step()
            inner[at].zero_grad()
            losses[at].append(loss.item())
        done = step + 1
        while late and late[0][0] == done:
            use(late.pop(0)[2], case.mixing)
        if done % (case.every // case.fragments) == 0:
            values = outer_step(turn % case.fragments)
            turn, last = turn + 1, done
            if case.overlap:
                late.append((done + case.overlap, done, values))
            else:
                use(values, 0.0)
    for _, began, values in late:
        use(values, case.mixing if case.steps > began else 0.0)
    for _ in range(case.fragments - (last == case.steps)):
        use(outer_step(turn % case.fragments), 0.0)
        turn += 1
    return shared, losses


def written_islands(folder: Path, case: IslandCase, kind: str = "CPU-core") -> Path:
    """An island plan on disk whose nodes are CPU cores, one node for each island."""
    nodes = [
        {
            "name": f"i{at}n",
            "devices": {"kind": kind, "count": one.num_ranks},
            "intra": [{"medium": "pcie", "bandwidth": "10 GB/s", "latency": "5 us"}],
            "nic": {"bandwidth": "1 Gbit/s", "latency": "1 ms"},
        }
        for at, one in enumerate(case.islands)
    ]
    content = canonical({"name": "local", "nodes": nodes})
    ref = ClusterRef.of(cluster_from_content(content))
    plan = replace(
        case.plan, islands=tuple(replace(island, cluster=ref) for island in case.plan.islands)
    )
    path = folder / "islands.json"
    path.write_text(dumps_island_plan(plan))
    return path
