"""What a probe has measured so far, as a JSON file, so that one that was cut can go on.

{version, devices: [...], links: [...], hosts: [...]}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from argosy.cluster.probed import ProbedDevice, ProbedHost, ProbedLink
from argosy.dtype import Dtype

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
        return next((link for link in self.links if (link.source, link.target) == (source, target)), None)

    def host(self, name: str) -> ProbedHost | None:
        return next((host for host in self.hosts if host.host == name), None)

    def keep_if_made_by(self, hosts: Sequence[str]) -> None:
        """Forget everything unless it was measured by as many ranks on the same hosts."""
        if [device.host for device in self.devices] != list(hosts):
            self.devices, self.links, self.hosts = [], [], []


def read_notes(text: str, path: Path | None = None) -> ProbeNotes:
    """Notes from their text; nothing from an empty or an unknown one."""
    try:
        content: dict[str, Any] = json.loads(text)
    except json.JSONDecodeError:
        return ProbeNotes(path=path)
    if content.get("version") != VERSION:
        return ProbeNotes(path=path)
    return ProbeNotes(
        path=path,
        devices=[device_of(one) for one in content["devices"]],
        links=[ProbedLink(**one) for one in content["links"]],
        hosts=[ProbedHost(**one) for one in content["hosts"]],
    )


def device_of(read: dict[str, Any]) -> ProbedDevice:
    """Back from JSON, which knows no tuples."""
    flops = tuple((Dtype(dtype), rate) for dtype, rate in read.pop("flops"))
    by_size = tuple((Dtype(dtype), size, rate) for dtype, size, rate in read.pop("by_size"))
    return ProbedDevice(**read, flops=flops, by_size=by_size)
