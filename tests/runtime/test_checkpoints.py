"""Checkpoints: the same bits under other plans and on one device; a killed save loses nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from runtime.checkpoint_cases import (
    Parts,
    begin_with,
    begin_with_others,
    die_while_saving,
    go_back,
    go_on_counting,
    load_and_go_on,
    resume_past,
    save_after,
    save_while_training,
    save_without_room,
)
from runtime.rank_pool import RankError, RankPool
from runtime.rank_pool import rank_pool as open_rank_pool
from runtime.training_cases import Case, box_of, built

from argosy.runtime.processes.run_folder import checkpoints
from argosy.runtime.state.checkpoint import read_state_dict
from argosy.schedule import ScheduleKind

Written = tuple[Path, dict[str, np.ndarray], list[float]]

WRITTEN = Case(shares=((3, 1), (2, 2)), zero=3, tied=True, proportions=(3.0, 1.0))
OTHERS = [
    Case(shares=((4,),), tied=True),
    Case(shares=((2, 2), (4,), (3, 1)), zero=1, tied=True, kind=ScheduleKind.KFKB, k=2),
    Case(shares=((1, 1, 2), (1, 3)), zero=2, tied=True),
    Case(shares=((2, 2), (4,)), zero=1, tied=True, ratios=(((0.7, 0.3), (0.5, 0.5)), (1.0,))),
]


def whole(parts: list[Parts]) -> dict[str, np.ndarray]:
    """Every entry, put together from what ranks hold; where several hold an element they must
    agree."""
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for held in parts:
        for name, (shape, boxes) in held.items():
            values, known = found.setdefault(name, (np.zeros(shape), np.zeros(shape, dtype=bool)))
            for first, part in boxes:
                box = box_of(first, part)
                assert np.array_equal(values[box][known[box]], part[known[box]]), name
                values[box], known[box] = part, True
    assert all(known.all() for _, known in found.values())
    return {name: values for name, (values, _) in found.items()}


@pytest.fixture(scope="module")
def written(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, np.ndarray], list[float]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    results = ranks(WRITTEN.num_ranks, save_after, WRITTEN, str(folder), 3)
    return folder / "step-00000003", whole([parts for parts, _ in results]), results[0][1]


@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_another_plan_goes_on_from_the_same_bits(
    ranks: RankPool, written: Written, case: Case
) -> None:
    path, saved, losses = written
    results = ranks(case.num_ranks, load_and_go_on, case, str(path))
    loaded = whole([parts for parts, _ in results])
    assert loaded.keys() == saved.keys()
    assert all(np.array_equal(loaded[name], saved[name]) for name in saved)
    assert results[0][1] == pytest.approx(losses, rel=1e-9)


def test_going_back_leaves_nothing_of_what_came_after(ranks: RankPool, tmp_path: Path) -> None:
    """Not even the state of an optimizer that had none yet."""
    for before, after, calm in ranks(2, go_back, Case(zero=1, shares=((1, 1),)), str(tmp_path)):
        assert after == pytest.approx(before, rel=1e-12)
        assert calm == 7


def test_numbers_of_an_optimizer_are_saved_as_its_tensors_are(
    ranks: RankPool, tmp_path: Path
) -> None:
    for before, after, kinds in ranks(
        2, go_on_counting, Case(zero=1, shares=((1, 1),)), str(tmp_path)
    ):
        assert after == pytest.approx(before, rel=1e-12)
        assert kinds == {int}


def test_what_a_group_shares_is_saved_as_anything_else(
    ranks: RankPool, written: Written, tmp_path: Path
) -> None:
    case = OTHERS[-1]
    results = ranks(case.num_ranks, save_after, case, str(tmp_path), 1)
    saved = whole([parts for parts, _ in results])
    loaded = ranks(WRITTEN.num_ranks, load_and_go_on, WRITTEN, str(tmp_path / "step-00000001"))
    assert all(
        np.array_equal(saved[name], value)
        for name, value in whole([parts for parts, _ in loaded]).items()
    )
    assert loaded[0][1] == pytest.approx(results[0][1], rel=1e-9)
    begun = ranks(case.num_ranks, begin_with, case, str(tmp_path / "step-00000001"))
    assert begun[0][1] == pytest.approx(results[0][1][:1], rel=1e-9)
    state = read_state_dict(tmp_path / "step-00000001")
    assert all(
        np.array_equal(state[n.removeprefix("model.")], v)
        for n, v in saved.items()
        if n.startswith("model.")
    )


def test_one_device_reads_an_ordinary_state_dict(
    ranks: RankPool, written: Written, tmp_path: Path
) -> None:
    path, saved, losses = written
    state = read_state_dict(path)
    model, loss_fn, batch = built(WRITTEN)
    model.load_state_dict(state, strict=True)
    assert all(
        np.array_equal(state[n.removeprefix("model.")], v)
        for n, v in saved.items()
        if n.startswith("model.")
    )
    assert loss_fn(model, batch).item() == pytest.approx(losses[0], rel=1e-9)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    for source in (path, tmp_path / "weights.pt"):
        results = ranks(WRITTEN.num_ranks, begin_with, WRITTEN, str(source))
        begun = whole([parts for parts, _ in results])
        assert all(np.array_equal(begun[name], saved[name]) for name in begun)
        assert results[0][1] == pytest.approx(losses[:1], rel=1e-9)


def test_a_checkpoint_is_written_while_training_goes_on(
    ranks: RankPool, written: Written, tmp_path: Path
) -> None:
    _, saved, losses = written
    results = ranks(WRITTEN.num_ranks, save_while_training, WRITTEN, str(tmp_path), 3)
    loaded = ranks(WRITTEN.num_ranks, load_and_go_on, WRITTEN, str(tmp_path / "step-00000003"))
    for parts in (whole([parts for parts, _ in results]), whole([parts for parts, _ in loaded])):
        assert parts.keys() == saved.keys()
        assert all(np.array_equal(parts[name], saved[name]) for name in saved)
    assert results[0][1] == losses


def test_a_kill_in_mid_save_leaves_the_checkpoint_before_whole(
    ranks: RankPool, tmp_path: Path
) -> None:
    case = Case(shares=((2,), (2,)))
    with open_rank_pool() as own, pytest.raises(RankError):
        own(2, die_while_saving, case, str(tmp_path))
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000001"]
    assert list(tmp_path.glob(".*.partial/*.distcp")), "the second save had begun"
    results = ranks(2, load_and_go_on, case, str(tmp_path / "step-00000001"))
    assert all(np.isfinite(losses).all() for _, losses in results)
    ranks(2, save_after, case, str(tmp_path), 2)
    assert not list(tmp_path.glob(".*.partial")), "the next save of that step clears what was left"


def test_training_goes_on_while_checkpoints_cannot_be_written(
    ranks: RankPool, tmp_path: Path
) -> None:
    """Another attempt is made when rank 0 says so, at the same step on all ranks; only the last one
    must succeed."""
    (reported, raised, due), (nothing, raised_too, due_too) = ranks(
        2, save_without_room, Case(), str(tmp_path)
    )
    sentence = "the checkpoint of step {} could not be written into {}: rank {}: "
    starts = [sentence.format(step, tmp_path, 1) for step in (1, 2, 3)]
    starts += 3 * [sentence.format(4, tmp_path / "file", 0)]
    assert len(reported) == len(starts)
    assert all(text.startswith(start) for text, start in zip(reported, starts, strict=True)), (
        reported
    )
    assert nothing == []
    assert due == due_too == [2, 3, 4]
    assert raised == raised_too
    assert raised[0].startswith("UnsavedError: " + starts[-1])
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000004"]
    assert not list(tmp_path.glob(".*"))


def test_a_run_goes_on_from_the_newest_checkpoint_without_a_flipped_bit(
    ranks: RankPool, tmp_path: Path
) -> None:
    for steps, skipped, problems in ranks(2, resume_past, Case(), str(tmp_path)):
        assert steps == 1
        assert skipped[0] == "step-00000002"
        torn = [
            f"{tmp_path}/checkpoints/step-{step:08d}: found __1_0.distcp has other contents"
            for step in (2, 1)
        ]
        assert all(
            line.startswith(start) for line, start in zip(problems.splitlines(), torn, strict=True)
        ), problems


def test_weights_of_another_model_are_refused_by_name(
    ranks: RankPool, written: Written, tmp_path: Path
) -> None:
    case = Case(shares=((2,),))
    model, _, _ = built(case)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    ((turned, missing, tied, begun),) = ranks(
        1, begin_with_others, case, str(written[0]), str(tmp_path / "weights.pt")
    )
    wanted = tuple(model.head.output.weight.shape)
    where = f"{tmp_path / 'weights.pt'}: head.output.weight"
    assert turned == f"{where}: found shape {wanted[::-1]}, expected shape {wanted}"
    assert missing == f"{where}: found no such entry, expected shape {wanted}"
    assert (
        tied == f"{written[0]}: head.output.weight: found no such weight, expected shape {wanted}"
    )
    assert begun == tied
