"""``argosy import``: from each form to a cluster file that the other commands take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.command_result import Run

SEEDS = Path(__file__).parents[1] / "fuzz" / "seeds"
GIVEN = ("--kind", "A100-80GB", "--intra", "300 GB/s", "--nic", "100 Gbit/s")


@pytest.mark.parametrize(
    ("source", "seed", "options", "count"),
    [
        ("slurm", "slurm", (*GIVEN, "--per-host", "4"), 10 * 4),
        ("slurm-topology", "topology", (*GIVEN, "--uplink", "400 Gbit/s"), 5 * 8),
        ("nccl-xml", "nccl", (), 2),
        ("nvidia-smi", "smi", ("--nic", "100 Gbit/s"), 2),
    ],
)
def test_what_is_imported_is_a_cluster_file(
    run: Run, source: str, seed: str, options: tuple[str, ...], count: int
) -> None:
    file = next((SEEDS / seed).iterdir())
    done = run(
        "import", str(file), "--from", source, *options, "-o", "cluster.toml", "--name", "mine"
    )
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("wrote cluster.toml: ")
    assert run("cluster", "check", "cluster.toml").code == 0
    told = json.loads(
        run("import", str(file), "--from", source, *options, "--name", "mine", "--json").out
    )
    assert (told["file"], told["devices"]) == (None, count)
    assert (
        told["cluster"]
        == Path("cluster.toml").read_text()
        == run("import", str(file), "--from", source, *options, "--name", "mine").out
    )


@pytest.mark.parametrize("option", ["--kind", "--intra", "--nic", "--uplink"])
def test_what_the_file_does_not_say_must_be_given(run: Run, option: str) -> None:
    file = next((SEEDS / "topology").iterdir())
    given = dict(
        zip((all_given := (*GIVEN, "--uplink", "400 Gbit/s"))[::2], all_given[1::2], strict=True)
    )
    del given[option]
    done = run(
        "import",
        str(file),
        "--from",
        "slurm-topology",
        *(word for pair in given.items() for word in pair),
    )
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {option} is needed")
