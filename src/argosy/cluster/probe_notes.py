"""What a probe has measured so far, as a JSON file, so that one that was cut can go on.

{version, devices: [...], links: [...], hosts: [...]}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from argosy.cluster.probed import ProbedDevice, ProbedHost, ProbedLink
from argosy.document import Schema

VERSION = 1


@dataclass(kw_only=True)
class ProbeNotes:
    """Grows while a probe measures; ``save`` is called after every measurement."""

    path: Path | None = None
    """Where it is kept; None: nowhere."""
    devices: list[ProbedDevice] = field(default_factory=list)
    links: list[ProbedLink] = field(default_factory=list)
    hosts: list[ProbedHost] = field(default_factory=list)

    def save(self) -> None:
        if self.path is not None:
            self.path.write_text(self.text(), encoding="utf-8")

    def text(self) -> str:
        return json.dumps({"version": VERSION, **self.parts()})

    def parts(self) -> dict[str, list[dict[str, Any]]]:
        """What was measured, for JSON."""
        return {
            "devices": [asdict(one) for one in self.devices],
            "links": [asdict(one) for one in self.links],
            "hosts": [asdict(one) for one in self.hosts],
        }

    def link(self, source: int, target: int) -> ProbedLink | None:
        return next(
            (link for link in self.links if (link.source, link.target) == (source, target)), None
        )

    def host(self, name: str) -> ProbedHost | None:
        return next((host for host in self.hosts if host.host == name), None)

    def keep_if_made_by(self, hosts: Sequence[str]) -> None:
        """Forget everything unless it was measured by as many ranks on the same hosts."""
        if [device.host for device in self.devices] != list(hosts):
            self.devices, self.links, self.hosts = [], [], []


class _File(Schema):
    version: Literal[1]
    devices: tuple[ProbedDevice, ...]
    links: tuple[ProbedLink, ...]
    hosts: tuple[ProbedHost, ...]


def read_notes(text: str, path: Path | None = None) -> ProbeNotes:
    """Notes from their text; nothing from one that is empty, broken or of another version: then all
    is measured."""
    try:
        content = _File.model_validate_json(text)
    except ValidationError:
        return ProbeNotes(path=path)
    return ProbeNotes(
        path=path,
        devices=list(content.devices),
        links=list(content.links),
        hosts=list(content.hosts),
    )


def device_of(text: str) -> ProbedDevice:
    """Back from the JSON of its fields."""
    return _DEVICE.validate_json(text)


_DEVICE = TypeAdapter(ProbedDevice)
