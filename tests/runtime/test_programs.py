"""Programs of many kinds train on three unequal processes with the losses of one, or are refused in
one sentence."""

from __future__ import annotations

import re

import pytest
from runtime.own_programs import PROGRAMS
from runtime.program_cases import (
    WAYS,
    alone,
    plan_for,
    plans_of_a_journey,
    prepared,
    sharing_experts,
    train,
    travel,
)
from runtime.rank_pool import RankPool

from argosy.errors import InputError
from argosy.plan.file import loads_plan

DRAWN = {
    "variational",
    "diffusion",
    "dropout",
    "sampled_actions",
    "shuffled_pairs",
    "complex_noise",
    "seeded_in_forward",
    "masked_tokens",
}
"""Programs whose random numbers are those of the plan's seed, not of torch: one process runs them
by a plan, too."""
MIXED = {
    "root_of_the_mean": r"aten\.sqrt\.default in the loss, which uses a mean or a sum over the samples in other ways",
    "contrastive": r"aten\.mm\.default in the loss, which combines samples",
    "largest_of_the_batch": r"aten\.max\.default in the loss, which is not known to keep samples apart",
    "images_with_batch_norm": r"in norm, which uses a mean or a sum over the samples in other ways",
    "two_towers_with_one_scale": r"aten\.mm\.default in the loss, which combines samples",
    "rows_of_neighbours": r"aten\.index\.Tensor in the loss, which combines samples",
    "experts_by_top_two": r"aten\.pow\.Tensor_Scalar in the loss, which uses a mean or a sum",
    "variance_and_covariance": r"aten\.var\.correction in the loss, which is not known to keep",
    "normed_gradient": r"which has a backward that combines samples",
    "correlations_of_two_views": r"aten\.sub\.Tensor in the loss, which uses a mean or a sum",
    "running_sums_over_the_batch": r"aten\.cumsum\.default in the loss, which combines samples",
    "weighted_by_rank": r"aten\.sort\.default in the loss, which combines samples",
    "centred_teacher": r"in the loss, which changes a buffer depending on the samples",
    "one_inner_step": r"aten\.addmm\.default in inner\.0, which uses a mean or a sum",
    "samples_of_one_graph": r"aten\.index_add\.default in the loss, which is not known to keep",
    "experts_of_limited_capacity": r"argosy\.module\.default in routed\.0, which combines samples",
    "loss_over_its_own_mean": r"in the loss, which changes a buffer depending on the samples",
}
"""Programs that no plan may divide: refused with replicas or micro-batches, trained otherwise."""
NOT_GROUPED = {"experts_of_limited_capacity": "expected numbers in proportion to the samples"}
"""Programs of which no plan for a tensor-parallel group can be written, with the reason."""
REFUSED = {
    "connectionist_temporal": "do not depend on the contents of tensors",
    "experts_by_a_threshold": "in a module inside the model.*routed.0 reads a number that",
    "experts_with_dropout": r"routed\.0 draws random numbers",
    "experts_that_are_the_model": "choose by top k, argmax or a sort in a module inside the model",
    "packed_sequences": "do not depend on the contents of tensors",
    "branch_on_contents": "compute with masks in place of branches",
    "rows_by_condition": "compute with masks in place of branches",
    "lists_of_numbers": "compute with masks in place of branches",
    "layers_that_drop_out": "a branch that a random number decides.*set the rate",
    "one_large_graph": "a first dim of 6.*hold what all samples share in a buffer",
    "tied_by_data": "two parameters in the same memory.*assigning the parameter itself",
    "generator_in_the_loss": "leave generator= out",
    "counter_that_is_no_buffer": "register it as a buffer",
    "attention_by_hand_with_a_cache_of_masks": "an earlier call of the loss has made.*as a buffer",
    "changed_through_data": "a tensor with gradients that was changed without them",
    "hook_on_a_tensor": "a hook on the gradient of a tensor",
    "hook_on_a_parameter": "inner.0.weight: found a hook on the gradient",
    "hook_on_a_module": "1: found a hook on the backward",
    "the_three_hardest": "k not in range for dimension",
    "rows_kept_short": "a change of the parameter word.weight, which is trained",
    "loss_of_every_sample": r"shape \[6\].*a scalar tensor from the loss function",
    "weights_changed_in_the_loss": "a change of the parameter inner.0.weight, which is trained",
}
"""Programs that cannot be captured."""
QUICK = (
    "sum_loss",
    "labels_that_do_not_count",
    "clipped_policy",
    "target_network",
    "gradient_penalty",
    "variational",
    "contrastive",
    "spectral_norm",
    "teacher_of_averages",
    "waves",
    "drawn_by_generator",
    "layers_that_drop_out",
    "similar_views",
    "answers_at_positions",
    "hook_on_a_module",
    "variance_and_covariance",
    "attention_by_hand_with_a_cache_of_masks",
    "images_with_instance_norm",
)
SAVING = (
    "gradient_reversal",
    "spectral_norm",
    "dropout",
    "transformer_of_torch",
    "one_block_many_times",
    "experts_in_a_list",
)


