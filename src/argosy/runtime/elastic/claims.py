"""Decide which hosts may continue, by files in the run's folder that all hosts see.

A *generation* is a set of hosts and a plan for them. Before a leader starts one it *claims* its
number by creating a file, which only one host can; so of two parts of a divided cluster only one
continues. While it leads it writes a *beat* regularly: a leader that cannot be reached but still
beats is not replaced, and one that finds a newer claim than its own stops leading. When the job is
over the *outcome* stays, and all other files are removed. If the folder is removed during the job,
the leader writes its own claim and the token again, and every agent its address. Needs no torch.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FOLDER = "elastic"
"""The name of this folder in the run's folder."""


@dataclass(frozen=True, kw_only=True)
class AgentAddress:
    """The address at which an agent listens."""

    name: str
    address: str
    port: int


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A generation that a leader has claimed."""

    generation: int
    leader: str
    members: tuple[str, ...]
    last: int
    """Steps after which the job is done."""


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """The message and exit code that a job ended with."""

    message: str
    exit_code: int


class Claims:
    """Files in the run's folder that are shared by the agents, as one agent uses them."""

    def __init__(self, run: Path) -> None:
        self.folder = run / FOLDER
        self._seen = ("", time.monotonic())
        self._token = ""

    def token(self) -> str:
        """Return a secret of this run, which the first agent creates."""
        path = self.folder / "token"
        if not path.exists():
            self._create(path, {"token": secrets.token_hex(16)})
        self._token = str(json.loads(path.read_text())["token"])
        return self._token

    def register(self, host: AgentAddress) -> None:
        self._replace(self.folder / "hosts" / f"{host.name}.json", asdict(host))

    def unregister(self, name: str) -> None:
        (self.folder / "hosts" / f"{name}.json").unlink(missing_ok=True)

    def hosts(self) -> dict[str, AgentAddress]:
        contents = [_read(path) for path in (self.folder / "hosts").glob("*.json")]
        return {content["name"]: AgentAddress(**content) for content in contents if content}

    def newest(self) -> Claim | None:
        """Return the newest generation, which is the valid one; None if there is none."""
        for path in sorted(self.folder.glob("generation-*.json"), reverse=True):
            content = _read(path)
            if content:
                return Claim(**{**content, "members": tuple(content["members"])})
        return None

    def claim(self, claim: Claim) -> bool:
        """Claim a generation; return whether this host got it. Nobody gets one of a job that is
        over, whose claims are removed."""
        path = self.folder / f"generation-{claim.generation:06d}.json"
        if not self._create(path, asdict(claim)):
            return False
        if self.outcome() is None:
            return True
        path.unlink(missing_ok=True)
        return False

    def restore(self, claim: Claim | None) -> None:
        """Write the token, and the claim of this agent, which leads, again if they were removed."""
        path = self.folder / "token"
        content = _read(path)
        if not content or content["token"] != self._token:
            self._replace(path, {"token": self._token})
        if claim is not None:
            path = self.folder / f"generation-{claim.generation:06d}.json"
            if not path.exists():
                self._create(path, asdict(claim))

    def beat(self) -> None:
        self._replace(self.folder / "beat.json", {"beat": secrets.token_hex(8)})

    def release(self) -> None:
        """Stop leading, so that other hosts need not wait; on a full disk they wait until the last
        beat is old."""
        with contextlib.suppress(OSError):
            self._replace(self.folder / "beat.json", {"beat": None})

    def silence(self) -> float:
        """Return the seconds for which no beat has been seen, by this host's clock; infinite after
        a release."""
        content = _read(self.folder / "beat.json")
        beat = content["beat"] if content else ""
        if beat is None:
            return math.inf
        if beat != self._seen[0]:
            self._seen = beat, time.monotonic()
        return time.monotonic() - self._seen[1]

    def end(self, outcome: RunOutcome) -> None:
        """Write the outcome of the job, and remove everything else."""
        self._replace(self.folder / "outcome.json", asdict(outcome))
        self.clear()

    def clear(self) -> None:
        """Remove everything but the outcome."""
        for path in self.folder.glob("*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != "outcome.json":
                path.unlink(missing_ok=True)

    def outcome(self) -> RunOutcome | None:
        content = _read(self.folder / "outcome.json")
        return RunOutcome(**content) if content else None

    def begin_again(self) -> None:
        """Remove the outcome of an earlier run in this folder."""
        (self.folder / "outcome.json").unlink(missing_ok=True)

    def _create(self, path: Path, content: Any) -> bool:
        """Write a new file atomically; return False if another process has created it."""
        draft = self._draft(path, content)
        try:
            os.link(draft, path)
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        return True

    def _replace(self, path: Path, content: Any) -> None:
        self._draft(path, content).replace(path)

    def _draft(self, path: Path, content: Any) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        draft.touch(mode=0o600)  # other users must not read the token
        try:
            draft.write_text(json.dumps(content, sort_keys=True))
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        return draft


def _read(path: Path) -> Any:
    """Return the content of a file; None if it does not exist, or is incomplete after a power
    cut."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
