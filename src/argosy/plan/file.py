"""Read and write ``plan.json``, version 1: the contract between planning, simulating and running.

Its fields are listed in ``docs/formats.md``.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from argosy.cluster.file import build_cluster
from argosy.cluster.host import Tier
from argosy.cluster.topology import canonical
from argosy.document import Document, Schema, is_there, parse_json, read_json, validate
from argosy.errors import Mismatch, bad_input, closest
from argosy.plan.group_program import GroupProgramSchema, group_program_to_dict
from argosy.plan.offload import NO_OFFLOAD, Offload
from argosy.plan.plan import (
    Algorithm,
    Certificate,
    ClusterRef,
    Collective,
    CollectiveChoice,
    CostModelRef,
    LeftOut,
    ModelRef,
    Plan,
    PolicyRule,
    Predicted,
    Recompute,
    Replica,
    RunnerUp,
    Search,
    Stage,
)
from argosy.schedule import ScheduleKind, ScheduleSpec
from argosy.workload.fields import Amount, Count, DtypeField, LayerRange, Natural, OptimizerField
from argosy.workload.layers_file import layers_of, without_defaults
from argosy.workload.profile_file import profile_of
from argosy.workload.tuning import FULL, BaseFormat, Train, Tuning

Real = Annotated[float, Field(allow_inf_nan=False)]


def _moment(value: object) -> object:
    if not isinstance(value, list) or len(value) != 3:
        raise Mismatch(
            value, "CPU seconds, the best iteration and the bound, such as [0.4, 2.5, 2.1]"
        )
    return value


class TuningSchema(Schema):
    train: Literal["full", "lora"] = "full"
    rank: Count = FULL.rank
    targets: list[Literal["q", "k", "v", "o", "gate", "up", "down"]] = Field(default_factory=list)
    freeze: list[str] = Field(default_factory=list)
    base: Literal["int8", "nf4"] | None = None

    def value(self) -> Tuning:
        return Tuning(
            train=Train(self.train),
            rank=self.rank,
            targets=tuple(self.targets),
            freeze=tuple(self.freeze),
            base=None if self.base is None else BaseFormat(self.base),
        )


class ModelSchema(Schema):
    name: str
    sequence_length: Count
    dtype: DtypeField
    optimizer: OptimizerField = "adamw"
    content: dict[str, Any] | None = None
    tuning: TuningSchema | None = None
    powersgd: Natural = 0


class ClusterRefSchema(Schema):
    name: str
    hash: str
    content: dict[str, Any]


class CostContentSchema(Schema):
    constants: dict[str, Real | bool | str | None] = Field(default_factory=dict)
    profiles: list[dict[str, Any]] = Field(default_factory=list)


class CostModelSchema(Schema):
    hash: str
    content: CostContentSchema


class ScheduleSchema(Schema):
    kind: Annotated[ScheduleKind, Field(strict=False)]
    k: Count = 1
    depth: list[Count] | None = None
    chunks: Count = 1

    def value(self) -> ScheduleSpec:
        depth = None if self.depth is None else tuple(self.depth)
        return ScheduleSpec(kind=self.kind, k=self.k, depth=depth, chunks=self.chunks)


class ReplicaSchema(Schema):
    devices: list[str] = Field(min_length=1)
    samples: Count
    ratios: list[Real] = Field(default_factory=list)

    def value(self) -> Replica:
        return Replica(devices=tuple(self.devices), samples=self.samples, ratios=tuple(self.ratios))


class OffloadSchema(Schema):
    optimizer: Literal["host", "nvme"] | None = None
    activations: Literal["host", "nvme"] | None = None
    weights: Literal["host", "nvme"] | None = None

    def value(self) -> Offload:
        return Offload(
            **{
                name: None if tier is None else Tier(tier)
                for name, tier in self.model_dump().items()
            }
        )


class StageSchema(Schema):
    layers: LayerRange
    replicas: list[ReplicaSchema] = Field(min_length=1)
    recompute: Literal["none", "selective", "full"] = "none"
    zero: Literal[0, 1, 2, 3] = 0
    context: Count = 1
    expert: Count = 1
    offload: OffloadSchema | None = None
    experts: list[Count] = Field(default_factory=list)

    def value(self) -> Stage:
        return Stage(
            first=self.layers[0],
            end=self.layers[1],
            replicas=tuple(replica.value() for replica in self.replicas),
            recompute=Recompute(self.recompute),
            zero=self.zero,
            context=self.context,
            expert=self.expert,
            offload=NO_OFFLOAD if self.offload is None else self.offload.value(),
            experts=tuple(self.experts),
        )


class CollectiveSchema(Schema):
    collective: Literal["tensor", "weights"]
    stage: Natural
    algorithm: Literal["ring", "tree", "hierarchical", "padded", "grouped"]

    def value(self) -> CollectiveChoice:
        return CollectiveChoice(
            collective=Collective(self.collective),
            stage=self.stage,
            algorithm=Algorithm(self.algorithm),
        )


class PolicySchema(Schema):
    edge: str
    below: Amount
    schedule: ScheduleSchema


class PredictedSchema(Schema):
    iteration_seconds: Amount
    samples_per_second: Amount
    peak_memory_bytes: dict[str, Amount]
    bottleneck: str


class CertificateSchema(Schema):
    lower_bound_seconds: Amount
    gap: Real
    granularity: Count
    scope: str
    free_bound_seconds: Amount | None = None
    cost_model: str | None = None


class SearchSchema(Schema):
    cpu_seconds: Amount
    candidates: Natural
    pruned: dict[str, Natural]
    history: list[Annotated[list[Amount], BeforeValidator(_moment)]] = Field(default_factory=list)


class RunnerUpSchema(Schema):
    description: str
    iteration_seconds: Amount
    reason: str


class LeftOutSchema(Schema):
    device: str
    reason: str


class PlanSchema(Schema):
    version: Literal[1]
    model: ModelSchema
    cluster: ClusterRefSchema
    global_batch: Count
    micro_batch_size: Count
    num_micro_batches: Count
    schedule: ScheduleSchema
    stages: list[StageSchema] = Field(min_length=1)
    collectives: list[CollectiveSchema] = Field(default_factory=list)
    policy: list[PolicySchema] = Field(default_factory=list)
    predicted: PredictedSchema | None = None
    certificate: CertificateSchema | None = None
    search: SearchSchema | None = None
    runner_ups: list[RunnerUpSchema] = Field(default_factory=list)
    left_out: list[LeftOutSchema] = Field(default_factory=list)
    cost_model: CostModelSchema | None = None
    programs: list[GroupProgramSchema] = Field(default_factory=list)


def load_plan(source: Path | str) -> Plan:
    """Read a plan from a JSON file, or a bundled plan by its name (``llama-3-8b-on-mixed-16``)."""
    return plan_from_document(read_plan(source))


def read_plan(source: Path | str) -> Document:
    """Return the JSON document at a path, or the bundled plan of that name; a file takes
    precedence."""
    bundled = resources.files("argosy") / "data" / "plans" / f"{source}.json"
    if is_there(source) or Path(source).suffix == ".json" or "/" in str(source):
        return read_json(source)
    names = bundled_plans()
    if str(source) not in names:
        expected = f"a plan.json or one of the bundled plans {', '.join(names)}"
        raise bad_input(expected, str(source), suggestion=closest(str(source), names))
    return parse_json(bundled.read_text(encoding="utf-8"), file=f"{source}.json")


def bundled_plans() -> list[str]:
    """Return the names of the plans that come with the package."""
    files = (resources.files("argosy") / "data" / "plans").iterdir()
    return sorted(Path(file.name).stem for file in files if file.name.endswith(".json"))


def loads_plan(text: str, *, file: str = "plan.json") -> Plan:
    return plan_from_document(parse_json(text, file=file))


def plan_from_document(document: Document) -> Plan:
    """Return the plan of a document; raise one ``InputError`` with everything that is wrong with
    the file, including the cluster in it."""
    if document.data.get("kind") == "islands":
        raise document.error(
            ("kind",),
            "a plan of one group of devices, such as one of those under islands",
            "islands",
        )
    schema = validate(document, PlanSchema)
    build_cluster(document.inside("cluster", "content"), folder=Path())
    cost_model = None if schema.cost_model is None else _cost_model(document)
    cluster = schema.cluster
    return Plan(
        model=_model(schema.model, document),
        cluster=ClusterRef(
            name=cluster.name, hash=cluster.hash, content=canonical(cluster.content)
        ),
        global_batch=schema.global_batch,
        micro_batch_size=schema.micro_batch_size,
        num_micro_batches=schema.num_micro_batches,
        schedule=schema.schedule.value(),
        stages=tuple(stage.value() for stage in schema.stages),
        collectives=tuple(choice.value() for choice in schema.collectives),
        policy=tuple(
            PolicyRule(edge=rule.edge, below=rule.below, schedule=rule.schedule.value())
            for rule in schema.policy
        ),
        predicted=None if schema.predicted is None else _predicted(schema.predicted),
        certificate=None
        if schema.certificate is None
        else Certificate(**schema.certificate.model_dump()),
        search=None if schema.search is None else _search(schema.search),
        runner_ups=tuple(RunnerUp(**runner_up.model_dump()) for runner_up in schema.runner_ups),
        left_out=tuple(LeftOut(**device.model_dump()) for device in schema.left_out),
        cost_model=cost_model,
        programs=tuple(program.value() for program in schema.programs),
    )


def _model(schema: ModelSchema, document: Document) -> ModelRef:
    """Return the model that a plan names; raise an ``InputError`` for a captured program with
    broken layers."""
    content = ""
    if schema.content is not None:
        layers = layers_of(document.inside("model", "content"))
        last = document.data["stages"][-1]["layers"][1]
        if last > len(layers):
            expected = f"at most {len(layers)}, the layers in model.content"
            raise document.error(
                ("stages", len(document.data["stages"]) - 1, "layers"), expected, last
            )
        content = canonical(schema.content)
    tuning = FULL if schema.tuning is None else schema.tuning.value()
    return ModelRef(**{**schema.model_dump(), "content": content, "tuning": tuning})


def _cost_model(document: Document) -> CostModelRef:
    """Return the cost model of a plan; raise an ``InputError`` if its hash does not match or a
    profile in it is broken."""
    stored = document.data["cost_model"]
    reference = CostModelRef.of(stored["content"])
    if stored["hash"] != reference.hash:
        digest = f"{reference.hash[:8]}..., the SHA-256 of its content"
        expected = f"{digest}; plan again instead of editing the cost model"
        raise document.error(("cost_model", "hash"), expected, f"{stored['hash'][:8]}...")
    for index in range(len(stored["content"].get("profiles", []))):
        profile_of(document.inside("cost_model", "content", "profiles", index))
    return reference


def _predicted(schema: PredictedSchema) -> Predicted:
    memory = tuple(schema.peak_memory_bytes.items())
    return Predicted(**{**schema.model_dump(), "peak_memory_bytes": memory})


def _search(schema: SearchSchema) -> Search:
    history = tuple((at, best, bound) for at, best, bound in schema.history)
    return Search(
        **{**schema.model_dump(), "pruned": tuple(schema.pruned.items()), "history": history}
    )


def dumps_plan(plan: Plan) -> str:
    """Return a plan as JSON text; equal plans give equal bytes."""
    return json.dumps(plan_to_dict(plan), indent=1, sort_keys=True, allow_nan=False) + "\n"


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    result: dict[str, Any] = {
        "version": 1,
        "model": _model_to_dict(plan.model),
        "cluster": {**_fields(plan.cluster), "content": json.loads(plan.cluster.content)},
        "global_batch": plan.global_batch,
        "micro_batch_size": plan.micro_batch_size,
        "num_micro_batches": plan.num_micro_batches,
        "schedule": schedule_to_dict(plan.schedule),
        "stages": [_stage_to_dict(stage) for stage in plan.stages],
        "collectives": [_fields(choice) for choice in plan.collectives],
        "policy": [
            {**_fields(rule), "schedule": schedule_to_dict(rule.schedule)} for rule in plan.policy
        ],
        "runner_ups": [_fields(runner_up) for runner_up in plan.runner_ups],
        "left_out": [_fields(device) for device in plan.left_out],
    }
    if plan.predicted is not None:
        memory = dict(plan.predicted.peak_memory_bytes)
        result["predicted"] = {**_fields(plan.predicted), "peak_memory_bytes": memory}
    if plan.cost_model is not None:
        result["cost_model"] = {
            "hash": plan.cost_model.hash,
            "content": json.loads(plan.cost_model.content),
        }
    if plan.certificate is not None:
        result["certificate"] = _fields(plan.certificate)
    if plan.search is not None:
        result["search"] = {**_fields(plan.search), "pruned": dict(plan.search.pruned)}
        result["search"] |= {"history": [list(moment) for moment in plan.search.history]}
    if plan.programs:
        result["programs"] = [group_program_to_dict(program) for program in plan.programs]
    return result


_OPTIONAL_FIELDS = ("content", "tuning", "powersgd")
"""Fields of a model that are written only if they differ from their defaults."""


def _model_to_dict(model: ModelRef) -> dict[str, Any]:
    content: dict[str, Any] = {"content": json.loads(model.content)} if model.content else {}
    if not model.tuning.is_full:
        content["tuning"] = without_defaults(model.tuning) | {"targets": list(model.tuning.targets)}
    if model.powersgd:
        content["powersgd"] = model.powersgd
    return {
        name: value for name, value in vars(model).items() if name not in _OPTIONAL_FIELDS
    } | content


def schedule_to_dict(spec: ScheduleSpec) -> dict[str, Any]:
    result: dict[str, Any] = {"kind": str(spec.kind), "k": spec.k}
    if spec.depth is not None:
        result["depth"] = list(spec.depth)
    if spec.chunks != 1:
        result["chunks"] = spec.chunks
    return result


def _stage_to_dict(stage: Stage) -> dict[str, Any]:
    replicas = [
        {"devices": list(r.devices), "samples": r.samples}
        | ({"ratios": list(r.ratios)} if r.ratios else {})
        for r in stage.replicas
    ]
    offload = {"offload": stage.offload.named} if stage.offload else {}
    return {
        "layers": [stage.first, stage.end],
        "replicas": replicas,
        "recompute": str(stage.recompute),
        "zero": stage.zero,
        "context": stage.context,
        "expert": stage.expert,
        **offload,
    } | ({"experts": list(stage.experts)} if stage.experts else {})


def _fields(value: object) -> dict[str, Any]:
    return dict(vars(value))
