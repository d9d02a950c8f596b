"""Agree on which islands take part, in generations, through a store that all leads reach.

    (1)  A lead writes a heartbeat every interval; one that has not changed for ``lost_after``
         seconds is lost.
    (2)  A generation begins when every member of the previous one has announced itself or is lost.
         The first present lead, by number, writes the list of members; a lead that comes later
         announces itself for the next one.
    (3)  Members of a generation form a process group of their own.
    (4)  A lead that finds a later generation without it was considered lost while it could not be
         reached. It joins again and takes over the state of the others, no matter what it received
         from the group that they have left.

Keys: ``alive/I`` (1), ``next/G/I`` an announcement with what island I has done, ``members/G`` (2),
``generation``, ``joining/I`` the generation that an island from outside waits for, ``over`` once
the run has ended.
"""

from __future__ import annotations

import datetime
import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.distributed import PrefixStore, ProcessGroupGloo, Store  # type: ignore[attr-defined]

from argosy.document import JsonObject
from argosy.errors import RunError

# Seconds between two looks at the store.
_POLL = 0.02
STALE = "stale"
"""A key in the announcement of an island whose shared parameters may differ from the others'
(4)."""


class LostIslandError(RunError):
    """An error that is raised if another island went away during an exchange."""


class Membership:
    """The islands that take part, as one lead sees them."""

    def __init__(
        self,
        connect: Callable[[], Store],
        island: int,
        count: int,
        *,
        lost_after: float = 10.0,
        gather: float = 60.0,
        patience: float = 600.0,
        interface: str | None = None,
    ) -> None:
        self.store = connect()
        self.island, self.count = island, count
        self.lost_after, self.first_wait = lost_after, gather
        self.patience = datetime.timedelta(seconds=patience)
        self.interface = interface
        """The network interface of groups; None lets gloo choose."""
        self.generation = -1
        self.members: list[int] = []
        self.infos: dict[int, JsonObject] = {}
        """The announcements of the members of this generation."""
        self.group: Any = None
        self._connect = connect
        self._seen: dict[int, float] = {}
        """The time at which an island's heartbeat last changed, by this lead's clock."""
        self._signs: dict[int, bytes] = {}
        self._latest = -1
        """The last generation that began, with or without this island."""
        self._stop = threading.Event()
        self._broken: Exception | None = None
        self._thread = threading.Thread(target=self._live, name="signs-of-life", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(self.lost_after)

    def start(self, info: JsonObject) -> bool:
        """Take part from the first generation or from the next one; return False if the run is
        over."""
        if self.store.check(["generation"]):
            return self.join(info)
        if self._form(0, list(range(self.count)), info):
            return True
        return self.join(info)

    def join(self, info: JsonObject) -> bool:
        """Announce this island until a generation includes it; return False if the run ends
        before."""
        while True:
            following = int(self.store.get("generation")) + 1
            self.store.set(f"joining/{self.island}", str(following))
            if self._form(following, [], info):
                return True
            if self.store.check(["over"]):
                return False

    def joiners(self) -> list[int]:
        """Return the islands that wait for the next generation."""
        wanted = str(self.generation + 1).encode()
        keys = [(at, f"joining/{at}") for at in range(self.count) if at != self.island]
        return [at for at, key in keys if self.store.check([key]) and self.store.get(key) == wanted]

    def regroup(self, info: JsonObject) -> None:
        """Form the next generation of this one's remaining members and of the islands that wait for
        it; join a later one if the others have formed it without this island (4)."""
        expected = sorted({*self.members, *self.joiners()})
        if self._form(self.generation + 1, expected, info):
            return
        if not self.join({**info, STALE: True}):
            raise RunError(f"the run ended while the others could not reach island {self.island}")

    def over(self) -> None:
        """Write that the run has ended."""
        self.store.set("over", "1")

    def lost(self) -> list[int]:
        """Return the members whose heartbeat has stopped (1)."""
        if self._broken is not None:
            raise RunError(
                f"island {self.island} lost contact with the meeting point: {self._broken}"
            )
        now = time.monotonic()
        others = [at for at in self.members if at != self.island]
        return [at for at in others if now - self._seen.get(at, now) > self.lost_after]

    def guarded(self, call: Callable[[], Any]) -> Any:
        """Return the result of a call that waits for other members; raise ``LostIslandError`` if
        one of them is lost."""
        result: list[Any] = []
        failure: list[Exception] = []

        def run() -> None:
            try:
                result.append(call())
            except Exception as error:  # errors of gloo, raised again below
                failure.append(error)

        thread = threading.Thread(target=run, name="exchange", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_POLL * 10)
            if thread.is_alive() and (lost := self.lost()):
                raise LostIslandError(f"no sign of life from island {', '.join(map(str, lost))}")
            if thread.is_alive() and self._latest > self.generation:
                raise LostIslandError("the others continued without this island")
        if failure:
            if not isinstance(failure[0], RuntimeError):
                raise failure[0]
            raise LostIslandError(str(failure[0]).partition("\n")[0]) from failure[0]
        return result[0]

    def _form(self, generation: int, expected: list[int], info: JsonObject) -> bool:
        """Offer this island for a generation and join its group; return False if it began
        without this island, or if the run ended."""
        self.store.set(f"next/{generation}/{self.island}", json.dumps(info))
        key, began = f"members/{generation}", time.monotonic()
        while not self.store.check([key]):
            if expected:
                self._decide(generation, expected, began)
            elif self.store.check(["over"]):
                return False
            if self._broken is not None:
                self.lost()
            time.sleep(_POLL)
        members = json.loads(self.store.get(key))
        if self.island not in members:
            return False
        self.generation, self.members = generation, members
        self.infos = {at: json.loads(self.store.get(f"next/{generation}/{at}")) for at in members}
        now = time.monotonic()
        self._seen = dict.fromkeys(members, now)
        self._open()
        return True

    def _decide(self, generation: int, expected: list[int], began: float) -> None:
        """Write the list of members if this lead is the first present one, and no island is waited
        for (2)."""
        there = [at for at in range(self.count) if self.store.check([f"next/{generation}/{at}"])]
        now = time.monotonic()
        grace = self.first_wait if generation == 0 else self.lost_after
        awaited = [
            at for at in expected if at not in there and now - self._seen.get(at, began) <= grace
        ]
        if there[0] == self.island and not awaited:
            self.store.compare_set(f"members/{generation}", "", json.dumps(there))
            self.store.set("generation", str(generation))

    def _open(self) -> None:
        """Open the group of this generation (3)."""
        name = "GLOO_SOCKET_IFNAME"
        before = os.environ.pop(name, None)
        if self.interface is not None:
            os.environ[name] = self.interface
        store = PrefixStore(f"group/{self.generation}", self._connect())
        rank, size, patience = self.members.index(self.island), len(self.members), self.patience
        try:
            self.group = self.guarded(lambda: ProcessGroupGloo(store, rank, size, timeout=patience))
        except LostIslandError:
            self.group = None  # the first exchange fails and regroups
        finally:
            os.environ.pop(name, None)
            if before is not None:
                os.environ[name] = before

    def _live(self) -> None:
        """Write and read heartbeats (1)."""
        try:
            store, beat = self._connect(), 0
            while not self._stop.wait(self.lost_after / 10 if beat else 0.0):
                beat += 1
                store.set(f"alive/{self.island}", f"{os.getpid()}-{beat}")
                if store.check(["generation"]):
                    self._latest = int(store.get("generation"))
                for at in range(self.count):
                    if at != self.island and store.check([f"alive/{at}"]):
                        sign = bytes(store.get(f"alive/{at}"))
                        if self._signs.get(at) != sign:
                            self._signs[at], self._seen[at] = sign, time.monotonic()
        except Exception as error:  # raised by the thread that waits
            self._broken = error
