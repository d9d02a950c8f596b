"""Record the cost model of a plan by content when the plan is made, and rebuild it when it is used
again.

    (1)  A prediction follows from model, cluster and plan, and beside them from constants
         (``Calibration``) and from measured profiles (``Profile``). These two together are the
         ``CostModel``.
    (2)  A plan records the constants that differ from the default ones. They are read off the
         values that the search used: ``ComputeModel`` has most of them, ``Cluster.fit`` and the
         ``Chain`` the others. So constants that were set in Python are recorded too.
    (3)  A plan records the profiles of the device kinds of its cluster, and of these the rows that
         can be looked up for the layers and the dtype of its model.

Under the default cost model a plan records nothing. Links and devices that were changed in Python
are not recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace

from argosy.cluster.topology import Cluster
from argosy.cost.calibration import Calibration
from argosy.cost.calibration_file import constants_of
from argosy.cost.compute import ComputeModel
from argosy.document import Document, JsonObject, parse_json
from argosy.plan.plan import DEFAULT_COST_MODEL, CostModelRef, Plan
from argosy.workload.chain import Chain
from argosy.workload.load import read_profiles
from argosy.workload.profile import Profile
from argosy.workload.profile_file import profile_of, profile_to_dict

# The calibration whose constants a plan does not record.
_DEFAULT = Calibration()
# Names of the constants that a ``Chain`` holds.
_OF_CHAIN = (
    "activation_factor",
    "sequence_parallel",
    "selective",
    "stops_early",
    "shard",
    "repeats_exchanges",
    "fused_loss",
    "buffers",
    "gradient_dtype",
    "reduce_dtype",
    "async_tensor",
)
# Names of the constants that a ``ComputeModel`` holds.
_OF_MODEL = tuple(field.name for field in fields(ComputeModel) if field.name != "profiles")


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """A cost model (1), which holds what a prediction depends on beside model, cluster and plan."""

    calibration: Calibration = _DEFAULT
    profiles: tuple[Profile, ...] = ()

    def chain(self, chain: Chain) -> Chain:
        return self.calibration.chain(chain)

    def cluster(self, cluster: Cluster) -> Cluster:
        return self.calibration.cluster(cluster)

    @property
    def compute_model(self) -> ComputeModel:
        return self.calibration.compute_model(
            {profile.device: profile for profile in self.profiles} or None
        )


def cost_model_ref(chain: Chain, cluster: Cluster, model: ComputeModel) -> CostModelRef | None:
    """Return the record (2) and (3) for a plan; None for the default cost model."""
    constants = {name: getattr(model, name) for name in _OF_MODEL}
    constants |= asdict(cluster.fit) | {name: getattr(chain, name) for name in _OF_CHAIN}
    content: JsonObject = {}
    if differing := {
        name: value for name, value in constants.items() if value != getattr(_DEFAULT, name)
    }:
        content["constants"] = differing
    if profiles := _used_profiles(chain, cluster, model):
        content["profiles"] = [profile_to_dict(profile) for profile in profiles]
    return CostModelRef.of(content) if content else None


def _used_profiles(chain: Chain, cluster: Cluster, model: ComputeModel) -> list[Profile]:
    """Return the profiles (3), in the order of their device kinds."""
    kinds = sorted({device.kind.name for device in cluster.devices}) if model.profiles else []
    named = [
        (kind, model.profiles[kind]) for kind in kinds if model.profiles and kind in model.profiles
    ]
    return [_used_part(profile, kind, chain) for kind, profile in named]


def _used_part(profile: Profile, kind: str, chain: Chain) -> Profile:
    """Return a profile with the rows that can be looked up for a chain; with all rows if there are
    none."""
    names = {profile.row_name(layer) for layer in chain.layers}
    rows = tuple(row for row in profile.rows if row.layer in names and row.dtype is chain.dtype)
    bare = [replace(row, peak_bytes=None) for row in rows or profile.rows]
    return replace(profile, device=kind, rows=tuple(bare), layers=(), measured="")


def remembered(plan: Plan, document: Document | None = None) -> CostModel:
    """Rebuild the cost model that a plan was made with; ``document``, the plan's file, is named in
    errors."""
    if plan.cost_model is None:
        return CostModel()
    if document is None:
        content = parse_json(plan.cost_model.content, file="plan").data
        document = Document("plan", {"cost_model": {"content": content}}, {})
    stored = document.inside("cost_model", "content")
    count = len(stored.data.get("profiles", []))
    profiles = tuple(profile_of(stored.inside("profiles", index)) for index in range(count))
    constants = constants_of(stored.inside("constants")) if "constants" in stored.data else _DEFAULT
    return CostModel(calibration=constants, profiles=profiles)


def cost_model_of(plan: Plan, profiles: Sequence[str]) -> CostModel:
    """Return the cost model of a plan, with the profiles in these files, if any, in place of its
    own."""
    costs = remembered(plan)
    return replace(costs, profiles=read_profiles(profiles)) if profiles else costs


def with_cost_model(plan: Plan, chain: Chain, cluster: Cluster, model: ComputeModel) -> Plan:
    """Return the plan with a record of the cost model it was made with, in its certificate too."""
    ref = cost_model_ref(chain, cluster, model)
    certificate = plan.certificate
    if certificate is not None:
        certificate = replace(certificate, cost_model=cost_model_words(ref))
    return replace(plan, cost_model=ref, certificate=certificate)


def with_what_holds(plan: Plan, chain: Chain, cluster: Cluster, model: ComputeModel) -> Plan:
    """Return the plan; without prediction, certificate and runner-ups if these were made on another
    cluster or under another cost model."""
    if plan.cluster.hash == cluster.hash and plan.cost_model == cost_model_ref(
        chain, cluster, model
    ):
        return plan
    return replace(plan, predicted=None, certificate=None, runner_ups=())


def cost_model_words(ref: CostModelRef | None) -> str:
    return DEFAULT_COST_MODEL if ref is None else ref.words
