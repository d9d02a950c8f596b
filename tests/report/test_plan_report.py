"""A plan and its explanation as text: every line as a person sees it at 80 columns."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console, RenderableType

from argosy.cluster.file import load_cluster
from argosy.dtype import Dtype
from argosy.explain import DeviceMemory, EdgeLoad, Explanation, StageLoad, WhatIf
from argosy.plan.plan import (
    Certificate,
    ClusterRef,
    LeftOut,
    ModelRef,
    Plan,
    Predicted,
    Recompute,
    Replica,
    RunnerUp,
    Search,
    Stage,
)
from argosy.report.explain import (
    help_in_a_sentence,
    memory_in_a_sentence,
    memory_table,
    reason_table,
    what_if_table,
)
from argosy.report.plan import (
    certificate_in_a_sentence,
    devices_in_short,
    figure_table,
    left_out_lines,
    plan_title,
    runner_up_table,
    stage_table,
)
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.timeline import Span, SpanKind, Timeline

CLUSTER = load_cluster("mixed-16")
GIB = 2**30

PLAN = Plan(
    model=ModelRef(name="llama-3-8b", sequence_length=2048, dtype=Dtype.FP16),
    cluster=ClusterRef(name="mixed-16", hash="", content="{}"),
    global_batch=64,
    micro_batch_size=8,
    num_micro_batches=8,
    schedule=ScheduleSpec(kind=ScheduleKind.KFKB, k=2),
    stages=(
        Stage(
            first=0,
            end=20,
            replicas=(
                *(Replica(devices=(f"a0.{i}",), samples=1) for i in range(4)),
                Replica(devices=("a1.0", "a1.1"), samples=4),
            ),
            recompute=Recompute.SELECTIVE,
            zero=1,
        ),
        Stage(
            first=20,
            end=34,
            replicas=(
                Replica(devices=("a1.2", "a1.3"), samples=5),
                Replica(devices=("v0.0", "v0.1"), samples=3),
            ),
        ),
    ),
    predicted=Predicted(
        iteration_seconds=6.7145,
        samples_per_second=9.5316,
        peak_memory_bytes=(("a0.0", 60.0 * GIB), ("v0.0", 31.0 * GIB)),
        bottleneck="stage 0",
    ),
    certificate=Certificate(
        lower_bound_seconds=6.4193,
        gap=0.046,
        granularity=2,
        scope="stages of multiples of 2/2 devices of each pool",
        cost_model="default cost model",
    ),
    search=Search(
        cpu_seconds=0.758,
        candidates=1501,
        pruned=(("bound", 0), ("dominance", 28), ("divisibility", 18)),
    ),
    runner_ups=(
        RunnerUp(
            description="3 stages on 8x A100-80GB + 4x V100-32GB, 8 micro-batches of 8, 1f1b",
            iteration_seconds=7.01,
            reason="stage 1 waits for v0.nic",
        ),
    ),
    left_out=tuple(
        LeftOut(device=f"v{node}.{index}", reason="its link would hold stage 1 up")
        for node, index in ((0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3))
    ),
)

STAGES = """
stage  layers  on            devices          replicas  samples  recompute  zero
    0  0..19   6x A100-80GB  a0, a1.0..1         4 x 1  4x 1, 4  selective     1
                                                 1 x 2
    1  20..33  2x A100-80GB  a1.2..3,            2 x 2  5, 3     -             -
               2x V100-32GB  v0.0..1
"""

FIGURES = """
iteration    6.715 s predicted
uncertainty  5.28 s to 9.07 s: nine of ten measured steps were within 31 %; the
             best of many plans is on average 3.1 % slower than predicted
throughput   9.532 samples/s, 19,521 tokens/s
memory       31.0 of 32 GiB on the fullest device, v0.0; it may not fit, because
             predictions are within 10 %
bottleneck   stage 0
certificate  no plan of stages of multiples of 2/2 devices of each pool is more
             than 4.6 % faster (bound 6.419 s), for the default cost model
search       1,501 plans judged in 758 ms of CPU time; removed by dominance 28,
             divisibility 18
