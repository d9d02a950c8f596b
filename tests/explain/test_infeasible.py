"""Where nothing fits: the change that is named makes the planner succeed, and a smaller one does
not."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from argosy.cluster.file import build_cluster, load_cluster, with_changes
from argosy.cluster.lasting import last_change
from argosy.cluster.topology import Cluster
from argosy.cost.calibration_file import read_calibration
from argosy.cost.compute import ComputeModel
from argosy.cost.memory import USABLE
from argosy.document import Document
from argosy.errors import InfeasibleError
from argosy.explain import infeasible
from argosy.explain.infeasible import Infeasibility, diagnose
from argosy.explain.remedy import Change, ChangeKind, RemedyTrial, with_kind, with_more_nodes
from argosy.plan.check import check_plan
from argosy.plan.offload import NO_OFFLOAD, Offload, parse_offload
from argosy.plan.targets import TARGETS, TargetName
from argosy.planner import Settings, find_plan
from argosy.units import GIB
from argosy.workload.chain import Chain
from argosy.workload.load import load_model
from argosy.workload.tuning import parse_tuning


@dataclass(frozen=True, kw_only=True)
class Tight:
    """An input for which nothing fits."""

    model: str
    cluster: str
    batch: int
    options: dict[str, Any]

    def chain(self, **changes: Any) -> Chain:
        return load_model(self.model, **{**self.options, **changes})

    def fits(
        self,
        chain: Chain | None = None,
        cluster: Cluster | None = None,
        batch: int | None = None,
        offload: Offload = NO_OFFLOAD,
    ) -> bool:
        """By the planner itself."""
        chain, cluster = chain or self.chain(), cluster or load_cluster(self.cluster)
        settings = Settings(time_budget=0, offload=offload)
        try:
            find_plan(chain, cluster, global_batch=batch or self.batch, settings=settings)
        except InfeasibleError:
            return False
        return True


CASES = {
    "state": Tight(model="llama-3-8b", cluster="two-cards", batch=8, options={"dtype": "fp32"}),
    "activations": Tight(
        model="qwen2.5-7b",
        cluster="two-cards",
        batch=1,
        options={"dtype": "fp16", "optimizer": "sgd", "sequence_length": 65536},
    ),
    "few-samples": Tight(
        model="opt-30b", cluster="mixed-8", batch=1, options={"dtype": "fp16", "optimizer": "sgd"}
    ),
    "sixteen": Tight(model="llama-3-70b", cluster="mixed-16", batch=16, options={"dtype": "fp16"}),
}


def test_what_parts_of_a_sequence_exchange_is_part_of_the_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A plan fits where all memory grows by what the closest one is over, and not by clearly
    less."""
    monkeypatch.setattr(infeasible, "nearest_changes", lambda trial, reload: ())
    chain, cluster = (
        load_model("llama-3-8b", dtype="fp16", sequence_length=2**18),
        load_cluster("one-per-node-16"),
    )
    settings = Settings(spanning=False)  # a group across nodes would need less
    trial = RemedyTrial(chain, cluster, 1, settings, ComputeModel())
    found = diagnose(chain, cluster, global_batch=1, settings=settings)
    assert found.plan is not None
    assert found.plan.stages[0].context > 1
    over = max(need.over for need in found.needs)
    assert replace(trial, factor=over * 1.001).fit() is not None
    assert replace(trial, factor=over / 1.03).fit() is None


def with_memory(cluster: Cluster, kind: str, more: float) -> Cluster:
    devices = [
        replace(device, kind=replace(device.kind, memory=device.kind.memory + more))
        if device.kind.name == kind
        else device
        for device in cluster.devices
    ]
    return replace(cluster, devices=tuple(devices))


def changed(case: Tight, change: Change, value: float | str) -> dict[str, Any]:
    """What of the input a change of this size changes."""
    cluster = load_cluster(case.cluster)
    match change.kind:
        case ChangeKind.MEMORY:
            return {"cluster": with_memory(cluster, change.target, float(value) * GIB)}
        case ChangeKind.DEVICES:
            names = [node["name"] for node in json.loads(cluster.content)["nodes"]]
            return {"cluster": with_more_nodes(cluster, names.index(change.target), int(value))}
        case ChangeKind.GLOBAL_BATCH:
            return {"batch": int(value)}
        case ChangeKind.OFFLOAD:
            return {"offload": parse_offload(str(value))}
        case ChangeKind.CARD:
            return {"cluster": with_kind(cluster, change.target, str(value))}
        case ChangeKind.TUNING | ChangeKind.SEVERAL:
            options = dict(change.options)
            asked: dict[str, Any] = {
                "tuning": parse_tuning(lora=options["--lora"], base=options.get("--base-weights"))
            }
            asked |= {"optimizer": options["--optimizer"]} if "--optimizer" in options else {}
            return {"chain": case.chain(**asked)}
        case _:
            size = value if isinstance(value, str) else int(value)
            return {"chain": case.chain(**{str(change.kind): size})}


