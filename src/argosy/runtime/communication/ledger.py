"""What a rank does in which order, and what it holds in memory while it does. Needs no torch.

A rank runs its row of the schedule one action after the other, so what it holds does not depend on
time. With n samples of a micro-batch, and layers first..end of its stage:

    (1)  a posted receive holds its buffer: n x what the layer before hands on, or n x what the
         stage itself does
    (2)  a forward keeps n x the layers' activations, the received input among them, and what it
         hands on
    (3)  a backward holds ``cost.memory.passing_bytes`` for a moment, gives (2) and its buffer back,
         and leaves the gradient of its input, which is held until it has surely left: until a
         forward arrives that the stage before ran after it had used the gradient (``answered``),
         until many more were sent, or until the end of the step
    (4)  gradients are summed over the replicas, or scattered (ZeRO 1), in buckets, a few of which
         are copies at a time

    (5)  an update holds the moments of two layers for a moment, if they are offloaded; a forward
         and a backward that offload activations hold what is copied at a time (``cost.memory``,
         (11)), and (2) is the stage's input

``peak_bytes`` adds the state of the weights. It replays the executor and the sum of gradients; a
split sequence is not in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from argosy.cost.memory import (
    activation_bytes,
    copied_at_a_time,
    forward_working_bytes,
    moments_at_a_time,
    passing_bytes,
    state_bytes,
)
from argosy.plan.plan import Plan
from argosy.schedule import (
    Action,
    ActionKind,
    Schedule,
    ScheduleKind,
    build_schedule,
    with_communication,
)
from argosy.workload.chain import Chain

MOST_GRADIENTS = 16
"""Micro-batches whose gradients may be on their way at once."""
BUCKET_BYTES = 32 * 2**20
"""Of gradients that travel together: large enough to be fast, small enough to need little memory
beside them."""
MOST_BUCKETS = 4
"""Under way at once."""


def lookahead(plan: Plan) -> int:
    """How many computations ahead receives are posted: k of each direction, and never fewer than
    two."""
    return 2 * max(2, plan.schedule.k if plan.schedule.kind is ScheduleKind.KFKB else 1)


def answered(schedule: Schedule) -> Mapping[tuple[int, int], tuple[int, ...]]:
    """Per stage and micro-batch: the micro-batches whose gradients, which the stage has sent, the
    stage before had used when it ran the forward of that micro-batch.

    >>> from argosy.schedule import ScheduleSpec
    >>> answered(build_schedule(ScheduleSpec(), 2, 4))
    {(1, 0): (), (1, 1): (), (1, 2): (0,), (1, 3): (1,)}
    """
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    used: dict[int, list[int]] = defaultdict(list)
    for row in schedule.rows:
        for action in row:
            if action.kind.is_gradient:
                used[action.stage].append(action.micro_batch)
            elif action.kind is ActionKind.FORWARD and action.stage + 1 < schedule.num_stages:
                found[action.stage + 1, action.micro_batch] = tuple(used.pop(action.stage, ()))
    return found


def peak_bytes(plan: Plan, chain: Chain) -> dict[str, float]:
    """The most that every device holds at any moment of a step, as the runtime carries the plan
    out."""
    schedule = build_schedule(plan.schedule, len(plan.stages), plan.num_micro_batches)
    ahead = with_communication(schedule, lookahead=lookahead(plan))
    proofs = answered(schedule)
    peaks: dict[str, float] = {}
    for worker, row in enumerate(ahead.rows):
        hosted = [index for index in range(len(plan.stages)) if schedule.worker_of(index) == worker]
        for at, replica in enumerate(plan.stages[hosted[0]].replicas):
            samples = {index: plan.stages[index].replicas[at].samples for index in hosted}
            for name, share in zip(replica.devices, replica.shares, strict=True):
                ledger = _Ledger(plan, chain, samples, proofs, share)
                peaks[name] = max(peaks.get(name, 0.0), ledger.replay(row))
    return peaks


class _Ledger:
    """What one rank holds, action by action."""

    def __init__(
        self,
        plan: Plan,
        chain: Chain,
        samples: Mapping[int, int],
        proofs: Mapping[tuple[int, int], tuple[int, ...]],
        share: float,
    ) -> None:
        """``share``: of the work of a tensor-parallel group."""
        stages = plan.stages
        self.proofs = proofs
        self.given = {
            i: n * chain.layers[stages[i].first - 1].output_bytes if i else 0.0
            for i, n in samples.items()
        }
        last = len(stages) - 1
        self.handed = {
            i: n * chain.layers[stages[i].end - 1].output_bytes if i < last else 0.0
            for i, n in samples.items()
        }
        self.sent_back = {
            i: n * chain.returned_bytes(stages[i].first - 1) if i else 0.0
            for i, n in samples.items()
        }
        self.returned = {
            i: n * chain.returned_bytes(stages[i].end - 1) if i < last else 0.0
            for i, n in samples.items()
        }
        self.kept = {i: activation_bytes(chain, stages[i], n, share) for i, n in samples.items()}
        self.passing = {
            i: passing_bytes(chain, stages[i], n, share, backward=True) for i, n in samples.items()
        }
        self.ahead = {
            i: forward_working_bytes(chain, stages[i], n, share)
            + copied_at_a_time(chain, stages[i], n, share, backward=False)
            for i, n in samples.items()
        }
        states = {i: state_bytes(chain, stages[i], share) for i in samples}
        self.state = sum(state.total for state in states.values())
        summed = [
            states[i].gradients for i in samples if stages[i].num_holders > 1 and stages[i].zero < 2
        ]
        self.copies = min(sum(summed), MOST_BUCKETS * BUCKET_BYTES)  # (4)
        self.copies = max(
            [self.copies, *(moments_at_a_time(chain, stages[i], share) for i in samples)]
        )  # (5)
        self.sent: dict[tuple[int, int], float] = {}

    def replay(self, row: tuple[Action, ...]) -> float:
        """(1) to (4); the most at any time."""
        held, peak = 0.0, self.copies
        for action in row:
            stage, index = action.stage, action.micro_batch
            match action.kind:
                case ActionKind.RECEIVE_FORWARD:
                    held += self.given[stage]
                case ActionKind.RECEIVE_BACKWARD:
                    held += self.returned[stage]
                case ActionKind.FORWARD:
                    peak = max(peak, held + self.ahead[stage])
                    held -= sum(
                        self.sent.pop((stage, one), 0.0)
                        for one in self.proofs.get((stage, index), ())
                    )
                    held += self.kept[stage] - self.given[stage] + self.handed[stage]
                case ActionKind.BACKWARD | ActionKind.INPUT_GRADIENT:
                    peak = max(peak, held + self.passing[stage])
                    held += self.sent_back[stage] - self.returned[stage]
                    self.sent[stage, index] = self.sent_back[stage]
                    if action.kind is ActionKind.BACKWARD:
                        held -= self.kept[stage] + self.handed[stage]
                case ActionKind.WEIGHT_GRADIENT:
                    held -= self.kept[stage] + self.handed[stage]
                case ActionKind.SEND_BACKWARD:
                    while len(self.sent) > MOST_GRADIENTS:
                        held -= self.sent.pop(next(iter(self.sent)))
            peak = max(peak, held)
        return self.state + peak
