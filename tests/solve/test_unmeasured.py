"""Where profiles lack times for every plan that fits: the answer names what to measure, and
measuring it helps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from argosy.cluster.file import load_cluster
from argosy.cost.compute import ComputeModel
from argosy.dtype import Dtype
from argosy.errors import InputError, NothingFitsError
from argosy.explain.infeasible import diagnose
from argosy.explain.remedy import ChangeKind
from argosy.planner import Settings, find_plan
from argosy.solve.unmeasured import MissingTimes, find_untimed
from argosy.space.pool import able_pools
from argosy.space.price import Prices
from argosy.workload.chain import Chain
from argosy.workload.load import load_model
from argosy.workload.profile import Profile, ProfileRow

KINDS = ("RTX-A6000", "RTX-2080Ti")
LAYERS = ("embedding", "block", "head")
CHAIN = load_model("gpt2-xl", dtype="fp16")
CARDS = load_cluster("two-cards")


def rows(
    widths: Sequence[int],
    samples: Sequence[int],
    layers: Sequence[str] = LAYERS,
    dtype: Dtype = Dtype.FP16,
) -> tuple[ProfileRow, ...]:
    return tuple(
        ProfileRow(
            layer=layer,
            micro_batch=count,
            tensor_width=width,
            dtype=dtype,
            forward_seconds=1e-3 * count / width,
            backward_seconds=2e-3 * count / width,
        )
        for layer in layers
        for width in widths
        for count in samples
    )


def measured(*each: tuple[ProfileRow, ...]) -> ComputeModel:
    """One profile per kind."""
    profiles = {
        kind: Profile(device=kind, model="gpt2-xl", rows=one, sequence_length=1024)
        for kind, one in zip(KINDS, each, strict=True)
    }
    return ComputeModel(profiles=profiles)


def completed(model: ComputeModel, missing: Sequence[MissingTimes]) -> ComputeModel:
    """With the rows that are asked for."""
    profiles = dict(model.profiles or {})
    for one in missing:
        profile = profiles[one.kind]
        kept = {(row.layer, row.tensor_width, row.micro_batch, row.dtype) for row in profile.rows}
        asked = rows((one.tensor_width,), sorted({one.fewest, one.most}), one.layers or LAYERS)
        new = [
            row
            for row in asked
            if (row.layer, row.tensor_width, row.micro_batch, row.dtype) not in kept
        ]
        profiles[one.kind] = replace(profile, rows=(*profile.rows, *new))
    return replace(model, profiles=profiles)


CASES = {
    "samples": (
        measured(rows((1,), (8, 16)), rows((1,), (8, 16))),
        "tensor width 1 for 8 to 16 samples",
    ),
    "widths": (
        measured(rows((4,), (1, 4)), rows((8,), (1, 4))),
        "has tensor width 4 for 1 to 4 samples",
    ),
    "one kind": (measured(rows((4,), (1, 4)), rows((1,), (8, 16))), "for RTX-A6000 has"),
    "layers": (
        measured(rows((1, 2), (1, 4), ("block",)), rows((1, 2), (1, 4), ("block", "head"))),
        "RTX-A6000 of embedding, head at tensor width 1",
    ),
    "dtype": (
        measured(rows((1,), (1, 4), dtype=Dtype.FP32), rows((1,), (1, 4), dtype=Dtype.FP32)),
        "has no tensor width with fp16 times of every layer",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_named_and_measured_gives_a_plan(case: str) -> None:
    model, part = CASES[case]
    with pytest.raises(
        NothingFitsError, match="because measured times are missing, not memory"
    ) as caught:
        find_plan(CHAIN, CARDS, global_batch=4, model=model)
    assert part in str(caught.value)
    assert str(caught.value).endswith(
        "measure them (argosy profile), or plan without the profile, by the roofline"
    )
    prices = Prices(CHAIN, able_pools(CHAIN, CARDS, model), model)
    untimed = find_untimed(prices, 4, Settings())
    assert untimed is not None
    assert all(str(one) in str(caught.value) for one in untimed.missing)
    assert (
        find_plan(CHAIN, CARDS, global_batch=4, model=completed(model, untimed.missing)).predicted
        is not None
    )


def test_the_diagnosis_has_the_plan_and_the_measurement_first() -> None:
    model, _ = CASES["samples"]
    why = diagnose(
        CHAIN,
        CARDS,
        global_batch=4,
        model=model,
        reload=lambda **options: load_model("gpt2-xl", **options),
    )
    assert [(change.kind, change.value) for change in why.changes] == [
        (ChangeKind.PROFILE, "RTX-A6000 at tensor width 1 for 4 samples"),
        (ChangeKind.GLOBAL_BATCH, 8),
    ]
    assert why.changes[1].sentence == "a global batch of 8"
    assert why.plan is not None
    assert all(need.over <= 1 for need in why.needs)
    assert find_plan(CHAIN, CARDS, global_batch=8, model=model).predicted is not None


def big(optimizer: str = "adamw") -> Chain:
    return load_model("llama-3-8b", dtype="fp16", optimizer=optimizer)


@pytest.mark.parametrize("samples", [(1, 64), (8, 16)])
def test_where_memory_binds_it_is_still_memory(samples: tuple[int, int]) -> None:
    model = measured(rows((1, 2), samples), rows((1, 2), samples))
    with pytest.raises(
        NothingFitsError,
        match="weights, gradients and optimizer state need 120 GiB, the devices have",
    ):
        find_plan(big(), CARDS, global_batch=4, model=model)


def test_without_profiles_times_are_never_what_is_missing() -> None:
    model = ComputeModel()
    assert (
        find_untimed(Prices(big(), able_pools(big(), CARDS, model), model), 4, Settings()) is None
    )


def test_kinds_without_a_profile_are_refused_at_once_where_the_model_has_no_flop() -> None:
    bare = [
        replace(one, forward_flop=0, backward_flop=0, attention_flop=0, selective_flop=0)
        for one in CHAIN.layers
    ]
    chain = replace(CHAIN, layers=tuple(bare))
    with pytest.raises(InputError) as caught:
        find_plan(chain, CARDS, global_batch=4)
    assert [problem.path for problem in caught.value.problems] == list(KINDS)
    model, _ = CASES["samples"]
    with pytest.raises(NothingFitsError, match=r"measure them \(argosy profile\)$"):
        find_plan(chain, CARDS, global_batch=4, model=model)