def check(ranks: RankPool, name: str, way: str) -> None:
    prepared(name)
    if way == "group" and name in NOT_GROUPED:
        with pytest.raises(InputError, match=NOT_GROUPED[name]):
            plan_for(name, way)
        return
    plan = plan_for(name, way) if way not in WAYS and name not in REFUSED else None
    wanted = REFUSED.get(name) or (
        MIXED.get(name) if way in ("replicas", "stages", "saving") else None
    )
    count = len(loads_plan(plan).devices) if plan is not None else 3
    outcomes = ranks(count, train, name, way, plan)
    if wanted is not None:
        for kind, found in outcomes:
            assert kind == "refused", found
            assert "\n" not in found
            assert re.search(wanted, found), found
        return
    losses = ranks(1, train, name, "alone")[0][1] if name in DRAWN else alone(name)
    for kind, found in outcomes:
        assert kind == "losses", found
        assert found == pytest.approx(losses, rel=1e-6), (
            "losses of three processes differ from those of one"
        )
    assert len({round(loss, 12) for loss in losses}) == len(losses), "the program trains nothing"


@pytest.mark.parametrize("name", QUICK)
def test_a_program_in_stages_trains_as_one_process_or_is_refused(
    ranks: RankPool, name: str
) -> None:
    check(ranks, name, "stages")


@pytest.mark.parametrize("name", SAVING)
def test_segments_are_gathered_and_recomputed_one_by_one(ranks: RankPool, name: str) -> None:
    check(ranks, name, "saving")


@pytest.mark.parametrize("name", ["transformer_of_torch", "spectral_norm"])
def test_a_captured_program_moves_from_plan_to_plan(ranks: RankPool, name: str) -> None:
    for losses in ranks(3, travel, name, plans_of_a_journey(name)):
        assert losses == pytest.approx(alone(name, 8), rel=1e-6)


@pytest.mark.parametrize(
    "name", ["clipped_policy", "variance_and_covariance", "normed_gradient", "shuffled_pairs"]
)
def test_a_group_executes_what_its_plan_says(ranks: RankPool, name: str) -> None:
    check(ranks, name, "group")


@pytest.mark.exhaustive
def test_replicas_share_the_experts_of_a_captured_program(ranks: RankPool) -> None:
    name = "mixtral_of_hugging_face"
    for kind, losses in ranks(3, train, name, "shared", sharing_experts(name)):
        assert kind == "losses", losses
        assert losses == pytest.approx(alone(name), rel=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", [*WAYS, "group", "planned", "saving"])
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_every_program_trains_as_one_process_or_is_refused(
    ranks: RankPool, name: str, way: str
) -> None:
    check(ranks, name, way)
