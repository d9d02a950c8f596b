"""Store what a probe has measured so far in a JSON file, so that an interrupted probe can continue.

{version, devices: [...], links: [...], hosts: [...]}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from argosy.cluster.probed import ProbedDevice, ProbedHost, ProbedLink
from argosy.document import JsonObject, Schema

# Version of the file format.
VERSION = 1


@dataclass(kw_only=True)
class ProbeNotes:
    """A list of measurements that grows during a probe; ``save`` is called after every
    measurement."""

    path: Path | None = None
    """File of the notes; None: they are not saved."""
    devices: list[ProbedDevice] = field(default_factory=list)
    links: list[ProbedLink] = field(default_factory=list)
    hosts: list[ProbedHost] = field(default_factory=list)

    def save(self) -> None:
        if self.path is not None:
            self.path.write_text(self.text(), encoding="utf-8")

    def text(self) -> str:
        return json.dumps({"version": VERSION, **self.parts()})

    def parts(self) -> dict[str, list[JsonObject]]:
        """Return the measurements for JSON."""
        return {
            "devices": [asdict(device) for device in self.devices],
            "links": [asdict(link) for link in self.links],
            "hosts": [asdict(host) for host in self.hosts],
        }

    def link(self, source: int, target: int) -> ProbedLink | None:
        return next(
            (link for link in self.links if (link.source, link.target) == (source, target)), None
        )

    def host(self, name: str) -> ProbedHost | None:
        return next((host for host in self.hosts if host.host == name), None)

    def keep_if_made_by(self, hosts: Sequence[str]) -> None:
        """Drop all measurements unless they were made by as many ranks on the same hosts."""
        if [device.host for device in self.devices] != list(hosts):
            self.devices, self.links, self.hosts = [], [], []


class _File(Schema):
    version: Literal[1]
    devices: tuple[ProbedDevice, ...]
    links: tuple[ProbedLink, ...]
    hosts: tuple[ProbedHost, ...]


def read_notes(text: str, path: Path | None = None) -> ProbeNotes:
    """Return the notes of a text; none if it is empty, broken or of another version, so that all is
    measured again."""
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
    """Return the device of a JSON text."""
    return _DEVICE.validate_json(text)


_DEVICE = TypeAdapter(ProbedDevice)
