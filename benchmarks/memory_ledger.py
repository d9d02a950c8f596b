"""Replay the actions of a rank and the bytes that it holds meanwhile.

A rank runs its row of the schedule one action after the other, so the bytes that it holds do not
depend on time. With n samples of a micro-batch, and layers first..end of its stage:

    (1)  a posted receive holds its buffer: n x the output of the layer before, or, for a gradient,
         n x the output of the stage itself
    (2)  a forward keeps n x the layers' activations, including the received input, and the output
         that it sends
    (3)  a backward holds ``cost.memory.passing_bytes`` for a moment, frees (2) and its buffer, and
         leaves the gradient of its input. That is held until it has certainly been sent: until a
         forward arrives that the previous stage ran after it had used the gradient (``runtime.communication.ledger.answered``),
         until many more were sent, or until the end of the step
    (4)  gradients are summed over the replicas, or scattered (ZeRO 1), in buckets, a few of which
         are copies at a time
    (5)  an update holds two pieces of moments for a moment, if they are offloaded; a forward and a
         backward that offload activations hold what is copied at a time (``cost.memory``, (11)),
         and (2) is the stage's input
    (6)  an update on the device holds the temporary bytes of the weights that it updates together:
         ``UPDATED_BYTES`` of moments, or those of the largest layer

``peak_bytes`` adds the state of the weights. It replays the executor and the sum of gradients; it
does not cover a divided sequence.
"""

from __future__ import annotations

from collections.abc import Mapping

from argosy.cost.memory import (
    UPDATED_BYTES,
    activation_bytes,
    copied_at_a_time,
    forward_working_bytes,
    layer_weights,
    moments_at_a_time,
    passing_bytes,
    stage_parameters,
    state_bytes,
)
from argosy.plan.plan import Plan, Stage
from argosy.runtime.communication.ledger import (
    BUCKET_BYTES,
    MOST_BUCKETS,
    MOST_GRADIENTS,
    answered,
    lookahead,
)
from argosy.schedule import Action, ActionKind, build_schedule, with_communication
from argosy.workload.chain import Chain
from argosy.workload.optimizer import OPTIMIZERS


def peak_bytes(plan: Plan, chain: Chain) -> dict[str, float]:
    """Return the most bytes that every device holds at any moment of a step, as the runtime
    executes the plan."""
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


def updated_at_a_time(chain: Chain, stage: Stage, share: float) -> float:
    """Return the temporary bytes (6) of an update whose moments are on the device."""
    cost = OPTIMIZERS[chain.optimizer]
    if stage.offload.optimizer is not None or not cost.temporary_bytes:
        return 0.0
    part = stage.tensor_share(share) / (stage.num_holders if stage.zero else 1)
    layers = chain.layers[stage.first : stage.end]
    largest = part * max(layer_weights(layer, stage.expert) for layer in layers)
    together = max(UPDATED_BYTES / cost.state_bytes, largest)
    return min(part * stage_parameters(chain, stage), together) * cost.temporary_bytes


class _Ledger:
    """A replay of the bytes that one rank holds, action by action."""

    def __init__(
        self,
        plan: Plan,
        chain: Chain,
        samples: Mapping[int, int],
        proofs: Mapping[tuple[int, int], tuple[int, ...]],
        share: float,
    ) -> None:
        """Prepare a replay; ``share`` is the device's share of the work of a tensor-parallel
        group."""
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
        for i in samples:  # (5), (6)
            updating = moments_at_a_time(chain, stages[i], share)
            updating += updated_at_a_time(chain, stages[i], share)
            self.copies = max(self.copies, updating)
        self.sent: dict[tuple[int, int], float] = {}

    def replay(self, row: tuple[Action, ...]) -> float:
        """Replay a row by (1) to (4), and return the most bytes at any time."""
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
                    used = self.proofs.get((stage, index), ())
                    held -= sum(self.sent.pop((stage, earlier), 0.0) for earlier in used)
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
