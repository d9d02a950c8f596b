"""Policies against traces: a pipeline over two pairs of cards, static, with adaptive k, with
shares, with re-planning, the planner's plan static and with re-planning, and two oracles that know
the future: one moves for nothing, the other pays for its moves.

    python -m benchmarks.adaptation                  the table, as markdown
    python -m benchmarks.adaptation oboe flips       only traces whose names begin so
    python -m benchmarks.adaptation fresh            ten traces that no rule was chosen on
    python -m benchmarks.adaptation known apart      24 traces on other clusters and models
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from argosy.adapt.controller import SEARCHED, AdaptationLevel, ControllerLimits
from argosy.adapt.play import Playback, PolicyRun, play, play_oracle
from argosy.adapt.predictor import plan_key
from argosy.adapt.watch import World, are_alike, in_grains, in_world
from argosy.choose.policy import schedules_that_fit
from argosy.cluster.changes import device_steps, link_steps
from argosy.cluster.file import build_cluster, with_changes
from argosy.cluster.generators import generate
from argosy.cluster.topology import Cluster
from argosy.cluster.trace import Trace, total
from argosy.cluster.tracefile import read_bamboo, read_oboe, rescaled
from argosy.cost.compute import ComputeModel
from argosy.document import parse_toml
from argosy.errors import InfeasibleError
from argosy.plan.plan import ClusterRef, ModelRef, Plan, Replica
from argosy.plan.plan import Stage as PlanStage
from argosy.planner import Settings, kept_plans
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.workload.chain import Chain
from argosy.workload.load import load_model
from benchmarks.adaptation_cases import Case, Setting, apart, known
from benchmarks.paying_oracle import paying_oracle
from benchmarks.scenarios import slot

DATA = Path(__file__).parents[2] / "shared" / "data"
RATE = 25e9 / 8
SECONDS = 240.0
BATCH = 64
# A change that lasts for more steps than this must bring at least 0.9 of the oracle's throughput.
LASTING = 20
FASTER = 100.0
"""So many times as fast are measured preemptions played."""
POLICIES = (
    "static 1F1B, samples/s",
    "adaptive k",
    "k and shares",
    "full",
    "static, planner's plan, samples/s",
    "full from it",
    "oracle over it",
    "paying oracle over it",
    "longest change, steps",
    "full over oracle",
    "full from it over oracle",
)
# Columns of the traces on other clusters; all policies start with the planner's plan.
OTHER_POLICIES = (
    "static, samples/s",
    "adaptive k",
    "k and shares",
    "full",
    "oracle",
    "paying oracle",
    "longest change, steps",
    "full over oracle",
    "full over paying oracle",
)


def pair() -> Cluster:
    """Two hosts with two A100 each, 25 Gbit/s between them."""
    nodes = "".join(
        f'[[nodes]]\nname = "{name}"\ndevices = {{ kind = "A100-80GB", count = 2 }}\n'
        'intra = [{ medium = "nvlink", bandwidth = "300 GB/s" }]\n'
        'nic = { bandwidth = "25 Gbit/s", latency = "10 us" }\n'
        for name in "ab"
    )
    return build_cluster(parse_toml(f'name = "pair"\n{nodes}', file="pair.toml"), folder=Path())


def traces() -> Iterator[tuple[str, Cluster]]:
    """Calm; generated; measured; and two that flip as often as a controller may change."""
    calm = pair()
    yield "calm", calm
    generated = [
        ("on-off", {"low": 0.15}, (0, 1, 2)),
        ("periodic", {"depth": 0.85, "period": "40 s"}, (0,)),
        ("random-walk", {"volatility": 0.2}, (0, 1, 2)),
        ("markov", {"levels": [1.0, 0.4, 0.12]}, (0, 1, 2)),
        ("token-bucket", {"baseline": 0.15, "busy": "60 s", "idle": "20 s", "burst": "20 s"}, (0,)),
        ("flap", {"every": "60 s"}, (0,)),
    ]
    for name, parameters, seeds in generated:
        for seed in seeds:
            trace = generate(name, parameters, nominal=RATE, seed=seed, horizon=SECONDS)
            yield f"{name} {seed}", with_changes(calm, [link_steps("b0.nic", trace)])
    for seed in (0, 1, 2):
        slow = generate(
            "straggler",
            {"every": "60 s", "duration": "60 s"},
            nominal=1.0,
            seed=seed,
            horizon=SECONDS,
        )
        yield (
            f"straggler {seed}",
            with_changes(calm, [device_steps(f"b0.{at}", slow) for at in (0, 1)]),
        )
    for period in (2.0, 3.75, 6.25):  # at 1.15 s a step: 1.7, 3.3 and 5.4 steps
        steps = [
            (period * turn, RATE * (0.15 if turn % 2 else 1.0))
            for turn in range(int(SECONDS / period))
        ]
        yield (
            f"flips every {period:g} s",
            with_changes(calm, [link_steps("b0.nic", Trace.from_steps(steps, initial=RATE))]),
        )
    yield from _measured(calm)
    yield from _designed(calm)


def _designed(calm: Cluster) -> Iterator[tuple[str, Cluster]]:
    """Short dips, long drops, drifts and flaps, each once on a link and once or twice on a host."""
    noise = random.Random(0)
    noisy = [
        (float(at), (0.3 if at >= 100 else 1.0) * math.exp(noise.gauss(0.0, 0.08)))
        for at in range(int(SECONDS))
    ]
    sinking = [(20.0 + 2 * turn, 0.15 ** (turn / 100)) for turn in range(101)]
    there_and_back = [
        (20.0 + 2 * turn, 1.0 - 0.5 * (1 - abs(turn - 50) / 50)) for turn in range(101)
    ]
    levels: list[tuple[str, bool, list[tuple[float, float]]]] = [
        ("dip of a link for 5 s", True, [(60.0, 0.15), (65.0, 1.0)]),
        ("dips of a link for 5 s every 40 s", True, _pulses(40.0, 5.0, 0.15)),
        ("dip of a host for 6 s", False, [(100.0, 0.5), (106.0, 1.0)]),
        ("drop of a link at 60 s", True, [(60.0, 0.15)]),
        ("drop of a noisy link at 100 s", True, noisy),
        ("drop of a host from 40 s to 180 s", False, [(40.0, 0.6), (180.0, 1.0)]),
        ("drift of a link", True, sinking),
        ("drift of a host and back", False, there_and_back),
        ("flap of a link for 3 s every 12 s", True, _pulses(12.0, 3.0, 0.15)),
        ("flap of a host for 8 s every 16 s", False, _pulses(16.0, 8.0, 0.5)),
    ]
    yield from (
        (name, _with_levels(calm, steps, is_link=is_link)) for name, is_link, steps in levels
    )


def _with_levels(calm: Cluster, steps: Sequence[tuple[float, float]], *, is_link: bool) -> Cluster:
    """The cluster whose host b has levels of its NIC or of its two devices, relative to full
    ones."""
    nominal = RATE if is_link else 1.0
    trace = Trace.from_steps([(time, nominal * level) for time, level in steps], initial=nominal)
    changed = (
        [link_steps("b0.nic", trace)]
        if is_link
        else [device_steps(f"b0.{at}", trace) for at in (0, 1)]
    )
    return with_changes(calm, changed)


def fresh() -> Iterator[tuple[str, Cluster]]:
    """Ten traces like those of ``traces`` with other seeds, times and levels."""
    calm = pair()
    for name, parameters in (
        ("on-off", {"low": 0.15}),
        ("random-walk", {"volatility": 0.2}),
        ("markov", {}),
    ):
        for seed in (10, 11):
            trace = generate(name, parameters, nominal=RATE, seed=seed, horizon=SECONDS)
            yield f"fresh {name} {seed}", with_changes(calm, [link_steps("b0.nic", trace)])
    yield "fresh drop of a link at 90 s", _with_levels(calm, [(90.0, 0.25)], is_link=True)
    yield "fresh drop of a host at 70 s", _with_levels(calm, [(70.0, 0.5)], is_link=False)
    yield (
        "fresh dip of a host for 10 s",
        _with_levels(calm, [(50.0, 0.4), (60.0, 1.0)], is_link=False),
    )
    yield (
        "fresh flap of a link for 6 s every 15 s",
        _with_levels(calm, _pulses(15.0, 6.0, 0.1), is_link=True),
    )


def longest_change(cluster: Cluster, until: float) -> float:
    """Seconds of the longest time after a change in which no level leaves those that it began with
    (``SEARCHED``)."""
    changing = [link.bandwidth for link in cluster.links if not link.bandwidth.is_constant]
    changing += [device.speed for device in cluster.devices if not device.speed.is_constant]
    times = sorted({time for trace in changing for time in trace.times if time < until})
    worlds = [
        World(speeds=tuple((str(at), trace.at(time)) for at, trace in enumerate(changing)))
        for time in times
    ]
    starts = [0]
    for at in range(1, len(worlds)):
        if not are_alike(worlds[starts[-1]], worlds[at], SEARCHED):
            starts.append(at)
    ends = [times[at] for at in starts[1:]]
    return max((end - begin for begin, end in pairwise([*ends, until])), default=0.0)


def _pulses(period: float, seconds: float, level: float) -> list[tuple[float, float]]:
    """A level that is low for some seconds in every period."""
    starts = [period * turn for turn in range(1, int(SECONDS / period))]
    return [step for start in starts for step in ((start, level), (start + seconds, 1.0))]


def _measured(calm: Cluster) -> Iterator[tuple[str, Cluster]]:
    for path in sorted((DATA / "bandwidth").glob("oboe_*.txt")):
        trace = rescaled(read_oboe(path), capacity=RATE)
        yield path.stem, with_changes(calm, [link_steps("b0.nic", trace)])
    for path in sorted((DATA / "preemption").glob("bamboo-*.csv")):
        there = slot(total(read_bamboo(path).values()), FASTER)
        yield path.stem, with_changes(calm, [device_steps(f"b0.{at}", there) for at in (0, 1)])


def plan_on(cluster: Cluster, chain: Chain) -> Plan:
    """Half of the layers on each host, both of its devices side by side, 1F1B."""
    cut = len(chain.layers) // 2
    replicas = [
        tuple(Replica(devices=(f"{node}0.{index}",), samples=4) for index in range(2))
        for node in ("a", "b")
    ]
    return Plan(
        model=ModelRef(name=chain.name, sequence_length=chain.sequence_length, dtype=chain.dtype),
        cluster=ClusterRef.of(cluster),
        global_batch=BATCH,
        micro_batch_size=8,
        num_micro_batches=8,
        schedule=ScheduleSpec(kind=ScheduleKind.ONE_F_ONE_B),
        stages=(
            PlanStage(first=0, end=cut, replicas=replicas[0]),
            PlanStage(first=cut, end=len(chain.layers), replicas=replicas[1]),
        ),
    )


class Planner:
    """The planner for worlds in steps of ``SEARCHED``, each searched once for all traces and
    policies."""

    def __init__(self, chain: Chain, global_batch: int) -> None:
        self.chain, self.global_batch = chain, global_batch
        self.found: dict[tuple[float, ...], list[Plan]] = {}

    def __call__(self, believed: Cluster) -> list[Plan]:
        rates = {link.name: in_grains(link.bandwidth.at(0), SEARCHED) for link in believed.links}
        speeds = {
            device.name: in_grains(device.speed.at(0), SEARCHED) for device in believed.devices
        }
        key = (*rates.values(), *speeds.values())
        if key not in self.found:
            world = World(bandwidths=tuple(rates.items()), speeds=tuple(speeds.items()))
            try:
                self.found[key] = kept_plans(
                    self.chain,
                    in_world(believed, world),
                    global_batch=self.global_batch,
                    settings=Settings(),
                    model=ComputeModel(),
                )
            except InfeasibleError:
                self.found[key] = []
        if not self.found[key]:
            raise InfeasibleError(f"no plan of {self.chain.name} on what is left")
        return self.found[key]


def rates(chain: Chain, cluster: Cluster, planner: Planner) -> list[float]:
    """Samples per second of every policy, in the order of ``POLICIES``."""
    plain, planned = plan_on(cluster, chain), planner(pair())[0]
    stage = Playback(chain, cluster, ComputeModel())
    runs = _runs(stage, plain, tuple(AdaptationLevel), planner, SECONDS)
    runs += _runs(stage, planned, (AdaptationLevel.OFF, AdaptationLevel.FULL), planner, SECONDS)
    oracles = _oracles(stage, planned, (plain, planned), runs, planner, SECONDS)
    return [*(run.samples_per_second for run in runs), *oracles]


def other_rates(case: Case, planner: Planner) -> list[float]:
    """Samples per second of every policy, in the order of ``OTHER_POLICIES``."""
    seconds = case.setting.seconds
    planned = planner(case.setting.cluster())[0]
    stage = Playback(planner.chain, case.cluster, ComputeModel())
    runs = _runs(stage, planned, tuple(AdaptationLevel), planner, seconds)
    oracles = _oracles(stage, planned, (planned,), runs, planner, seconds)
    return [*(run.samples_per_second for run in runs), *oracles]


def _runs(
    stage: Playback,
    plan: Plan,
    reaches: Sequence[AdaptationLevel],
    planner: Planner,
    seconds: float,
) -> list[PolicyRun]:
    """Runs that start with a plan, one for each level of adaptation."""
    return [
        play(
            stage,
            plan,
            until=seconds,
            limits=ControllerLimits(reach=reach),
            schedules=schedules_that_fit(plan, stage.chain, stage.cluster),
            replan=planner,
        )
        for reach in reaches
    ]


def _oracles(
    stage: Playback,
    planned: Plan,
    starts: Sequence[Plan],
    runs: Sequence[PolicyRun],
    planner: Planner,
    seconds: float,
) -> tuple[float, float]:
    """Samples per second of the oracle that moves for nothing and of the one that pays."""
    variants = [
        variant
        for plan in starts
        for variant in schedules_that_fit(plan, stage.chain, stage.cluster)
    ]
    free = play_oracle(stage, variants, until=seconds, replan=planner)
    used = {plan_key(step.plan): step.plan for run in (*runs, free) for step in run.steps}
    others = [plan for key, plan in used.items() if key != plan_key(planned)]
    return free.samples_per_second, paying_oracle(stage, [planned, *others], seconds)


def main(names: Sequence[str]) -> None:
    halves = {"known": known, "apart": apart}
    for half in (halves[name] for name in names if name in halves):
        play_others(half())
    names = [name for name in names if name not in halves]
    if names or len(sys.argv) == 1:
        play_pair(names)


def play_pair(names: Sequence[str]) -> None:
    """Print the table of the traces on two pairs of cards."""
    chain = load_model("gpt2-xl")
    planner = Planner(chain, BATCH)
    ratios, shares = list[tuple[float, str]](), list[tuple[float, str]]()
    _print_head(POLICIES)
    for name, cluster in [*traces(), *fresh()]:
        if not name.startswith(tuple(names)) if names else name.startswith("fresh"):
            continue
        plain, *adaptive, planned, full, oracle, paying = rates(chain, cluster, planner)
        steps = longest_change(cluster, SECONDS) * planned / BATCH
        cells = [f"{plain:.2f}", *(f"{rate / plain:.3f}" for rate in adaptive)]
        cells += [f"{planned:.2f}", f"{full / planned:.3f}", f"{oracle / planned:.3f}"]
        cells += [f"{paying / planned:.3f}"]
        cells += [f"{steps:.0f}", f"{adaptive[-1] / oracle:.3f}", f"{full / oracle:.3f}"]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
        ratios.append((min(min(adaptive) / plain, full / planned), name))
        if steps > LASTING:
            shares.append((min(adaptive[-1], full) / oracle, name))
    _print_bounds(ratios, shares)


def play_others(cases: Sequence[Case]) -> None:
    """Print the table of the traces on other clusters."""
    planners: dict[Setting, Planner] = {}
    ratios, shares = list[tuple[float, str]](), list[tuple[float, str]]()
    _print_head(OTHER_POLICIES)
    for case in cases:
        setting = case.setting
        if setting not in planners:
            chain = load_model(setting.model, sequence_length=1024)
            planners[setting] = Planner(chain, setting.global_batch)
        static, *adaptive, oracle, paying = other_rates(case, planners[setting])
        steps = longest_change(case.cluster, setting.seconds) * static / setting.global_batch
        cells = [f"{static:.2f}", *(f"{rate / static:.3f}" for rate in (*adaptive, oracle, paying))]
        cells += [f"{steps:.0f}", f"{adaptive[-1] / oracle:.3f}", f"{adaptive[-1] / paying:.3f}"]
        print(f"| {case.name} | {' | '.join(cells)} |", flush=True)
        ratios.append((min(adaptive) / static, case.name))
        if steps > LASTING:
            shares.append((adaptive[-1] / oracle, case.name))
    _print_bounds(ratios, shares)


def _print_head(policies: Sequence[str]) -> None:
    print(f"| trace | {' | '.join(policies)} |\n{'| --- ' * (len(policies) + 1)}|", flush=True)


def _print_bounds(ratios: Sequence[tuple[float, str]], shares: Sequence[tuple[float, str]]) -> None:
    """Print how far both bounds are kept: 0.99 of static, and 0.9 of the oracle where a change
    lasts."""
    worst, where = min(ratios)
    print(f"\nThe lowest ratio of an adaptive policy to its static plan is {worst:.3f} ({where}).")
    for share, name in sorted(shares):
        if share < 0.9:
            print(
                f"{name}: {share:.3f} of the oracle although a change lasts longer than {LASTING} steps."
            )
    reached = sum(share >= 0.9 for share, _ in shares)
    print(f"{reached} of {len(shares)} traces with such a change reach 0.9 of the oracle.")


if __name__ == "__main__":
    main(sys.argv[1:])
