"""Lead an island: exchange parameters with the leads of other islands, through losses and
returns."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from argosy.adapt.sync import SyncLimits, next_sync_every
from argosy.document import JsonObject
from argosy.errors import RunError
from argosy.plan.islands import IslandPlan
from argosy.runtime.islands.mean import gather_numbers, hand_over, weighted_mean
from argosy.runtime.islands.membership import STALE, LostIslandError, Membership
from argosy.runtime.islands.outer import OuterState

# The number of exchanges from which H adapts; their median ignores one that is slow for another
# reason than the link.
_MEASURED = 3


@dataclass(frozen=True, kw_only=True)
class ExchangeReport:
    """A report that an island sends to the others before an exchange, as numbers."""

    number: int
    step: int
    samples: int
    """Samples that this island has trained on since its parameters of this fragment were the shared
    ones."""
    step_seconds: float
    """Seconds of one step, the median over the last exchanges."""
    exchange_seconds: float
    """The median seconds of the last exchanges, so that a single slow one changes nothing; 0 before
    the first."""
    joining: int
    """The number of islands that wait to take part."""

    def row(self) -> list[float]:
        return [float(value) for value in vars(self).values()]

    @classmethod
    def of(cls, row: list[float]) -> ExchangeReport:
        number, step, samples, step_seconds, exchange_seconds, joining = row
        return cls(
            number=int(number),
            step=int(step),
            samples=int(samples),
            step_seconds=step_seconds,
            exchange_seconds=exchange_seconds,
            joining=int(joining),
        )


class Lead:
    """A lead that exchanges parameters for one island, in its process of rank 0."""

    def __init__(
        self,
        plan: IslandPlan,
        outer: OuterState,
        membership: Membership,
        *,
        limits: SyncLimits | None = None,
        note: Callable[[JsonObject], None] = lambda line: None,
    ) -> None:
        self.plan, self.outer, self.membership = plan, outer, membership
        self.limits = limits
        """The limits within which H adapts; None if it is fixed."""
        self.note = note
        """A function that is called with lines for the log."""
        self.exchange_seconds: deque[float] = deque(maxlen=_MEASURED)
        """Seconds of the last exchanges."""
        self.step_seconds: deque[float] = deque(maxlen=_MEASURED)
        """Mean seconds of a step between the last exchanges."""
        self.is_settled = True
        """True if all members of the generation have the same shared parameters."""
        self.caught_up = False
        """True if this island took over another one's shared parameters since ``IslandTrainer``
        last read this."""

    def begin(self, facts: str) -> bool:
        """Join the other islands and take over their state; return False if the run is over."""
        if not self.membership.start(self._info(facts=facts, digest=self.outer.digest())):
            return False
        self.is_settled = False
        self._until_settled()
        for at, info in self.membership.infos.items():
            if info.get("facts") not in (None, "", facts):
                raise RunError(
                    f"island {at} has another program, plan or option than island "
                    f"{self.membership.island}"
                )
        return True

    def exchange(
        self, fragment: int, local: Tensor, samples: int, step_seconds: float, step: int
    ) -> None:
        """Exchange one fragment with the present islands, and make the outer step."""
        number = self.outer.exchanges
        while True:
            try:
                self._settle()
                if self.outer.exchanges > number:
                    return  # the others had done it when contact was lost
                self._exchange(fragment, local, samples, step_seconds, step)
                return
            except LostIslandError as error:
                self._regroup(str(error))

    def _exchange(
        self, fragment: int, local: Tensor, samples: int, step_seconds: float, step: int
    ) -> None:
        members, group = self.membership, self.membership.group
        if group is None:
            raise LostIslandError("the group of this generation did not form")
        self.step_seconds.append(step_seconds)
        own = ExchangeReport(
            number=self.outer.exchanges,
            step=step,
            samples=samples,
            step_seconds=statistics.median(self.step_seconds),
            exchange_seconds=statistics.median(self.exchange_seconds)
            if self.exchange_seconds
            else 0.0,
            joining=len(members.joiners()),
        )
        arrived = time.monotonic()
        rows = members.guarded(lambda: gather_numbers(group, own.row()))
        reports = [ExchangeReport.of(row) for row in rows]
        if len({(report.number, report.step) for report in reports}) > 1:
            steps = ", ".join(
                f"exchange {report.number} at step {report.step}" for report in reports
            )
            raise RunError(f"islands are at different places: {steps}")
        began = time.monotonic()
        delta = self.outer.theta[fragment] - local
        weights = [float(report.samples) for report in reports]
        mean = members.guarded(lambda: weighted_mean(group, weights, delta, self.plan.compression))
        self.exchange_seconds.append(time.monotonic() - began)
        self.outer.apply(fragment, mean)
        self._go_on(reports, step)
        self.note(
            {
                "exchange": own.number,
                "fragment": fragment,
                "step": step,
                "islands": list(members.members),
                "samples": [report.samples for report in reports],
                "waited": began - arrived,
                "seconds": self.exchange_seconds[-1],
                "sync_every": self.outer.sync_every,
            }
        )
        if any(report.joining for report in reports):
            self._regroup("another island joins")
            self._until_settled()

    def _go_on(self, reports: list[ExchangeReport], step: int) -> None:
        """Count an exchange, and choose the step of the next one."""
        outer, plan = self.outer, self.plan
        outer.exchanges += 1
        outer.step = step
        if self.limits is not None:
            outer.sync_every = next_sync_every(
                outer.sync_every,
                max(report.step_seconds for report in reports),
                max(report.exchange_seconds for report in reports),
                self.limits,
                fragments=plan.fragments,
                overlap=plan.overlap,
            )
        outer.next_step = step + outer.sync_every // plan.fragments

    def close(self) -> None:
        """Wait until the others have received everything from this island, and end."""
        group = self.membership.group
        try:
            if group is not None:
                self.membership.guarded(lambda: gather_numbers(group, [1.0]))
        except LostIslandError:
            pass  # they have ended already
        self.membership.over()
        self.membership.close()

    def _info(self, **more: str) -> JsonObject:
        return {**self.outer.counters(), **more}

    def _regroup(self, why: str) -> None:
        before = list(self.membership.members)
        self.membership.regroup(self._info())
        self.is_settled = False
        self.note(
            {
                "generation": self.membership.generation,
                "islands": self.membership.members,
                "before": before,
                "why": why,
                "step": self.outer.step,
            }
        )

    def _until_settled(self) -> None:
        while not self.is_settled:
            try:
                self._settle()
            except LostIslandError as error:
                self._regroup(str(error))

    def _settle(self) -> None:
        """Copy the state of the first member with most exchanges to those that have done fewer, or
        began with other values."""
        if self.is_settled:
            return
        members, group = self.membership, self.membership.group
        if group is None:
            raise LostIslandError("the group of this generation did not form")
        infos = members.infos
        sure = [at for at in members.members if not infos[at].get(STALE)] or members.members
        most = max(infos[at]["exchanges"] for at in sure)
        source = next(at for at in sure if infos[at]["exchanges"] == most)
        others = [at for at in members.members if at != source]
        behind = [
            at
            for at in others
            if infos[at]["exchanges"] < most or _differs(infos[at], infos[source])
        ]
        ranks = [members.members.index(at) for at in behind]
        if behind:
            origin = members.members.index(source)
            members.guarded(lambda: hand_over(group, self.outer.vectors(), origin, ranks))
        if members.island in behind:
            self.outer.take_counters(infos[source])
            self.caught_up = True
            self.note(
                {"caught_up": self.outer.step, "exchanges": self.outer.exchanges, "from": source}
            )
        self.is_settled = True


def _differs(info: JsonObject, source: JsonObject) -> bool:
    """Return whether an island has, or may have, other values than the source: it began with
    others, or could not be reached."""
    return bool(info.get(STALE)) or bool(
        info.get("digest") and source.get("digest") and info["digest"] != source["digest"]
    )