def smaller(change: Change) -> float | None:
    """The next smaller change of the same kind, where there is one of at least 1."""
    match change.kind:
        case ChangeKind.MEMORY | ChangeKind.DEVICES:
            return float(change.value) - 1 if float(change.value) > 1 else None
        case ChangeKind.SEQUENCE_LENGTH:
            return float(change.value) + 64
        case ChangeKind.GLOBAL_BATCH:
            return float(change.value) / 2
    return None


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.exhaustive] if name == "sixteen" else [])
        for name in CASES
    ],
)
def found(request: pytest.FixtureRequest) -> tuple[Tight, Infeasibility]:
    case = CASES[request.param]
    if case.fits():
        pytest.fail("the case fits")
    return case, diagnose(
        case.chain(), load_cluster(case.cluster), global_batch=case.batch, reload=case.chain
    )


def test_the_nearest_change_helps_and_a_smaller_one_does_not(
    found: tuple[Tight, Infeasibility],
) -> None:
    case, why = found
    assert {ChangeKind.MEMORY} <= {change.kind for change in why.changes}
    for change in why.changes:
        assert case.fits(**changed(case, change, change.value)), change
        less = smaller(change)
        if less is not None:
            assert not case.fits(
                **changed(case, change, less if change.kind is ChangeKind.MEMORY else int(less))
            ), change


def test_step_times_are_those_of_the_planner(found: tuple[Tight, Infeasibility]) -> None:
    """Every change that can be planned has the time that the planner predicts under it."""
    case, why = found
    planned = [change for change in why.changes if change.kind is not ChangeKind.MEMORY]
    for change in planned[:1]:
        what = changed(case, change, change.value)
        chain, cluster = (
            what.get("chain", case.chain()),
            what.get("cluster", load_cluster(case.cluster)),
        )
        settings = Settings(offload=what.get("offload", NO_OFFLOAD))
        plan = find_plan(
            chain, cluster, global_batch=what.get("batch", case.batch), settings=settings
        )
        assert plan.predicted is not None
        # a stage that offloads has many variants, of which the quick search for changes tries fewer
        close = 0.1 if change.kind is ChangeKind.OFFLOAD else 0.02
        assert change.seconds == pytest.approx(plan.predicted.iteration_seconds, rel=close), change


def test_when_no_single_change_helps_several_together_do() -> None:
    """Llama 3 8B with sequences of 8192 tokens on one 8 GiB card: adapters, 4 bits and shorter
    sequences."""
    content = {"name": "one", "nodes": [{"name": "a", "devices": [{"kind": "RTX-3070"}]}]}
    cluster = build_cluster(Document("one", content, {}), folder=Path())
    case = Tight(model="llama-3-8b", cluster="", batch=4, options={"dtype": "bf16"})
    why = diagnose(case.chain(), cluster, global_batch=4, reload=case.chain)
    (change,) = [change for change in why.changes if change.kind is ChangeKind.SEVERAL]
    options = dict(change.options)
    assert set(options) == {"--lora", "--base-weights", "--optimizer", "--sequence-length"}
    tuning = parse_tuning(lora=options["--lora"], base=options["--base-weights"])
    tokens = int(options["--sequence-length"])
    for length, fits in ((tokens, True), (tokens + 64, False)):
        chain = case.chain(tuning=tuning, optimizer="adamw8bit", sequence_length=length)
        assert case.fits(chain, cluster) is fits


def test_adapters_are_suggested_beside_frozen_layers() -> None:
    """The first ten blocks stay frozen; the others get adapters in place of being trained."""
    content = {"name": "one", "nodes": [{"name": "a", "devices": [{"kind": "RTX-3060"}]}]}
    cluster = build_cluster(Document("one", content, {}), folder=Path())
    options = {"dtype": "bf16", "tuning": parse_tuning(freeze=["block.?"])}
    case = Tight(model="gpt2-xl", cluster="", batch=4, options=options)
    why = diagnose(case.chain(), cluster, global_batch=4, reload=case.chain)
    (change,) = [change for change in why.changes if change.kind is ChangeKind.TUNING]
    assert dict(change.options) == {"--lora": "rank=16,targets=q,v"}
    assert change.sentence == (
        "LoRA of rank 16 on q, v, block.? frozen, in place of training the weights of other layers"
    )
    assert case.fits(case.chain(tuning=parse_tuning(lora="", freeze=["block.?"])), cluster)


