"""DAPPLE's text profiles: the three public ones, where they are at hand, and small graphs that
branch."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy.workload.imports.dapple import read_dapple
from argosy.workload.load import load_model

PROFILES = Path(__file__).resolve().parents[3] / "shared" / "data" / "dapple-profiles"
needs_profiles = pytest.mark.skipif(
    not PROFILES.is_dir(), reason=f"no {PROFILES.name} beside the repository"
)


@needs_profiles
@pytest.mark.parametrize(
    ("file", "layers", "batch", "forward_ms", "backward_ms", "megabytes"),
    [
        ("bert-48-pbs-2.txt", 53, 2, 129.20, 214.56, 2549.8),
        ("gnmt-16-pbs-64.txt", 96, 64, 90.33, 158.59, 1163.0),
        ("vgg-19-pbs-32.txt", 26, 32, 51.41, 96.20, 548.0),
    ],
)
def test_totals(
    file: str, layers: int, batch: int, forward_ms: float, backward_ms: float, megabytes: float
) -> None:
    chain, profile = read_dapple(PROFILES / file)
    assert len(chain.layers) == layers
    assert {row.micro_batch for row in profile.rows} == {batch}
    assert sum(row.forward_seconds for row in profile.rows) * 1e3 == pytest.approx(
        forward_ms, abs=0.005
    )
    assert sum(row.backward_seconds for row in profile.rows) * 1e3 == pytest.approx(
        backward_ms, abs=0.005
    )
    assert chain.parameters * 4 / 1e6 == pytest.approx(megabytes, abs=0.05)


@needs_profiles
def test_a_cut_of_bert_pays_the_hidden_states_and_the_mask() -> None:
    chain = load_model(PROFILES / "bert-48-pbs-2.txt")
    block = next(layer for layer in chain.layers if layer.name == "node5.layer_0")
    assert block.output_bytes * 2 == 4_325_376 + 3_538_944
    assert chain.layers[-1].output_bytes == 0


@needs_profiles
def test_times_scale_per_sample() -> None:
    _, profile = read_dapple(PROFILES / "bert-48-pbs-2.txt")
    assert profile.forward_seconds("node5.layer_0", 4) == pytest.approx(2 * 2.69e-3)


FIELDS = "forward_compute_time={}, backward_compute_time={}, activation_size={}, parameter_size={}"
DIAMOND = f"""\
node3 -- Add -- {FIELDS.format(0.5, 1, 40, 0)}
node1 -- Input -- {FIELDS.format(0, 0, 100, 0)}
node2 -- Linear(2, 2) -- {FIELDS.format(2, 4, "[60; 4]", 24)}
node4 -- __getitem__(0) -- {FIELDS.format(0, 0, 40, 0)}
\tnode1 -- node2
\tnode2 -- node3
\tnode1 -- node3
\tnode3 -- node4
"""


def test_a_branching_graph_becomes_a_chain(tmp_path: Path) -> None:
    path = tmp_path / "diamond-pbs-4.txt"
    path.write_text(DIAMOND)
    chain, profile = read_dapple(path)
    assert [layer.name for layer in chain.layers] == [
        "node1.Input",
        "node2.Linear",
        "node3.Add",
        "node4.__getitem__",
    ]
    assert [layer.output_bytes for layer in chain.layers] == [25, (100 + 64) / 4, 10, 0]
    assert [layer.activation_bytes for layer in chain.layers] == [25, 16, 10, 0]
    assert [layer.parameters for layer in chain.layers] == [0, 6, 0, 0]
    assert profile.backward_seconds("node2.Linear", 4) == 4e-3
    assert (chain.name, profile.device) == ("diamond", "V100-16GB")


def test_the_profile_batch_may_be_given(tmp_path: Path) -> None:
    path = tmp_path / "diamond.txt"
    path.write_text(DIAMOND)
    chain, _ = read_dapple(path, profile_batch=2)
    assert chain.layers[0].output_bytes == 50
