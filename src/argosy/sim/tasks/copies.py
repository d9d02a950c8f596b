"""Add copies between devices and the memory or drive of their node as tasks.

These are (1) to (6) of ``cost.offload``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from argosy.cost.memory import moments_at_a_time
from argosy.cost.offload import Copy, action_copies, update_copies
from argosy.schedule import Action, ActionKind
from argosy.sim.engine.graph import PLACES, Flow, Task
from argosy.timeline import SpanKind

if TYPE_CHECKING:
    from argosy.sim.tasks.compile import Compiler


Held = tuple[tuple[int, float], ...]
"""Devices, and the bytes that each holds."""


class HostCopies:
    """A helper that adds copies to the tasks of a compiler."""

    def __init__(self, compiler: Compiler) -> None:
        self.compiler = compiler
        self.known: dict[tuple[int, int, int, bool], tuple[Flow, ...]] = {}

    def beside_action(
        self, action: Action, position: int, member: int, after: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Add the copies of one device's part of an action, which begin with it; return their
        tasks."""
        if action.kind is ActionKind.WEIGHT_GRADIENT:
            return ()
        compiler, backward = self.compiler, action.kind is not ActionKind.FORWARD
        stage = compiler.plan.stages[action.stage]
        replica = stage.replicas[position]
        device = compiler.index[replica.devices[member]]
        key = (action.stage, position, member, backward)
        if key not in self.known:
            share = replica.shares[member]
            copies = action_copies(compiler.chain, stage, replica.samples, share, backward=backward)
            self.known[key] = tuple(_flows(device, copies))
        if not self.known[key]:
            return ()
        task = compiler.add(
            Task(
                kind=SpanKind.COPY,
                flows=self.known[key],
                beside=True,
                after=after,
                stage=action.stage,
                micro_batch=action.micro_batch,
            )
        )
        if not after:
            compiler.unanchored.append((task, [device]))
        return (task,)

    def before_update(self, device: int, after: tuple[int, ...]) -> tuple[tuple[int, ...], Held]:
        """Add the copies of a device's update.

        Returns the tasks that the update waits for, and the memory that it frees.
        """
        compiler, flows, held = self.compiler, list[Flow](), 0.0
        name = compiler.names[device]
        for stage in compiler.plan.stages:
            for replica in stage.replicas if stage.offload else ():
                if name in replica.devices:
                    share = replica.shares[replica.devices.index(name)]
                    flows += _flows(device, update_copies(compiler.chain, stage, share))
                    held = max(held, moments_at_a_time(compiler.chain, stage, share))
        if not flows:
            return after, ()
        takes: Held = ((device, held),) if held else ()
        task = compiler.add(
            Task(kind=SpanKind.COPY, flows=tuple(flows), beside=True, after=after, takes=takes)
        )
        return (task,), takes


def _flows(device: int, copies: Iterable[Copy]) -> list[Flow]:
    """Return the flows of copies between a device and its node's storage."""
    flows = []
    for copy in copies:
        place = PLACES[copy.tier]
        flows += [Flow(device, place, copy.out)] if copy.out else []
        flows += [Flow(place, device, copy.into)] if copy.into else []
    return flows
