"""Small random planning problems, and every complete plan of them: the oracle of the planner's
tests.

Layers take from tenths of a second to seconds, so that nothing is lost in rounding, and memory is
often short.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

from argosy.cluster.file import build_cluster
from argosy.cluster.topology import Cluster
from argosy.cost.compute import ComputeModel
from argosy.document import Document
from argosy.dtype import Dtype
from argosy.errors import InfeasibleError
from argosy.plan.plan import ClusterRef, ModelRef, Plan, Stage
from argosy.planner import SCHEDULES, Settings, find_plan
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.schedule.generate import group_size
from argosy.sim.simulate import iteration_seconds
from argosy.sim.tasks.choose import with_collectives
from argosy.solve.finalists.judge import Complete, Judge
from argosy.solve.search.kinds import ground_of
from argosy.solve.search.menu import Menu
from argosy.solve.search.pipeline import Choice, PlanSearch
from argosy.solve.search.shape import Shape, held
from argosy.space.enumerate import LONG_SEQUENCE, Scope, stage_options
from argosy.space.option import Option, PoolPart, Vector
from argosy.space.place import place_stages
from argosy.space.pool import Pool, find_pools
from argosy.space.price import Prices
from argosy.space.prune import Counters
from argosy.workload.chain import Chain, Layer

NO_FLOORS = ComputeModel(forward_floor=0, backward_floor=0)
LONG_FLOORS = ComputeModel(forward_floor=0.05, backward_floor=0.2)
"""So long that they matter where a layer takes tenths of a second."""

Options = Mapping[Vector, Sequence[Option]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A planning problem."""

    chain: Chain
    cluster: Cluster
    global_batch: int
    model: ComputeModel = NO_FLOORS
    schedules: tuple[ScheduleSpec, ...] = SCHEDULES

    @cached_property
    def pools(self) -> tuple[Pool, ...]:
        return find_pools(self.cluster)

    @cached_property
    def prices(self) -> Prices:
        return Prices(self.chain, self.pools, self.model)

    @cached_property
    def judge(self) -> Judge:
        return Judge(self.prices, self.cluster)

    @property
    def counts(self) -> Vector:
        return tuple(pool.count for pool in self.pools)

    @property
    def ones(self) -> Vector:
        """Every device on its own."""
        return (1,) * len(self.pools)

    def scope(self, **changes: Any) -> Scope:
        return replace(Scope(units=self.ones), **changes)

    @property
    def shapes(self) -> list[Shape]:
        """Each with one schedule: what a search may choose freely is told apart here."""
        counts = [
            count for count in range(1, self.global_batch + 1) if self.global_batch % count == 0
        ]
        return [
            Shape(
                num_micro_batches=count,
                micro_batch_size=self.global_batch // count,
                schedules=(schedule,),
            )
            for count in counts
            for schedule in self.schedules
            if schedule.k <= count
        ]

    def seconds(self, shape: Shape, plans: Sequence[Complete]) -> list[float]:
        """Judged times."""
        return self.judge.seconds(shape, plans)[0]

    def search(self, shape: Shape, options: Options) -> PlanSearch:
        """All plans of a shape, best bound first."""
        return PlanSearch(
            self.menu(shape, options),
            self.counts,
            sum(self.counts),
            math.inf,
            slack=None,
            only_kind=False,
        )

    def menu(self, shape: Shape, options: Options) -> Menu:
        return Menu(self.prices, options, shape, ground_of(self.cluster, self.pools, self.ones))

    def options(self, micro_batch: int, scope: Scope) -> dict[Vector, list[Option]]:
        return stage_options(self.prices, micro_batch, scope, Counters())

    def placed(self, shape: Shape, plan: Complete) -> Plan:
        """A complete plan on devices."""
        replicas = place_stages(self.pools, [choice.option for choice in plan])
        placed = Plan(
            model=ModelRef(
                name=self.chain.name,
                sequence_length=self.chain.sequence_length,
                dtype=self.chain.dtype,
            ),
            cluster=ClusterRef.of(self.cluster),
            global_batch=self.global_batch,
            micro_batch_size=shape.micro_batch_size,
            num_micro_batches=shape.num_micro_batches,
            schedule=shape.schedules[0],
            stages=tuple(
                choice.option.stage(choice.first, choice.end, group)
                for choice, group in zip(plan, replicas, strict=True)
            ),
        )
        return with_collectives(placed, self.chain, self.cluster)

    def played(self, plan: Plan) -> float:
        """The exact engine's time of a plan."""
        return iteration_seconds(plan, self.chain, self.cluster, self.model, whole=True)

    def judged(self, plan: Plan) -> float:
        """The judge's time of a plan on devices."""
        shape = Shape(
            num_micro_batches=plan.num_micro_batches,
            micro_batch_size=plan.micro_batch_size,
            schedules=(plan.schedule,),
        )
        complete = tuple(
            Choice(self._option(stage), stage.first, stage.end) for stage in plan.stages
        )
        return self.seconds(shape, [complete])[0]

    def _option(self, stage: Stage) -> Option:
        pool_of = {name: pool.index for pool in self.pools for node in pool.nodes for name in node}
        samples: dict[tuple[int, int], list[int]] = defaultdict(list)
        for replica in stage.replicas:
            samples[pool_of[replica.devices[0]], replica.width].append(replica.samples)
        vector = [0] * len(self.pools)
        for name in stage.devices:
            vector[pool_of[name]] += 1
        parts = [
            PoolPart(
                pool=pool,
                width=width,
                replicas=len(each),
                samples=min(each),
                extra=sum(each) - min(each) * len(each),
                context=stage.context,
                expert=stage.expert,
            )
            for (pool, width), each in sorted(samples.items())
        ]
        return Option(
            prices=self.prices,
            vector=tuple(vector),
            parts=tuple(parts),
            recompute=stage.recompute,
            zero=stage.zero,
        )


