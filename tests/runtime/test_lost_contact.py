"""What torch.distributed raises is about somebody else; what a user's model raises is not."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from runtime.contact_cases import send_to_nobody
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from argosy.runtime.processes.failure import ElsewhereError, ending_after, in_contact_beside_others


def test_a_message_to_a_rank_that_has_gone_is_about_that_rank(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=send_to_nobody, args=(rank, str(tmp_path))) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0
    assert (tmp_path / "told").read_text().startswith("lost contact in step 3: ")


def _of_gloo() -> None:
    raise RuntimeError(
        "[/src/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1"
    )


def _of_nccl() -> None:
    raise dist.DistBackendError("NCCL communicator was aborted on rank 1.")


@pytest.mark.parametrize("fail", [_of_gloo, _of_nccl])
def test_what_torch_distributed_raises_is_about_others(fail: Callable[[], None]) -> None:
    with (
        pytest.raises(ElsewhereError, match="lost contact in step 3"),
        in_contact_beside_others("in step 3"),
    ):
        fail()


def test_what_does_not_end_is_ended_from_another_thread() -> None:
    ended = threading.Event()
    with ending_after(0.0, ended.set):
        assert ended.wait(60)
    late = threading.Event()
    with ending_after(3600.0, late.set):
        pass
    assert not late.is_set()


def _broken_model() -> None:
    nn.Linear(2, 2)(torch.ones(3))


def _broken_and_wrapped() -> None:
    checkpoint_wrapper(nn.Linear(2, 2))(torch.ones(3))


@pytest.mark.parametrize("fail", [_broken_model, _broken_and_wrapped])
def test_what_a_model_raises_is_its_own(fail: Callable[[], None]) -> None:
    with pytest.raises(RuntimeError, match="shapes"), in_contact_beside_others("in step 3"):
        fail()