def test_a_plan_for_another_system_gets_only_changes_that_the_system_takes() -> None:
    """DeepSpeed trains neither adapters nor with 8-bit AdamW by our exports, and offload is not
    written for it."""
    tight = CASES["state"]
    settings = Settings(time_budget=0, target=TARGETS[TargetName.DEEPSPEED])
    found = diagnose(
        tight.chain(),
        load_cluster(tight.cluster),
        global_batch=tight.batch,
        settings=settings,
        reload=tight.chain,
    )
    options = [name for change in found.changes for name, _ in change.options]
    assert "--optimizer" in options
    assert not {"--lora", "--base-weights", "--offload"} & set(options)
    named = {change.value for change in found.changes if change.kind is ChangeKind.OPTIMIZER}
    assert named <= set(TARGETS[TargetName.DEEPSPEED].optimizers or ())


def test_changes_for_another_system_lead_to_plans_that_it_runs() -> None:
    """The closest plan and the changes keep to DeepSpeed's one grid without tensor parallelism;
    one group of both cards would fit."""
    target = TARGETS[TargetName.DEEPSPEED]
    constants = read_calibration(target.calibration)
    cluster, model = constants.cluster(load_cluster("two-cards")), constants.compute_model()
    settings = Settings(time_budget=0, target=target)

    def reload(**changed: Any) -> Chain:
        return constants.chain(load_model("gemma-3-4b", **changed))

    found = diagnose(
        reload(), cluster, global_batch=64, settings=settings, model=model, reload=reload
    )
    assert found.plan is not None and max(need.over for need in found.needs) > 1
    assert {replica.width for stage in found.plan.stages for replica in stage.replicas} == {1}
    changes = {change.kind: change for change in found.changes}
    chain = reload(sequence_length=int(changes[ChangeKind.SEQUENCE_LENGTH].value))
    plan = find_plan(chain, cluster, global_batch=64, settings=settings, model=model)
    assert target.runs(plan, chain)


def test_the_closest_plan_makes_sense_and_is_over(found: tuple[Tight, Infeasibility]) -> None:
    case, why = found
    assert why.plan is not None
    check_plan(why.plan, case.chain(), load_cluster(case.cluster))
    over = max(need.over for need in why.needs)
    assert over > 1
    grown = load_cluster(case.cluster)
    for kind in {device.kind.name: device.kind.memory for device in grown.devices}.items():
        grown = with_memory(grown, kind[0], kind[1] * (over * 1.001 - 1))
    assert case.fits(cluster=grown), (
        "the closest plan fits when every memory grows by what it is over"
    )
    shrunk = load_cluster(case.cluster)
    for name, size in {device.kind.name: device.kind.memory for device in shrunk.devices}.items():
        shrunk = with_memory(shrunk, name, size * (over / 1.03 - 1))
    assert not case.fits(cluster=shrunk), "no plan is over by clearly less"
    for need in why.needs:
        device = next(d for d in load_cluster(case.cluster).devices if d.kind.name == need.kind)
        assert need.room == pytest.approx(USABLE * device.kind.memory)


def test_the_reason_names_stage_need_and_room(found: tuple[Tight, Infeasibility]) -> None:
    _, why = found
    worst = max(why.needs, key=lambda need: need.over)
    assert f"stage {worst.stage} needs" in why.reason
    assert worst.kind in why.reason


def test_without_the_dtype_the_reason_is_the_dtype() -> None:
    case = Tight(model="gpt2", cluster="two-cards", batch=4, options={"dtype": "fp8"})
    why = diagnose(case.chain(), load_cluster("two-cards"), global_batch=4, reload=case.chain)
    assert why.reason == "none of RTX-2080Ti, RTX-A6000 has fp8"
    assert [(change.kind, change.value) for change in why.changes] == [(ChangeKind.DTYPE, "bf16")]


def test_remedies_are_tried_at_time_zero_without_the_rest_of_long_traces() -> None:
    steps = [[f"{second} s", f"{1 + second % 3} GB/s"] for second in range(100)]
    changes = [{"link": "v*.nic", "steps": steps}, {"device": "v0.0", "steps": [["9 s", 0.5]]}]
    cluster = with_changes(load_cluster("mixed-16"), changes)
    larger = with_more_nodes(cluster, 0, 1)
    assert json.loads(larger.content)["changes"][0]["steps"] == [["0.0 s", "1000000000.0 B/s"]]
    assert last_change([cluster]) == 99 and last_change([larger]) == 0
    assert larger.device("v0.0").speed.at(0) == 1
