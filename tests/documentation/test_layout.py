"""The tour of the source leads to things that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "layout.md").read_text(encoding="utf-8")
TOUR = TEXT.partition("## Half an hour")[2].partition("\n## ")[0]


def test_every_stop_names_files_that_exist_and_what_is_defined_there() -> None:
    stops = re.findall(r"`([\w/]+\.py)`(?: \(((?:`\w+`(?:, )?)+)\))?", TOUR)
    assert len(stops) > 15
    for file, names in stops:
        found = [path for path in (ROOT / file, ROOT / "src" / "argosy" / file) if path.is_file()]
        assert found, file
        text = found[0].read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^(class|def) {name}\b", text, re.M), f"{file}: {name}"


def test_every_folder_of_the_source_is_on_the_map() -> None:
    folders = [
        path.name for path in (ROOT / "src" / "argosy").iterdir() if path.is_dir() and path.name != "__pycache__"
    ]
    assert [name for name in folders if f"`{name}/" not in TEXT] == []