"""

RUNNER_UPS = """
runner-up                                    iteration  why it lost
3 stages on 8x A100-80GB + 4x V100-32GB, 8      7.01 s  stage 1 waits for v0.nic
micro-batches of 8, 1f1b
"""


def rendered(content: RenderableType) -> str:
    """As on a terminal of 80 columns, without the spaces that fill lines."""
    file = StringIO()
    Console(file=file, width=80, highlight=False, color_system=None).print(content)
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    return "\n" + "".join(f"{line.rstrip()}\n" for line in lines)


def test_title() -> None:
    assert plan_title(PLAN) == "llama-3-8b on mixed-16: 2 stages, 8 micro-batches of 8, kfkb (k=2)"
    one = replace(PLAN, stages=PLAN.stages[:1], num_micro_batches=1)
    assert plan_title(one) == "llama-3-8b on mixed-16: 1 stage, 1 micro-batch of 8, kfkb (k=2)"


def test_stages() -> None:
    assert rendered(stage_table(PLAN, CLUSTER)) == STAGES


def test_figures() -> None:
    assert rendered(figure_table(PLAN, CLUSTER)) == FIGURES


def test_a_plan_by_hand_has_no_figures() -> None:
    bare = replace(PLAN, predicted=None, certificate=None, search=None)
    assert figure_table(bare, CLUSTER).row_count == 0


def test_samples_that_are_no_sequences_have_no_tokens() -> None:
    image = replace(PLAN, model=replace(PLAN.model, sequence_length=1))
    assert "throughput   9.532 samples/s\n" in rendered(figure_table(image, CLUSTER))


@pytest.mark.parametrize(
    ("gap", "told"),
    [
        (-1e-16, "proven optimal: no plan of {scope} is faster, for the default cost model"),
        (0.0, "proven optimal: no plan of {scope} is faster, for the default cost model"),
        (
            5.2e-10,
            "proven optimal (to 1e-9): no plan of {scope} is faster, for the default cost model",
        ),
        (
            9.9e-7,
            "proven optimal (to 1e-6): no plan of {scope} is faster, for the default cost model",
        ),
        (
            1e-6,
            "no plan of {scope} is more than 0.0001 % faster (bound 6.419 s), for the default cost model",
        ),
        (
            0.0004,
            "no plan of {scope} is more than 0.04 % faster (bound 6.419 s), for the default cost model",
        ),
        (
            1.5,
            "no plan of {scope} is more than 150 % faster (bound 6.419 s), for the default cost model",
        ),
    ],
)
def test_certificate(gap: float, told: str) -> None:
    assert PLAN.certificate is not None
    sentence = certificate_in_a_sentence(replace(PLAN.certificate, gap=gap))
    assert sentence == told.format(scope=PLAN.certificate.scope)


def test_a_certificate_of_an_older_file_does_not_claim_a_cost_model() -> None:
    assert PLAN.certificate is not None
    sentence = certificate_in_a_sentence(replace(PLAN.certificate, cost_model=None))
    assert sentence.endswith("faster (bound 6.419 s); its cost model is not recorded")


def test_runner_ups() -> None:
    assert rendered(runner_up_table(PLAN)) == RUNNER_UPS


def test_left_out_devices_share_their_reason() -> None:
    assert left_out_lines(PLAN, CLUSTER) == [
        "left out: v0.2..3, v1: its link would hold stage 1 up"
    ]
    assert left_out_lines(replace(PLAN, left_out=()), CLUSTER) == []


def test_many_whole_nodes_are_named_in_short() -> None:
    cluster = load_cluster("four-kinds-1024")
    names = [device.name for device in cluster.devices if device.node in ("h2", "h3", "h4", "v7")]
    assert devices_in_short(names, cluster) == "h2..4, v7"


def memory(device: str, kind: str, capacity: float, *, activations: float) -> DeviceMemory:
    return DeviceMemory(
        device=device,
        kind=kind,
        capacity=capacity * GIB,
        weights=2.0 * GIB,
        gradients=2.0 * GIB,
        optimizer=12.0 * GIB,
        activations=activations * GIB,
        buffers=0.25 * GIB,
    )


EXPLANATION = Explanation(
    plan=PLAN,
    timeline=Timeline(
        clock="simulated",
        devices=("a0.0", "v0.0"),
        spans=(
            Span("a0.0", SpanKind.FORWARD, 0.0, 4.0, 0, 0),
            Span("a0.0>v0.0", SpanKind.TRANSFER, 4.0, 5.0, 0, 0, waited_for=0),
            Span("v0.0", SpanKind.BACKWARD, 5.0, 8.0, 1, 0, waited_for=1),
        ),
        iteration_ends=(8.0,),
        busy=(4.0, 3.0),
    ),
    memory=(
        *(memory(f"a0.{index}", "A100-80GB", 80, activations=40.0) for index in range(4)),
        memory("v0.0", "V100-32GB", 32, activations=16.5),
    ),
    loads=(
        StageLoad(stage=0, computing=0.5, exchanging=0.1, critical=0.5),
        StageLoad(stage=1, computing=0.375, exchanging=0.0, critical=0.375),
    ),
    edges=(EdgeLoad(edge="v0.nic", utilisation=0.42),),
    improvements=(
        WhatIf(change="10 % more speed of stage 0's devices", seconds=7.6, gain=0.0526),
        WhatIf(change="1 GB/s more on v0.nic", seconds=8.0, gain=0.0),
    ),
    settings=(
        WhatIf(change="recompute none in stage 0", seconds=7.9, gain=0.0127, missing=0.5 * GIB),
        WhatIf(change="zero 1 in stages 0, 1", seconds=7.5, gain=0.0667, missing=6.0 * GIB),
    ),
    additions=(WhatIf(change="v0.2 as a further replica of stage 0", seconds=10.0, gain=-0.2),),
)

REASONS = """
iteration      8 s, 8 samples/s, 16,384 tokens/s
uncertainty    6.29 s to 10.8 s: nine of ten measured steps were within 31 %;
               the best of many plans is on average 3.1 % slower than predicted
