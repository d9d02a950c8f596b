"""Read the clusters, models, plans, profiles and calibrations that come with Argosy, by name."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from argosy.document import Document, parse_json, parse_toml


@dataclass(frozen=True)
class Bundled:
    """A folder in ``data`` that has files which users name without their suffix."""

    folder: str
    suffix: str

    @property
    def _files(self) -> Traversable:
        return resources.files("argosy") / "data" / self.folder

    def names(self) -> list[str]:
        """Return the names, sorted."""
        files = (Path(file.name) for file in self._files.iterdir())
        return sorted(file.stem for file in files if file.suffix == self.suffix)

    def read(self, name: str) -> Document:
        """Return the document of a name."""
        file = f"{name}{self.suffix}"
        parse = parse_toml if self.suffix == ".toml" else parse_json
        return parse((self._files / file).read_text(encoding="utf-8"), file=file)
