"""Island plans: their shares and H against closed forms, their exchange against arithmetic, their
file, traces."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from argosy.choose.islands import EXCHANGE_SHARE, IslandOptions, find_island_plan, proportional
from argosy.cluster.divide import division_into, divisions
from argosy.cluster.file import build_cluster, with_changes
from argosy.cluster.topology import Cluster
from argosy.document import parse_json, parse_toml
from argosy.errors import InfeasibleError, InputError
from argosy.plan.islands import Compression, IslandPlan
from argosy.plan.islands_file import (
    dumps_island_plan,
    island_plan_from_document,
    island_plan_to_dict,
)
from argosy.planner import find_plan
from argosy.report.islands import side_by_side
from argosy.sim.island_window import IslandWindow
from argosy.sim.islands import FragmentExchange, exchange_seconds, play_islands
from argosy.workload.chain import Chain
from argosy.workload.load import load_model

NODE = """
[[nodes]]
name = "{name}"
devices = {{ kind = "{kind}", count = {count} }}
intra = [{{ medium = "nvlink", bandwidth = "300 GB/s", latency = "0 us" }}]
nic = {{ bandwidth = "{nic}", latency = "0 us" }}
"""


def sites(
    *nodes: tuple[str, str, int, str], wans: tuple[tuple[str, str, str], ...] = ()
) -> Cluster:
    """A cluster of nodes (name, kind, devices, NIC), with lines between some of them."""
    text = 'name = "sites"\n' + "".join(
        NODE.format(name=n, kind=k, count=c, nic=b) for n, k, c, b in nodes
    )
    for at, (one, other, bandwidth) in enumerate(wans):
        text += f'[[links]]\nname = "wan{at}"\nbetween = ["{one}", "{other}"]\nmedium = "wan"\n'
        text += f'bandwidth = "{bandwidth}"\nlatency = "0 s"\n'
    return build_cluster(parse_toml(text, file="sites.toml"), folder=Path())


@pytest.fixture(scope="module")
def chain() -> Chain:
    return load_model("gpt2", dtype="bf16")


PAIR = (("x", "A100-80GB", 2, "1 Gbit/s"), ("y", "A100-80GB", 2, "1 Gbit/s"))


@pytest.fixture(scope="module")
def pair(chain: Chain) -> IslandPlan:
    return find_island_plan(
        chain, sites(*PAIR), global_batch=64, options=IslandOptions(sync_every=10)
    )


def test_an_exchange_of_two_equal_islands_is_what_its_bytes_take(
    chain: Chain, pair: IslandPlan
) -> None:
    """Two halves of the model cross each NIC, one after the other; inside a node links are 2400
    times as fast."""
    crossing = 4 * chain.parameters / 125e6
    inside = 2 * 4 * chain.parameters / 300e9
    assert exchange_seconds(pair, chain, sites(*PAIR)) == pytest.approx(crossing + inside, rel=1e-3)
    assert pair.predicted is not None
    step = max(pair.predicted.island_seconds)
    assert pair.predicted.step_seconds == pytest.approx(step + (crossing + inside) / 10, rel=0.01)
    assert pair.certificate is not None and "DiLoCo" in pair.certificate.scope
    assert pair.certificate.lower_bound_seconds <= pair.predicted.step_seconds


@pytest.mark.parametrize(("compression", "size"), [("bf16", 2.0), ("int8", 1 + 4 / 1024)])
def test_compression_divides_what_crosses(
    chain: Chain, pair: IslandPlan, compression: str, size: float
) -> None:
    changed = replace(pair, compression=Compression(compression))
    seconds = exchange_seconds(changed, chain, sites(*PAIR))
    assert seconds == pytest.approx(size * chain.parameters / 125e6, rel=0.01)


def test_three_leads_share_their_nics_fairly(chain: Chain, pair: IslandPlan) -> None:
    """Each sends a third of the model to each of two others, twice: 4/3 of it through every NIC."""
    where = sites(*PAIR, ("z", "A100-80GB", 2, "1 Gbit/s"))
    plan = find_island_plan(
        chain, where, global_batch=66, options=IslandOptions(count=3, sync_every=1)
    )
    assert exchange_seconds(plan, chain, where) == pytest.approx(
        4 / 3 * 4 * chain.parameters / 125e6, rel=0.01
    )


def test_unequal_islands_take_unequal_shares_and_meet_at_about_the_same_time(chain: Chain) -> None:
    where = sites(("x", "A100-80GB", 4, "1 Gbit/s"), ("y", "A100-80GB", 1, "1 Gbit/s"))
    plan = find_island_plan(chain, where, global_batch=320, options=IslandOptions())
    shares = sorted(island.global_batch for island in plan.islands)
    assert sum(shares) == 320
    assert plan.predicted is not None
    slow, fast = max(plan.predicted.island_seconds), min(plan.predicted.island_seconds)
    assert slow < 1.1 * fast
    even = [
        find_plan(chain, sites(node), global_batch=160)
        for node in (("y", "A100-80GB", 1, "1 Gbit/s"),)
    ]
    assert even[0].predicted is not None and slow < 0.6 * even[0].predicted.iteration_seconds


def test_the_number_of_steps_is_the_least_that_keeps_the_exchange_cheap(chain: Chain) -> None:
    where = sites(("x", "A100-80GB", 2, "20 Gbit/s"), ("y", "A100-80GB", 2, "20 Gbit/s"))
    plan = find_island_plan(chain, where, global_batch=64, options=IslandOptions(limit=10_000))
    assert plan.predicted is not None
    step, exchange = max(plan.predicted.island_seconds), plan.predicted.exchange_seconds
    assert exchange <= EXCHANGE_SHARE * step * plan.sync_every
    assert exchange > EXCHANGE_SHARE * step * (plan.sync_every - 1)
    for fragments, limit, most in ((1, 2, 2), (2, 3, 2)):
        options = IslandOptions(limit=limit, fragments=fragments)
        limited = find_island_plan(chain, where, global_batch=64, options=options)
        assert limited.sync_every == min(most, plan.sync_every)


def test_overlapped_exchanges_cost_nothing_while_they_fit_between_steps(chain: Chain) -> None:
    where = sites(*PAIR)
    options = IslandOptions(fragments=2, overlaps=True, limit=10_000)
    plan = find_island_plan(chain, where, global_batch=64, options=options)
    assert plan.predicted is not None and plan.fragments == 2 and 0 < plan.overlap < plan.period
    assert plan.predicted.exchange_seconds <= plan.overlap * max(plan.predicted.island_seconds)
    assert plan.predicted.step_seconds == pytest.approx(
        max(plan.predicted.island_seconds), rel=0.02
    )


def test_a_window_has_the_spans_of_its_steps_and_changes_nothing(
    chain: Chain, pair: IslandPlan
) -> None:
    base = sites(*PAIR)
    plain = play_islands(pair, chain, base, steps=20)
    window = IslandWindow.around_exchange(pair)
    course = play_islands(pair, chain, base, steps=20, window=window)
    assert course.waited == pytest.approx(plain.waited, rel=1e-14), "up to rounding"
    rest = {"exchanges": (), "waited": ()}
    assert replace(course, **rest) == replace(plain, **rest)
    for watched, exchange in zip(course.exchanges, plain.exchanges, strict=True):
        assert watched.arrived == pytest.approx(exchange.arrived, rel=1e-14), "up to rounding"
        assert replace(watched, arrived=()) == replace(exchange, arrived=())
    timeline = window.timeline(pair, base)
    assert {span.iteration for span in timeline.spans} == {8, 9, 10, 11} and len(
        timeline.iteration_ends
    ) == 4
    (exchange, _) = plain.exchanges
    crossing = [span for span in timeline.spans if any("nic" in link for link in span.via)]
    assert min(span.start for span in crossing) + window.start >= exchange.begin
    assert max(span.end for span in crossing) + window.start == pytest.approx(
        exchange.end, rel=1e-3
    )
    sent = sum(use.bytes for use in timeline.links if use.link == "x0.nic.out")
    assert sent == pytest.approx(4 * chain.parameters)
    between = [
        span
        for span in timeline.spans
        if span.start + window.start < exchange.end - 1e-3 and span.iteration > 9
    ]
    assert not between


def test_a_preempted_link_lengthens_the_exchanges_that_meet_it(
    chain: Chain, pair: IslandPlan
) -> None:
    base = sites(*PAIR)
    still = play_islands(pair, chain, base, steps=30)
    first, second, third = still.exchanges
    middle = (first.end + second.begin) / 2
    slow = with_changes(base, [{"link": "x0.nic", "steps": [[f"{middle} s", "100 Mbit/s"]]}])
    course = play_islands(pair, chain, slow, steps=30)
    lengths = [exchange.end - exchange.begin for exchange in course.exchanges]
    usual = first.end - first.begin
    assert lengths == pytest.approx([usual, 10 * usual, 10 * usual], rel=0.02)
    assert course.exchanges[1].begin == pytest.approx(second.begin)
    assert third.end == pytest.approx(still.end)


def test_a_lost_link_leaves_an_island_out_until_it_is_back(chain: Chain, pair: IslandPlan) -> None:
    """Lost between the first two exchanges and back 20 s later: a wait, exchanges alone, the state
    handed over."""
    base = sites(*PAIR)
    first, second, _ = play_islands(pair, chain, base, steps=30).exchanges
    middle = (first.end + second.begin) / 2
    down = [[f"{middle} s", "0 bit/s"], [f"{middle + 20} s", "1 Gbit/s"]]
    course = play_islands(
        pair,
        chain,
        with_changes(base, [{"link": "y0.nic", "steps": down}]),
        steps=400,
        lost_after=5,
    )
    members = [exchange.islands for exchange in course.exchanges]
    back = members.index((0, 1), 1)
    assert (
        members[0] == (0, 1) and set(members[1:back]) == {(0,)} and set(members[back:]) == {(0, 1)}
    )
    assert course.exchanges[1].begin == pytest.approx(max(second.begin, middle + 5))
    before = course.exchanges[back - 1]
    assert before.end >= middle + 20
    handed_over = 2 * 4 * chain.parameters / 125e6
    assert pair.predicted is not None
    period = max(course.exchanges[back].arrived) - before.end
    assert period == pytest.approx(10 * max(pair.predicted.island_seconds) + handed_over, rel=0.05)
    shares = [island.global_batch for island in pair.islands]
    assert course.samples == 10 * sum(shares[at] for one in members for at in one)


def test_silence_counts_from_when_the_link_went_down_also_during_an_exchange(
    chain: Chain, pair: IslandPlan
) -> None:
    """Down 4 s before the first exchange, an island is lost 1 s into it; down in its middle, 5 s
    after that. A link that is back before 5 s are over only delays the exchange."""
    base = sites(*PAIR)
    first = play_islands(pair, chain, base, steps=10).exchanges[0]
    middle = (first.begin + first.end) / 2

    def played(begin: float, end: float) -> FragmentExchange:
        down = [[f"{begin} s", "0 bit/s"], [f"{end} s", "1 Gbit/s"]]
        where = with_changes(base, [{"link": "y0.nic", "steps": down}])
        return play_islands(pair, chain, where, steps=10, lost_after=5).exchanges[0]

    start = first.begin - 4 if first.begin > 4 else 0.0
    early = played(start, start + 60)
    assert early.islands == (0,) and early.begin == pytest.approx(max(first.begin, start + 5))
    late = played(middle, middle + 60)
    assert late.islands == (0,) and late.begin == pytest.approx(middle + 5)
    short = played(middle, middle + 4.9)
    assert short.islands == (0, 1) and short.end == pytest.approx(first.end + 4.9, rel=1e-6)


def test_divisions_follow_the_slowest_links(chain: Chain) -> None:
    nodes = [(name, "A100-80GB", 1, "100 Gbit/s") for name in "abcd"]
    wans = tuple((f"{x}0", f"{y}0", "1 Gbit/s") for x, y in ("ac", "ad", "bc", "bd"))
    where = sites(*nodes, wans=wans)
    assert divisions(where)[0] == (("a0.0", "b0.0"), ("c0.0", "d0.0"))
    assert division_into(where, 2) == divisions(where)[0]
    assert [len(part) for part in division_into(where, 3)] in ([2, 1, 1], [1, 2, 1], [1, 1, 2])
    with pytest.raises(InputError, match="islands"):
        division_into(where, 5)


def test_shares_are_whole_and_add_up() -> None:
    for total in range(3, 60):
        for unit in (1, 2, 8):
            shares = proportional(total, [5.0, 1.0, 0.1], unit)
            assert sum(shares) == total and min(shares) >= 1


def test_a_part_on_which_nothing_runs_is_left_out_and_one_part_is_no_island_plan() -> None:
    chain = load_model("gpt2", dtype="bf16")
    where = sites(*PAIR, ("v", "V100-32GB", 2, "1 Gbit/s"))  # a V100 has no bf16
    plan = find_island_plan(
        chain, where, global_batch=64, options=IslandOptions(count=3, sync_every=50)
    )
    assert {device[0] for island in plan.islands for device in island.devices} == {"x", "y"}
    with pytest.raises(InfeasibleError, match="fewer than two parts"):
        find_island_plan(chain, sites(PAIR[0], ("v", "V100-32GB", 2, "1 Gbit/s")), global_batch=8,
                         options=IslandOptions())  # fmt: skip


def test_files_come_back_and_say_what_is_wrong_with_them(pair: IslandPlan) -> None:
    text = dumps_island_plan(pair)
    assert island_plan_from_document(parse_json(text, file="plan.json")) == pair

    def refused(**changes: object) -> str:
        broken = json.dumps({**island_plan_to_dict(pair), **changes})
        with pytest.raises(InputError) as error:
            island_plan_from_document(parse_json(broken, file="plan.json"))
        return str(error.value)

    one = island_plan_to_dict(pair)["islands"][0]
    assert "island 0 does not use" in refused(islands=[one, one])
    assert "divisor of sync_every" in refused(fragments=3)
    assert "fewer than" in refused(overlap=10)
    assert "int8" in refused(compression="int4")
    assert "outer" in refused(outer={"learning_rate": -1.0})
    assert math.isfinite(pair.predicted.step_seconds if pair.predicted else math.nan)


def test_a_table_has_island_plans_beside_the_synchronous_one(pair: IslandPlan) -> None:
    console = Console(file=io.StringIO(), width=200)
    console.print(side_by_side([pair], 1.0))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "synchronous" in shown and "train apart for 10 steps" in shown


@pytest.mark.parametrize(("size", "fits"), [("2 GiB", True), ("1.7 GiB", False)])
def test_the_outer_state_must_fit_the_stated_memory_of_hosts(
    chain: Chain, size: str, fits: bool
) -> None:
    """The lead of one fragment keeps 12 bytes per parameter, in 80 % of the host's memory."""
    needed, gibibyte = 12 * chain.parameters, 2**30
    assert 0.8 * 1.7 * gibibyte < needed < 0.8 * 2 * gibibyte
    nodes = "".join(
        NODE.format(name=name, kind="A100-80GB", count=2, nic="1 Gbit/s")
        + f'host_memory = {{ size = "{size}" }}\n'
        for name in "xy"
    )
    where = build_cluster(parse_toml(f'name = "sites"\n{nodes}', file="s.toml"), folder=Path())
    if fits:
        plan = find_island_plan(chain, where, global_batch=64, options=IslandOptions())
        assert plan.predicted is not None and plan.predicted.outer_bytes == needed
        return
    with pytest.raises(InfeasibleError, match=r"needs 1\.39 GiB of host memory"):
        find_island_plan(chain, where, global_batch=64, options=IslandOptions())


def test_an_island_that_holds_the_others_up_is_left_out_unless_it_is_requested(
    chain: Chain,
) -> None:
    where = sites(*PAIR, ("far", "A100-80GB", 1, "5 Mbit/s"))
    pair = find_island_plan(chain, sites(*PAIR), global_batch=96, options=IslandOptions())
    plan = find_island_plan(chain, where, global_batch=96, options=IslandOptions())
    assert plan.predicted is not None and pair.predicted is not None
    assert plan.predicted.step_seconds <= pair.predicted.step_seconds
    assert {device[0] for island in plan.islands for device in island.devices} == {"x", "y"}
    three = find_island_plan(chain, where, global_batch=96, options=IslandOptions(count=3))
    assert len(three.islands) == 3 and three.predicted is not None
    assert three.predicted.step_seconds > 2 * plan.predicted.step_seconds