bottleneck     stage 0: it computes for 50 %, exchanges tensors for 10 %, waits
               for 40 % of the time
busiest link   v0.nic, 42 % of what it could carry
critical path  compute of stage 0 50 %, compute of stage 1 38 %, transfers a0>v0
               12 %
"""

MEMORY = """
device  weights  gradients  optimizer  activations  buffers  peak  of  free
a0          2.0        2.0       12.0         40.0      0.2  56.2  80  23.8
v0.0        2.0        2.0       12.0         16.5      0.2  32.8  32  -0.8
"""

WHAT_IFS = """
what if                               iteration     gain  memory
10 % more speed of stage 0's devices      7.6 s    5.3 %
1 GB/s more on v0.nic                       8 s        -
recompute none in stage 0                 7.9 s    1.3 %  512 MiB too little
zero 1 in stages 0, 1                     7.5 s    6.7 %  6 GiB too little
v0.2 as a further replica of stage 0       10 s  -20.0 %  fits
"""


def test_reasons() -> None:
    assert rendered(reason_table(EXPLANATION, CLUSTER)) == REASONS


def test_memory_of_equal_neighbours_shares_a_line() -> None:
    assert rendered(memory_table(EXPLANATION, CLUSTER)) == MEMORY


def test_what_ifs() -> None:
    assert rendered(what_if_table(EXPLANATION)) == WHAT_IFS


def test_what_memory_buys() -> None:
    roomy = tuple(replace(one, capacity=2 * one.peak) for one in EXPLANATION.memory)
    near, far = EXPLANATION.settings
    useless = replace(near, gain=0.0)
    told = {
        (
            near,
            far,
        ): "1 GB more memory on every device allows recompute none in stage 0, which is 1.3 % faster.",
        (
            replace(near, missing=0.0),
        ): "There is memory for recompute none in stage 0, which is 1.3 % faster.",
        (
            useless,
            far,
        ): "1 GB more memory buys this plan nothing: zero 1 in stages 0, 1 is the nearest, and lacks 6 GiB.",
        (useless,): "More memory buys this plan nothing: settings that need more are no faster.",
        (): "More memory buys this plan nothing: no stage recomputes, or exchanges weights to save memory.",
    }
    for settings, sentence in told.items():
        assert (
            memory_in_a_sentence(replace(EXPLANATION, settings=settings, memory=roomy)) == sentence
        )


def test_what_helps_most_fits_in_memory() -> None:
    assert (
        help_in_a_sentence(EXPLANATION)
        == "Most would help 10 % more speed of stage 0's devices (5.3 %)."
    )
    nothing = replace(EXPLANATION, improvements=EXPLANATION.improvements[1:])
    assert help_in_a_sentence(nothing) == "No small change would make it faster."