@dataclass
class _Stages:
    """Per number of micro-batches in flight, the stages that fit: by vector and first layer."""

    shape: Shape
    options: Options
    num_layers: int
    known: dict[int, dict[Vector, list[list[Choice]]]] = field(default_factory=dict)

    def fitting(self, in_flight: int) -> dict[Vector, list[list[Choice]]]:
        if in_flight not in self.known:
            self.known[in_flight] = {v: self._of(row, in_flight) for v, row in self.options.items()}
        return self.known[in_flight]

    def _of(self, row: Sequence[Option], in_flight: int) -> list[list[Choice]]:
        found: list[list[Choice]] = [[] for _ in range(self.num_layers)]
        group = group_size(self.shape.schedules[0], self.shape.num_micro_batches)
        for option in row:
            for first in range(self.num_layers):
                ends = range(first + 1, self.num_layers + 1)
                fitting = (end for end in ends if option.fits(first, end, in_flight, group))
                found[first] += [Choice(option, first, end) for end in fitting]
        return found


def complete_plans(case: Case, shape: Shape, options: Options) -> Iterator[Complete]:
    """All complete plans of a shape whose stages stand along the nodes, in any order of stages."""
    num_layers = len(case.chain.layers)
    stages = _Stages(shape, options, num_layers)
    for num_stages in range(1, min(num_layers, sum(case.counts)) + 1):
        kept = held(shape.schedules[0], num_stages, shape.num_micro_batches)
        plans = _extended((), kept, 0, case.counts, stages)
        yield from (plan for plan in plans if stands_along_nodes(case, plan))


def stands_along_nodes(case: Case, plan: Complete) -> bool:
    """Whether every stage finds its devices behind those of the stages before it, inside a node
    where it fits."""
    nodes = [[len(node) for node in pool.nodes] for pool in case.pools]
    for choice in plan:
        for part in choice.option.parts:
            free, size = nodes[part.pool], case.pools[part.pool].per_node
            missing = part.devices
            if free and free[0] < min(missing, size):
                free.pop(0)
            while missing and free:
                taken = min(missing, free[0])
                free[0], missing = free[0] - taken, missing - taken
                if not free[0]:
                    free.pop(0)
            if missing:
                return False
    return True


def _extended(
    front: Complete, kept: Sequence[int], first: int, devices: Vector, stages: _Stages
) -> Iterator[Complete]:
    """Plans that begin with ``front``; ``kept`` micro-batches are in flight at the stages to
    come."""
    if not kept:
        if first == stages.num_layers:
            yield front
        return
    if first >= stages.num_layers:
        return
    for vector, choices in stages.fitting(kept[0]).items():
        rest = tuple(have - take for have, take in zip(devices, vector, strict=True))
        if min(rest) >= 0:
            for choice in choices[first]:
                yield from _extended((*front, choice), kept[1:], choice.end, rest, stages)


FOLDED = 5e-3
"""How far the planner's plan may be from the best: it ranks by folded plays, and plays the best few
whole."""
_DOUBT = 1.1
"""A plan that is judged slower than this times the best plan is not played by the oracle."""


