"""When sequences and experts are split, into what, and what a profile with holes leaves of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.planning_cases import Case, Recipe, cluster_of, kind_fields, node_fields, random_case

from argosy.cluster.file import load_cluster
from argosy.cost.compute import ComputeModel
from argosy.dtype import Dtype
from argosy.plan.plan import Recompute
from argosy.planner import Settings, find_plan
from argosy.schedule import ScheduleSpec
from argosy.sim.simulate import simulate
from argosy.solve.search.pipeline import Choice
from argosy.solve.search.shape import Shape
from argosy.space.enumerate import LONG_SEQUENCE, Scope, only_runnable, stage_options, with_splits
from argosy.space.option import Option, PoolPart
from argosy.space.place import place_stages
from argosy.space.pool import find_pools
from argosy.space.price import Prices
from argosy.space.prune import Counters
from argosy.workload.chain import Chain, Layer
from argosy.workload.load import load_model
from argosy.workload.profile import Profile, ProfileRow


def prices_of(model: str, cluster: str, *, length: int | None = None) -> Prices:
    return Prices(
        load_model(model, sequence_length=length), find_pools(load_cluster(cluster)), ComputeModel()
    )


def default_splits(prices: Prices) -> tuple[tuple[int, ...], tuple[int, ...]]:
    scope = with_splits(Scope(units=(1,) * len(prices.pools)), prices)
    assert scope.context is not None and scope.expert is not None
    return scope.context, scope.expert


def test_only_long_sequences_are_cut_and_only_experts_shared_out() -> None:
    assert default_splits(prices_of("llama-3-8b", "mixed-16", length=LONG_SEQUENCE - 1)) == (
        (1,),
        (1,),
    )
    assert default_splits(prices_of("llama-3-8b", "mixed-16", length=LONG_SEQUENCE)) == (
        (1, 2, 4, 8, 16),
        (1,),
    )
    assert default_splits(prices_of("mixtral-8x7b", "mixed-16", length=4096)) == (
        (1,),
        (1, 2, 4, 8),
    )
    assert default_splits(prices_of("mixtral-8x7b", "two-cards", length=4096)) == ((1,), (1, 2, 4))


def test_splits_keep_to_their_limits() -> None:
    limits = Scope(units=(1, 1), max_context=4, max_expert=2)
    short = with_splits(limits, prices_of("mixtral-8x7b", "mixed-16", length=4096))
    assert (short.context, short.expert) == ((1, 2, 4), (1, 2))
    whole = with_splits(
        replace(limits, max_context=1), prices_of("llama-3-8b", "mixed-16", length=LONG_SEQUENCE)
    )
    assert (whole.context, whole.expert) == ((1,), (1,))


def test_a_sequence_that_fits_nowhere_is_cut() -> None:
    """Logits of 16 Ki tokens take 8 GB: more than half of a small device."""
    kinds, nodes = [kind_fields("a", flops=1, memory=8e9)], [node_fields("a", count=4)]
    cluster = cluster_of({"name": "small", "kinds": kinds, "nodes": nodes})
    chain = load_model("llama-3-8b", sequence_length=16384)
    assert default_splits(Prices(chain, find_pools(cluster), ComputeModel())) == ((1, 2, 4), (1,))


def test_a_length_that_no_number_of_parts_divides_is_not_cut() -> None:
    assert default_splits(prices_of("llama-3-8b", "mixed-16", length=40002)) == ((1,), (1,))


@pytest.mark.parametrize("runnable", [False, True])
def test_groups_wider_than_their_experts_are_searched_only_for_other_systems(
    runnable: bool,
) -> None:
    """A run divides whole experts among the members of a group."""
    experts = replace(SPARSE, num_experts=4)
    node = node_fields("a", count=2, per_node=4)
    kinds = [kind_fields("a", flops=1, memory=1e15, memory_bandwidth=1e9)]
    cluster = cluster_of({"name": "c", "kinds": kinds, "nodes": [node]})
    chain = Chain(name="drawn", layers=(DENSE, experts), sequence_length=64, dtype=Dtype.BF16)
    prices = Prices(chain, find_pools(cluster), ComputeModel())
    scope = Scope(units=(1,), context=(1, 2), zero=(0,), prune=False, runnable=runnable)
    options = stage_options(prices, 8, scope, Counters())
    splits = {
        (option.parts[0].tensor_width, option.context, option.expert)
        for row in options.values()
        for option in row
    }
    assert {(2, 1, 2), (1, 2, 4), (2, 2, 2)} <= splits
    assert ((2, 1, 4) in splits) == ((4, 1, 2) in splits) == (not runnable)


def test_sequences_are_cut_into_parts_on_single_devices_and_on_groups() -> None:
    scope = only_runnable(Scope(units=(1, 1)))
    prices = prices_of("llama-3-8b", "mixed-16", length=65536)
    options = stage_options(
        prices, 4, replace(scope, mixed=False, zero=(0,), prune=False), Counters()
    )
    widths = {
        option.parts[0].tensor_width
        for row in options.values()
        for option in row
        if option.context > 1
    }
    assert widths == {1, 2, 4}


def test_replicas_are_parts_of_nodes_or_whole_nodes() -> None:
    prices = prices_of("llama-3-8b", "mixed-16", length=131072)
    for spanning, contexts in ((False, {2, 4, 8}), (True, {1, 2, 4, 8})):
        scope = Scope(units=(1, 1), mixed=False, prune=False, spanning=spanning)
        options = stage_options(prices, 4, scope, Counters())
        shapes = {(o.parts[0].width, o.context) for row in options.values() for o in row}
        assert {width for width, _ in shapes} == {1, 2, 4, 8}
        assert {context for width, context in shapes if width == 8} == contexts


def test_groups_that_share_experts_are_equal() -> None:
    case = random_case(
        0,
        Recipe(max_devices=4, max_pools=1, per_node=(4,), min_devices=4, experts=True, wide=False),
    )
    options = case.options(6, case.scope(prune=False))
    degrees = {(o.replicas, o.expert) for row in options.values() for o in row}
    # Six samples go evenly over two or three replicas, and not over four
    assert degrees == {(1, 1), (2, 1), (2, 2), (3, 1), (4, 1)}


def test_a_replica_of_several_nodes_takes_them_whole() -> None:
    recipe = Recipe(max_devices=8, max_pools=1, per_node=(2,), min_devices=8)
    case = next(
        case for case in (random_case(seed, recipe) for seed in range(100)) if case.counts == (8,)
    )

    def option(width: int, context: int, replicas: int) -> Option:
        part = PoolPart(pool=0, width=width, replicas=replicas, samples=1, context=context)
        return Option(
            prices=case.prices,
            vector=(width * replicas,),
            parts=(part,),
            recompute=Recompute.NONE,
            zero=0,
        )

    small, large = place_stages(case.pools, [option(1, 1, 2), option(4, 2, 1)])
    nodes = [{name.partition(".")[0] for name in replica.devices} for replica in (*small, *large)]
    assert [len(one) for one in nodes] == [1, 1, 2]
    assert not nodes[2] & (nodes[0] | nodes[1])


def profile_with(
    widths: tuple[int, ...], batches: tuple[int, ...], *, partly: tuple[int, ...] = ()
) -> Profile:
    """Of two layers, the second also at some other widths."""
    rows = tuple(
        ProfileRow(
            layer=f"layer{layer}",
            micro_batch=batch,
            tensor_width=width,
            dtype=Dtype.BF16,
            forward_seconds=batch / width,
            backward_seconds=2 * batch / width,
        )
        for layer in range(2)
        for width in (*widths, *(partly if layer else ()))
        for batch in batches
    )
    return Profile(device="kind-a", model="drawn", rows=rows)


def measured_case(profile: Profile) -> Case:
    recipe = Recipe(
        max_devices=4, max_pools=1, per_node=(4,), min_devices=4, max_layers=1, tight=False
    )
    case = next(
        c
        for c in (random_case(seed, recipe) for seed in range(50))
        if c.chain.layers[0].max_tensor_width == 4
    )
    first = case.chain.layers[0]
    layers = (replace(first, name="layer0"), replace(first, name="layer1"))
    model = ComputeModel(profiles={"kind-a": profile})
    return replace(case, chain=replace(case.chain, layers=layers), model=model, global_batch=4)


def test_a_profile_of_some_widths_limits_the_widths() -> None:
    case, counters = measured_case(profile_with((1, 4), (1, 4), partly=(2,))), Counters()
    options = stage_options(case.prices, 4, case.scope(prune=False), counters)
    assert {option.width for row in options.values() for option in row} == {1, 4}
    assert counters.removed["unmeasured"] > 0
    plan = find_plan(
        case.chain, case.cluster, global_batch=4, settings=Settings(level=2), model=case.model
    )
    assert {replica.width for stage in plan.stages for replica in stage.replicas} <= {1, 4}


def test_a_profile_of_some_micro_batches_limits_the_samples() -> None:
    case, counters = measured_case(profile_with((1,), (2, 3))), Counters()
    options = stage_options(case.prices, 4, case.scope(prune=False), counters)
    samples = {
        (part.samples, part.most) for row in options.values() for o in row for part in o.parts
    }
    assert samples == {(2, 2)}
    assert counters.removed["unmeasured"] > 0


def test_a_part_of_a_sequence_is_looked_up_as_a_part_of_the_samples() -> None:
    case = measured_case(profile_with((1,), (1, 4)))

    def forward(samples: int, context: int) -> float:
        sums, _ = case.prices.seconds(0, context, samples, Recompute.NONE, context=context)
        return float(sums[1])

    assert forward(4, 2) == pytest.approx(2)
    assert forward(4, 4) == pytest.approx(1)
    assert forward(1, 4) == pytest.approx(1 / 4)


DENSE = Layer(
    name="block",
    kind="block",
    forward_flop=1e9,
    backward_flop=2e9,
    parameters=10**6,
    activation_bytes=0.0,
    output_bytes=1e6,
    key_value_bytes=4e8,
    max_tensor_width=8,
    max_context=32,
)
SPARSE = replace(
    DENSE,
    key_value_bytes=0.0,
    parameters=9 * 10**6,
    expert_parameters=8 * 10**6,
    active_parameters=3 * 10**6,
    num_experts=8,
    routed_bytes=3e8,
)


@pytest.mark.parametrize("is_shared", [False, True], ids=["switched", "bus"])
@pytest.mark.parametrize(
    ("layer", "nodes", "part"),
    [
        (DENSE, (1, 4), PoolPart(pool=0, width=4, replicas=1, samples=4, context=4)),
        (DENSE, (1, 4), PoolPart(pool=0, width=4, replicas=1, samples=4, context=2)),
        (DENSE, (2, 4), PoolPart(pool=0, width=8, replicas=1, samples=4, context=4)),
        (SPARSE, (1, 4), PoolPart(pool=0, width=1, replicas=4, samples=4, expert=4)),
        (SPARSE, (1, 4), PoolPart(pool=0, width=1, replicas=4, samples=4, expert=2)),
        (SPARSE, (1, 4), PoolPart(pool=0, width=2, replicas=2, samples=4, expert=2)),
    ],
    ids=[
        "parts of a sequence",
        "of two each",
        "over two nodes",
        "all experts",
        "two groups",
        "wide groups",
    ],
)
def test_what_splits_send_takes_what_the_exact_engine_says(
    layer: Layer, nodes: tuple[int, int], part: PoolPart, is_shared: bool
) -> None:
    """Alone on the links; on a bus all devices of a node share one capacity."""
    count, each = nodes
    node = node_fields("a", count=count, per_node=each, intra=1.0)
    node["intra"][0]["shared"] = is_shared
    kinds = [kind_fields("a", flops=1, memory=1e15, memory_bandwidth=1e9)]
    chain = Chain(name="drawn", layers=(layer,), sequence_length=64, dtype=Dtype.BF16)
    batch = part.samples * part.replicas
    cluster = cluster_of({"name": "bus", "kinds": kinds, "nodes": [node]})
    case = Case(chain=chain, cluster=cluster, global_batch=batch)
    assert case.pools[0].intra_is_shared == is_shared
    vector = (part.width * part.replicas,)
    option = Option(
        prices=case.prices, vector=vector, parts=(part,), recompute=Recompute.NONE, zero=0
    )
    shape = Shape(num_micro_batches=1, micro_batch_size=batch, schedules=(ScheduleSpec(),))
    plan = case.placed(shape, (Choice(option, 0, 1),))
    (end,) = simulate(plan, chain, cluster, model=case.model).iteration_ends
    assert sum(option.seconds(0, 1)) + option.tail(0, 1) == pytest.approx(
        end, rel=1e-9 if count == 1 else 1e-3
    )
