"""Train a rank's part of an island: steps of its trainer, and exchanges when they are due."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from argosy.plan.islands import IslandPlan
from argosy.runtime.islands.gathering import Gathering
from argosy.runtime.islands.lead import Lead
from argosy.runtime.islands.outer import OuterState
from argosy.runtime.step.trainer import Trainer


@dataclass
class _Pending:
    """An exchange whose result has not been used yet."""

    fragment: int
    due: int
    """Steps after which it is used."""
    thread: threading.Thread | None = None
    """The thread of the exchange on the lead, if steps continue meanwhile."""
    error: Exception | None = None


class IslandTrainer:
    """A trainer that runs one rank of an island.

    Every rank of the island makes one and calls the same methods at the same steps. ``lead`` is set
    on rank 0 before ``begin``; it is made with ``gathering`` and ``initial_state``.
    """

    def __init__(self, trainer: Trainer, plan: IslandPlan, island: int) -> None:
        self.trainer, self.plan, self.island = trainer, plan, island
        self.share = plan.islands[island].global_batch
        self.gathering = Gathering(trainer, plan.fragments)
        self.lead: Lead | None = None
        self.next_step = 0
        self.last_exchange = 0
        """Steps after which the last exchange began."""
        self.exchanges = 0
        self.shared_since = [0] * plan.fragments
        """Per fragment, the step since when this island trains it on its own."""
        self._pending: _Pending | None = None
        self._seconds = 0.0
        self._steps = 0

    def initial_state(self) -> OuterState | None:
        """Return the shared parameters as this island has them now on rank 0, None on other ranks.
        Every rank calls this."""
        vectors = [self.gathering.gather(at) for at in range(self.plan.fragments)]
        if self.trainer.rank:
            return None
        theta = [vector for vector in vectors if vector is not None]
        step = self.trainer.steps
        return OuterState(
            optimizer=self.plan.outer,
            theta=theta,
            step=step,
            next_step=step + self.plan.period,
            sync_every=self.plan.sync_every,
        )

    def begin(self, facts: str = "") -> bool:
        """Join the other islands; return False if the run is over."""
        joined = self.lead is None or self.lead.begin(facts)
        (goes_on,) = self.gathering.tell([int(joined)])
        if goes_on:
            self._take_up([], mixing=0.0)
        return bool(goes_on)

    @property
    def is_waiting(self) -> bool:
        """Return whether the result of an exchange is still to be used, so that no checkpoint can
        be made."""
        return self._pending is not None

    def step(self, batch: Any) -> float:
        """Train on this island's part of a global batch, and exchange if it is time."""
        began = time.monotonic()
        loss = self.trainer.step(batch)
        self._seconds += time.monotonic() - began
        self._steps += 1
        if self._pending is not None and self.trainer.steps >= self._pending.due:
            self._finish()
        if self.trainer.steps >= self.next_step:
            self._exchange(self.plan.overlap)
        return loss

    def end(self) -> None:
        """Exchange everything once more after the last step, so that all islands end with the same
        parameters."""
        if self._pending is not None:
            self._finish()
        done = 1 if self.last_exchange == self.trainer.steps and self.exchanges else 0
        for _ in range(self.plan.fragments - done):
            self._exchange(0)
        if self.lead is not None:
            self.lead.close()

    def _exchange(self, overlap: int) -> None:
        """Begin an exchange, and finish it if no steps overlap with it."""
        fragment = self.exchanges % self.plan.fragments
        local = self.gathering.gather(fragment)
        step = self.trainer.steps
        self._pending = _Pending(fragment=fragment, due=step + overlap)
        if self.lead is not None:
            assert local is not None
            samples = self.share * (step - self.shared_since[fragment])
            seconds = self._seconds / self._steps if self._steps else 0.0
            if overlap:
                arguments = (self._pending, local, samples, seconds, step)
                self._pending.thread = threading.Thread(
                    target=self._run, args=arguments, daemon=True
                )
                self._pending.thread.start()
            else:
                self.lead.exchange(fragment, local, samples, seconds, step)
        self._seconds, self._steps = 0.0, 0
        self.shared_since[fragment] = step
        self.last_exchange = step
        self.next_step = step + self.plan.period  # until the result sets another step
        if not overlap:
            self._finish()

    def _run(
        self, pending: _Pending, local: Tensor, samples: int, seconds: float, step: int
    ) -> None:
        assert self.lead is not None
        try:
            self.lead.exchange(pending.fragment, local, samples, seconds, step)
        except Exception as error:  # raised again when the result is used
            pending.error = error

    def _finish(self) -> None:
        """Use the result of an exchange."""
        pending = self._pending
        assert pending is not None
        if pending.thread is not None:
            pending.thread.join()
        if pending.error is not None:
            raise pending.error
        late = self.trainer.steps > self.last_exchange
        self._pending = None
        self._take_up([pending.fragment], mixing=self.plan.mixing if late else 0.0)

    def _take_up(self, fragments: Sequence[int], *, mixing: float) -> None:
        """Give the ranks of this island the shared parameters of these fragments, or of all if it
        has caught up."""
        outer = None if self.lead is None else self.lead.outer
        numbers = [0] * 4
        if self.lead is not None:
            known = self.lead.outer
            numbers = [known.exchanges, known.step, known.next_step, int(self.lead.caught_up)]
            self.lead.caught_up = False
        self.exchanges, self.last_exchange, self.next_step, caught_up = self.gathering.tell(numbers)
        for at in range(self.plan.fragments) if caught_up else fragments:
            whole = None if outer is None else outer.theta[at]
            self.gathering.scatter(at, whole, mixing=0.0 if caught_up else mixing)
        if caught_up:
            self._go_to(self.last_exchange)
            self.shared_since = [self.last_exchange] * self.plan.fragments
        self.trainer.gradients.after_update()

    def _go_to(self, step: int) -> None:
        """Continue counting from another step: learning rates are those of that step, the
        optimizer's state stays."""
        optimizer = self.trainer.optimizer
        state = {} if optimizer is None else dict(optimizer.state)
        self.trainer.begin_at(step)
        if self.trainer.optimizer is not None:
            self.trainer.optimizer.state.update(state)