def best_of_all(case: Case, scope: Scope, most: int) -> tuple[float, int] | None:
    """The least time over all plans of all shapes, played whole by the exact engine, and how many
    there are; None if more than ``most``. Plans are played in the order of their judged times, as
    long as these are near the best."""
    judged: list[tuple[float, int, Shape, Complete]] = []
    for shape in case.shapes:
        plans: list[Complete] = []
        for plan in complete_plans(case, shape, case.options(shape.micro_batch_size, scope)):
            plans.append(plan)
            if len(judged) + len(plans) > most:
                return None
        times = case.seconds(shape, plans) if plans else []
        judged += [
            (time, len(judged) + at, shape, plan)
            for at, (time, plan) in enumerate(zip(times, plans, strict=True))
        ]
    best = math.inf
    for time, _, shape, plan in sorted(judged, key=lambda item: item[:2]):
        if time > _DOUBT * best or math.isinf(time):
            break
        best = min(best, case.played(case.placed(shape, plan)))
    return best, len(judged)


def plan_of(case: Case, settings: Settings) -> Plan:
    """The planner's plan; groups across nodes are searched as they are enumerated."""
    if settings.spanning is None:
        settings = replace(settings, spanning=True)
    return find_plan(
        case.chain,
        case.cluster,
        global_batch=case.global_batch,
        settings=settings,
        model=case.model,
    )


