"""The demo's training: by the plan that was found, with the losses of a plain loop."""

from __future__ import annotations

import re
from pathlib import Path

from rich.console import Console

from argosy.cli.demo_training import train


def test_the_demo_trains_as_a_plain_loop_does(tmp_path: Path) -> None:
    console = Console(record=True, width=200)
    train(console, tmp_path, quiet=True)
    said = console.export_text()
    found = re.search(r"differ by at most (\S+)\.\n", said)
    assert found is not None, said
    assert float(found[1]) < 1e-4
    assert (tmp_path / "tiny-gpt" / "run" / "timeline.json").is_file()
