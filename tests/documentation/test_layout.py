"""The tour of the source leads to things that exist."""

from __future__ import annotations

import re
from pathlib import Path

from test_architecture import LAYERS

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
        path.name
        for path in (ROOT / "src" / "argosy").iterdir()
        if path.is_dir() and path.name != "__pycache__"
    ]
    assert [name for name in folders if f"`{name}/" not in TEXT] == []


def test_the_map_names_each_place_once_and_files_that_are_there() -> None:
    rows = [
        line.split(" | ")
        for line in TEXT.partition("## The map")[2].splitlines()
        if line.startswith("| `")
    ]
    places = [re.findall(r"`([^`]+)`", row[0]) for row in rows]
    assert len(places) == len({tuple(place) for place in places})
    source = ROOT / "src" / "argosy"
    for place, row in zip(places, rows, strict=True):
        assert [name for name in place if not (source / name).exists()] == []
        folders = [
            (source / name) if name.endswith("/") else (source / name).parent for name in place
        ]
        files = re.findall(r"`([\w/]+\.(?:py|toml))`", " | ".join(row[1:]))
        assert [
            name
            for name in files
            if not any((folder / name).exists() for folder in (*folders, source))
        ] == []


def test_the_map_is_in_the_order_of_imports() -> None:
    """A whole folder stands below all that it imports; single files of one may stand where they are
    first needed."""
    listed = [name for name in re.findall(r"^\| `(\w+)/` \|", TEXT, re.M) if name != "data"]
    layers = [next(index for index, names in enumerate(LAYERS) if name in names) for name in listed]
    assert layers == sorted(layers, reverse=True)