def found_best(case: Case, settings: Settings) -> tuple[Plan | None, float]:
    """The planner's plan, and its time in the exact engine."""
    try:
        plan = plan_of(case, settings)
    except InfeasibleError:
        return None, math.inf
    return plan, case.played(plan)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What random cases are like."""

    min_devices: int = 1
    max_devices: int = 8
    min_pools: int = 1
    max_pools: int = 3
    max_layers: int = 8
    batches: tuple[int, ...] = (2, 3, 4, 6, 8)
    tight: bool = True
    """Whether memory is often short."""
    wide: bool = True
    """Whether layers may be split over several devices."""
    per_node: tuple[int, ...] = (1, 2, 4)
    outputs: float = 1.0
    """How much more than usual crosses between layers."""
    parts: bool = False
    """Whether sequences are long enough to be cut."""
    experts: bool = False
    """Whether some layers have experts."""
    line: bool = False
    """Whether nodes of the first kind are at a site of their own, behind one line."""


def random_case(seed: int, recipe: Recipe | None = None) -> Case:
    """The same case for the same seed."""
    random, recipe = Random(seed), recipe or Recipe()
    chain = random_chain(random, recipe)
    content = random_cluster_file(random, recipe, chain)
    more = [ScheduleSpec(kind=ScheduleKind.KFKB, k=k) for k in (2, 3, 4)] + [
        ScheduleSpec(kind=ScheduleKind.EAGER)
    ]
    return Case(
        chain=chain,
        cluster=cluster_of(content),
        global_batch=random.choice(recipe.batches),
        model=random.choice((NO_FLOORS, NO_FLOORS, LONG_FLOORS)),
        schedules=(
            ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B),
            *random.sample(more, random.randint(0, 2)),
        ),
    )


def random_chain(random: Random, recipe: Recipe) -> Chain:
    width = random.choice((1, 2, 4)) if recipe.wide else 1
    ratio = random.choice((None, 2.0))
    layers = []
    for index in range(random.randint(1, recipe.max_layers)):
        flop = random.choice((0.1, 0.3, 1.0)) * random.uniform(0.5, 1.5) * 1e12
        kept = random.uniform(0.1, 4) * 1e9
        layers.append(
            Layer(
                name=f"layer{index}",
                kind="block",
                forward_flop=flop,
                backward_flop=flop * (ratio or random.uniform(0.3, 3)),
                parameters=random.randint(1, 100) * 10**7,
                activation_bytes=kept,
                output_bytes=recipe.outputs
                * random.choice((0.1, 1, 4))
                * random.uniform(0.5, 1.5)
                * 1e8,
                selective_bytes=kept * random.choice((0, 0.5)),
                selective_flop=flop * 0.05,
                reduced_bytes=random.uniform(0, 4) * 1e8,
                max_tensor_width=width,
            )
        )
    if recipe.parts:
        layers = [_with_parts(random, layer) for layer in layers]
    if recipe.experts:
        layers = [
            _with_experts(random, layer) if random.random() < 0.7 or not at else layer
            for at, layer in enumerate(layers)
        ]
    length = LONG_SEQUENCE if recipe.parts else 1
    return Chain(name="drawn", layers=tuple(layers), sequence_length=length, dtype=Dtype.BF16)


def _with_parts(random: Random, layer: Layer) -> Layer:
    """Attention of any weight, keys and values of a few seconds on a slow link; some layers have
    none."""
    has_attention = random.random() < 0.8
    return replace(
        layer,
        key_value_bytes=random.choice((0.2, 2, 8)) * random.uniform(0.5, 1.5) * 1e8 * has_attention,
        attention_flop=layer.forward_flop * random.uniform(0.1, 0.9) * has_attention,
        max_context=4,
    )


def _with_experts(random: Random, layer: Layer) -> Layer:
    """Most of its weights in four experts, of which a token meets one or two."""
    split = layer.parameters // 8 * random.choice((4, 7))
    active = random.choice((1, 2))
    return replace(
        layer,
        expert_parameters=split,
        num_experts=4,
        active_parameters=layer.parameters - split + split * active // 4,
        routed_bytes=random.choice((0.1, 1, 4)) * random.uniform(0.5, 1.5) * 1e8,
    )


def random_cluster_file(random: Random, recipe: Recipe, chain: Chain) -> dict[str, Any]:
    """Up to three kinds of devices, each in nodes of its own on one switch."""
    left = random.randint(max(recipe.min_devices, min(recipe.per_node)), recipe.max_devices)
    needed = 16 * chain.parameters + sum(layer.activation_bytes for layer in chain.layers)
    kinds: list[dict[str, Any]] = []
    nodes: list[dict[str, Any]] = []
    names = "abc"[: random.randint(recipe.min_pools, recipe.max_pools)]
    for name in names:
        others = len(names) - len(nodes) - 1
        free = left - (others if recipe.min_pools > 1 else 0) * min(recipe.per_node)
        sizes = [size for size in recipe.per_node if size <= free]
        if not sizes:
            break
        per_node = random.choice(sizes)
        takes_all = recipe.min_devices > 1 and not others
        count = free // per_node if takes_all else random.randint(1, free // per_node)
        left -= count * per_node
        share = random.choice((0.2, 0.5, 1.0) if recipe.tight else (4.0, 8.0)) * random.uniform(
            1, 2
        )
        kinds.append(
            kind_fields(
                name,
                flops=random.choice((1, 2, 4)) * random.uniform(0.8, 1.2),
                memory=share * needed,
            )
        )
        nodes.append(
            node_fields(
                name,
                count=count,
                per_node=per_node,
                intra=random.choice((2, 20)) * random.uniform(0.8, 1.2),
                nic=random.choice((0.2, 1, 5)) * random.uniform(0.8, 1.2),
                latency=random.choice((0, 1, 20)),
            )
        )
    content: dict[str, Any] = {"name": "drawn", "kinds": kinds, "nodes": nodes}
    if recipe.line and len(nodes) > 1:
        line = {
            "bandwidth": f"{random.choice((0.1, 0.5, 2)):.6f} GB/s",
            "latency": f"{random.choice((2, 50))} ms",
        }
        content["links"] = [{"name": "line", "between": ["a*", "[bc]*"], **line}]
    return content


def kind_fields(
    name: str, *, flops: float, memory: float, memory_bandwidth: float = 100.0
) -> dict[str, Any]:
    """A device kind of so many TFLOP/s, bytes, and GB/s."""
    return {
        "name": f"kind-{name}",
        "memory": f"{memory / 1e9:.6f} GB",
        "memory_bandwidth": f"{memory_bandwidth:.6f} GB/s",
        "flops": {"bf16": f"{flops:.6f} TFLOP/s"},
    }


def node_fields(
    name: str,
    *,
    count: int = 1,
    per_node: int = 1,
    intra: float = 20.0,
    nic: float = 1.0,
    latency: float = 0.0,
) -> dict[str, Any]:
    """Nodes of one kind: GB/s inside and out, milliseconds out."""
    return {
        "name": name,
        "count": count,
        "devices": {"kind": f"kind-{name}", "count": per_node},
        "intra": [{"medium": "bus", "bandwidth": f"{intra:.6f} GB/s"}],
        "nic": {"bandwidth": f"{nic:.6f} GB/s", "latency": f"{latency} ms"},
    }


def cluster_of(content: dict[str, Any]) -> Cluster:
    return build_cluster(Document("cluster", content, {}), folder=Path())
