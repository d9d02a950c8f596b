"""Sharing one card: the shares, and a clear refusal where there is none. The sharing itself is in
tests/gpu."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.cluster.file import load_cluster
from argosy.errors import InputError, RunError
from argosy.lab.card import SharedCard, shares_of, why_no_card

CLUSTER = """
name = "card"
[[nodes]]
name = "a"
devices = [{ kind = "H200", count = 1 }, { kind = "H200", efficiency = 0.5, count = 2 }]
intra = [{ medium = "host", bandwidth = "3 GB/s" }]
"""


def test_shares_follow_speed_and_stay_within_the_card(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER, encoding="utf-8")
    assert shares_of(load_cluster(str(path))) == {"a0.0": 50, "a0.1": 25, "a0.2": 25}


@pytest.mark.parametrize("shares", [{"a": 60, "b": 50}, {"a": 0}, {}])
def test_shares_that_cannot_be_are_refused(shares: dict[str, int]) -> None:
    with pytest.raises(InputError, match="add up to at most 100"):
        SharedCard(shares)


@pytest.mark.skipif(why_no_card() is None, reason="this machine has a card to share")
def test_a_machine_without_a_card_says_so() -> None:
    with pytest.raises(RunError, match="no shared card here: no"), SharedCard({"a": 100}):
        pass
