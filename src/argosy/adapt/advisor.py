"""Run the controller in a process of its own, so that a job's steps continue while it decides. No
torch.

Rank 0 starts an ``Advisor``, sends it a ``Brief``, and after every step an ``Observation``; the
advisor returns an ``Advice`` for each. Observations that arrive during a search are read
afterwards, in order, and the newest of them decides.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import IO, Any

from argosy.adapt.controller import AdaptationLevel, Controller, ControllerLimits, Decision
from argosy.adapt.predictor import plan_key
from argosy.adapt.watch import World, in_world
from argosy.choose.policy import schedules_that_fit, schedules_to_try
from argosy.cluster.lasting import with_only
from argosy.cluster.topology import Cluster
from argosy.cluster.trace import Trace
from argosy.cost.compute import ComputeModel
from argosy.errors import InfeasibleError
from argosy.plan.plan import Plan
from argosy.plan.runnable import SplitLimits
from argosy.planner import Settings, kept_plans
from argosy.sim.prediction import play_once, prediction
from argosy.sim.simulate import plays_whole
from argosy.solve.settings import continuing
from argosy.workload.chain import Chain

# Devices within this share of full speed are planned for as full ones, so that equal devices stay
# equal despite noise.
_NEAR = 0.05


@dataclass(frozen=True, kw_only=True)
class Brief:
    """The inputs that a controller needs before it starts."""

    plan: Plan
    chain: Chain
    cluster: Cluster
    model: ComputeModel
    limits: ControllerLimits
    roster: tuple[str, ...]
    """Devices on which the run has processes."""
    level: int = 1
    """Level of the search when re-planning."""
    undivided: tuple[int, ...] = ()
    """Layers that mix the samples of a micro-batch, so that their stage has one replica."""
    splits: SplitLimits = field(default_factory=SplitLimits)
    """Limits on how plans found during the run split layers."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """The measurements that were made during a step."""

    step: int
    plan: Plan
    """The plan that the step ran under."""
    seconds: float
    bandwidths: dict[str, float]
    speeds: dict[str, float]
    steps_left: int
    last: dict[str, float] = field(default_factory=dict)
    """Levels by link and by device in the later half of the step."""
    moved: float | None = None
    """Seconds of the migration before this step."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """An answer that the controller gives to an observation."""

    step: int
    decision: Decision | None
    """None if nothing changes."""
    world: World
    predicted: float
    """Predicted seconds of the step under its plan in the believed world."""


class Mind:
    """A controller that is fed with observations."""

    def __init__(self, brief: Brief) -> None:
        self.brief = brief
        self.cluster = with_only(brief.cluster, brief.roster)
        self.controller = Controller(
            brief.plan,
            brief.chain,
            self.cluster,
            limits=brief.limits,
            model=brief.model,
            schedules=self._variants(brief.plan),
            replan=self._replan,
            variants=self._variants,
        )

    def _variants(self, plan: Plan) -> list[Plan]:
        """Return the plan under every schedule that fits: the usual ones, and those of the plan's
        policy."""
        usual = schedules_to_try(Settings(), self.brief.model)
        known = dict.fromkeys((*usual, *(rule.schedule for rule in self.brief.plan.policy)))
        return schedules_that_fit(plan, self.brief.chain, self.cluster, known)

    def _replan(self, believed: Cluster) -> list[Plan]:
        devices = tuple(
            replace(d, speed=Trace.constant(1.0)) if abs(d.speed.at(0) - 1) < _NEAR else d
            for d in believed.devices
        )
        brief = self.brief
        settings = continuing(brief.splits, level=brief.level)
        plans = kept_plans(
            brief.chain,
            replace(believed, devices=devices),
            global_batch=brief.plan.global_batch,
            settings=settings,
            model=brief.model,
        )
        fitting = [plan for plan in plans if not self._divides_what_mixes(plan)]
        if not fitting:
            raise InfeasibleError("every good plan divides samples that a layer mixes")
        return fitting

    def _divides_what_mixes(self, plan: Plan) -> bool:
        return any(
            stage.first <= layer < stage.end and len(stage.replicas) > 1
            for layer in self.brief.undivided
            for stage in plan.stages
        )

    def observe(self, seen: Observation, is_newest: Callable[[], bool] = lambda: True) -> Advice:
        """Process an observation. An observation that is not the newest only updates the world; a
        later one decides."""
        controller = self.controller
        horizon = min(self.brief.limits.horizon, seen.steps_left)
        controller.limits = replace(self.brief.limits, horizon=horizon)
        if seen.moved is not None:
            controller.learn_of_move(seen.moved)
        decision = controller.after_step(
            seen.step,
            seen.seconds,
            seen.bandwidths,
            seen.speeds,
            last=seen.last,
            in_force=plan_key(seen.plan) == plan_key(controller.plan) and is_newest(),
            is_newest=is_newest,
        )
        world = controller.watch.world
        predicted = controller.predictor.seconds(seen.plan, world)
        change = self._with_memory(decision) if decision.is_change else None
        return Advice(step=seen.step, decision=change, world=world, predicted=predicted)

    def _with_memory(self, decision: Decision) -> Decision:
        """Return a decision whose plan, if state moves to it, states the memory that it needs."""
        plan, brief = decision.plan, self.brief
        if decision.what is not AdaptationLevel.FULL:
            return decision
        believed = in_world(self.cluster, decision.world)
        played = play_once(plan, brief.chain, believed, brief.model, whole=plays_whole(plan))
        return replace(
            decision, plan=replace(plan, predicted=prediction(plan, played, brief.chain))
        )


class Advisor:
    """A connection to the controller's process, which rank 0 holds."""

    def __init__(self, brief: Brief) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from argosy.adapt.advisor import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._answers: queue.SimpleQueue[Advice] = queue.SimpleQueue()
        self._told: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=run, daemon=True) for run in (self._read, self._write)
        ]
        for thread in self._threads:
            thread.start()
        self._told.put(brief)

    def _write(self) -> None:
        """Send all queued messages as fast as the other process reads them.

        A pipe holds little, so this runs in a thread and no step waits for it. If the process has
        ended, nothing is sent and the job continues unchanged.
        """
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            while (message := self._told.get()) is not None:
                pickle.dump(message, self.process.stdin)
                self.process.stdin.flush()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for answer in _messages(self.process.stdout):
            self._answers.put(answer)

    def tell(self, seen: Observation) -> None:
        """Put an observation into the queue without waiting for the other process."""
        self._told.put(seen)

    def answers(self) -> list[Advice]:
        """Return the answers that have arrived since the last call."""
        arrived = []
        while not self._answers.empty():
            arrived.append(self._answers.get())
        return arrived

    def close(self) -> None:
        self._told.put(None)
        self.process.kill()
        self.process.wait()
        for thread in self._threads:
            thread.join()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # unread messages are dropped
                pipe.close()


def _messages(stream: IO[bytes]) -> Any:
    while True:
        try:
            yield pickle.load(stream)
        except (EOFError, OSError, ValueError, pickle.UnpicklingError):
            return  # the other process has ended, perhaps in the middle of a message


def main() -> None:
    os.nice(15)
    messages = _messages(sys.stdin.buffer)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # other output of this process must not mix with the answers
    mind = Mind(next(messages))
    waiting: queue.SimpleQueue[Observation | None] = queue.SimpleQueue()
    threading.Thread(target=_forward, args=(messages, waiting), daemon=True).start()
    while (seen := waiting.get()) is not None:
        pickle.dump(mind.observe(seen, waiting.empty), answers)
        answers.flush()


def _forward(messages: Iterator[Any], waiting: queue.SimpleQueue[Any]) -> None:
    """Read messages while the controller decides, so that it can check whether newer ones have
    arrived."""
    for message in messages:
        waiting.put(message)
    waiting.put(None)
