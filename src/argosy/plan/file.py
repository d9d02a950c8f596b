"""Read and write ``plan.json``, version 1: the contract between planning, simulating and running.

Its fields are listed in ``docs/formats.md``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from argosy.bundled import Bundled
from argosy.cluster.file import build_cluster
from argosy.cluster.host import Tier
from argosy.cluster.topology import canonical
from argosy.document import (
    Document,
    JsonObject,
    Schema,
    Word,
    is_there,
    parse_json,
    read_json,
    validate,
)
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
_Tier = Word[Tier]


def _moment(value: object) -> object:
    if not isinstance(value, list) or len(value) != 3:
        raise Mismatch(
            value, "CPU seconds, the best iteration and the bound, such as [0.4, 2.5, 2.1]"
        )
    return value


class TuningSchema(Schema):
    makes = Tuning

    train: Word[Train] = Train.FULL
    rank: Count = FULL.rank
    targets: list[Literal["q", "k", "v", "o", "gate", "up", "down"]] = Field(default_factory=list)
    freeze: list[str] = Field(default_factory=list)
    base: Word[BaseFormat] | None = None


class ModelSchema(Schema):
    makes = ModelRef

    name: str
    sequence_length: Count
    dtype: DtypeField
    optimizer: OptimizerField = "adamw"
    content: JsonObject | None = None
    tuning: TuningSchema | None = None
    powersgd: Natural = 0


class ClusterRefSchema(Schema):
    name: str
    hash: str
    content: JsonObject


class CostContentSchema(Schema):
    constants: dict[str, Real | bool | str | None] = Field(default_factory=dict)
    profiles: list[JsonObject] = Field(default_factory=list)


class CostModelSchema(Schema):
    hash: str
    content: CostContentSchema


class ScheduleSchema(Schema):
    makes = ScheduleSpec

    kind: Word[ScheduleKind]
    k: Count = 1
    depth: list[Count] | None = None
    chunks: Count = 1


class ReplicaSchema(Schema):
    makes = Replica

    devices: list[str] = Field(min_length=1)
    samples: Count
    ratios: list[Real] = Field(default_factory=list)


class OffloadSchema(Schema):
    makes = Offload

    optimizer: _Tier | None = None
    activations: _Tier | None = None
    weights: _Tier | None = None


class StageSchema(Schema):
    makes = Stage

    layers: LayerRange
    replicas: list[ReplicaSchema] = Field(min_length=1)
    recompute: Word[Recompute] = Recompute.NONE
    zero: Literal[0, 1, 2, 3] = 0
    context: Count = 1
    expert: Count = 1
    offload: OffloadSchema | None = None
    experts: list[Count] = Field(default_factory=list)

    def value(self, **others: Any) -> Any:
        first, end = self.layers
        offload = NO_OFFLOAD if self.offload is None else self.offload.value()
        return super().value(first=first, end=end, offload=offload, **others)


class CollectiveSchema(Schema):
    makes = CollectiveChoice

    collective: Word[Collective]
    stage: Natural
    algorithm: Word[Algorithm]


class PolicySchema(Schema):
    makes = PolicyRule

    edge: str
    below: Amount
    schedule: ScheduleSchema


class PredictedSchema(Schema):
    makes = Predicted

    iteration_seconds: Amount
    samples_per_second: Amount
    peak_memory_bytes: dict[str, Amount]
    bottleneck: str


class CertificateSchema(Schema):
    makes = Certificate

    lower_bound_seconds: Amount
    gap: Real
    granularity: Count
    scope: str
    free_bound_seconds: Amount | None = None
    cost_model: str | None = None


class SearchSchema(Schema):
    makes = Search

    cpu_seconds: Amount
    candidates: Natural
    pruned: dict[str, Natural]
    history: list[Annotated[list[Amount], BeforeValidator(_moment)]] = Field(default_factory=list)


class RunnerUpSchema(Schema):
    makes = RunnerUp

    description: str
    iteration_seconds: Amount
    reason: str


class LeftOutSchema(Schema):
    makes = LeftOut

    device: str
    reason: str


class PlanSchema(Schema):
    makes = Plan

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


_BUNDLED = Bundled("plans", ".json")
# Returns the names of the plans that come with the package.
bundled_plans = _BUNDLED.names


def load_plan(source: Path | str) -> Plan:
    """Read a plan from a JSON file, or a bundled plan by its name (``llama-3-8b-on-mixed-16``)."""
    return plan_from_document(read_plan(source))


def read_plan(source: Path | str) -> Document:
    """Return the JSON document at a path, or the bundled plan of that name; a file takes
    precedence."""
    if is_there(source) or Path(source).suffix == ".json" or "/" in str(source):
        return read_json(source)
    names = bundled_plans()
    if str(source) not in names:
        expected = f"a plan.json or one of the bundled plans {', '.join(names)}"
        raise bad_input(expected, str(source), suggestion=closest(str(source), names))
    return _BUNDLED.read(str(source))


def loads_plan(text: str) -> Plan:
    return plan_from_document(parse_json(text, file="plan.json"))


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
    plan: Plan = schema.value(
        model=_model(schema.model, document),
        cluster=ClusterRef(
            name=cluster.name, hash=cluster.hash, content=canonical(cluster.content)
        ),
        cost_model=cost_model,
    )
    return plan


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
    model: ModelRef = schema.value(content=content, tuning=tuning)
    return model


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


def dumps_plan(plan: Plan) -> str:
    """Return a plan as JSON text; equal plans give equal bytes."""
    return json.dumps(plan_to_dict(plan), indent=1, sort_keys=True, allow_nan=False) + "\n"


def plan_to_dict(plan: Plan) -> JsonObject:
    result: JsonObject = {
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


def _model_to_dict(model: ModelRef) -> JsonObject:
    content: JsonObject = {"content": json.loads(model.content)} if model.content else {}
    if not model.tuning.is_full:
        content["tuning"] = without_defaults(model.tuning) | {"targets": list(model.tuning.targets)}
    if model.powersgd:
        content["powersgd"] = model.powersgd
    return {
        name: value for name, value in vars(model).items() if name not in _OPTIONAL_FIELDS
    } | content


def schedule_to_dict(spec: ScheduleSpec) -> JsonObject:
    result: JsonObject = {"kind": str(spec.kind), "k": spec.k}
    if spec.depth is not None:
        result["depth"] = list(spec.depth)
    if spec.chunks != 1:
        result["chunks"] = spec.chunks
    return result


def _stage_to_dict(stage: Stage) -> JsonObject:
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


def _fields(value: object) -> JsonObject:
    return dict(vars(value))
