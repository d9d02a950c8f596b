"""Sum gradients while the last backward of a step still runs.

The weights that the same ranks hold are summed in buckets of fixed content and order, from the last
layer to the first, so that all holders begin them in the same order:

    (1)  bucket b begins once its weights have their gradients of the step's last micro-batch, and
         b - 1 has begun
    (2)  on a GPU gradients are summed in place, tensor by tensor, in one call per bucket; elsewhere
         as one vector, with at most ``MOST_BUCKETS`` in flight
    (3)  when the last backward of the stage is over, the rest begins: a weight without a gradient
         counts as zeros; so does everything else that does not begin by (1)
    (4)  the number of holders that have a gradient of a weight is summed last; if it is zero, the
         weight has no gradient

A host queues the kernels of a backward long before a GPU runs them. So sums that wait until earlier
ones are over, as far as the host can see, would all begin behind the backward; those in place need
no memory, and need not wait.

A bucket that waits for a weight which only this rank has no gradient of begins later than on the
other holders. So (1) needs ranks that send each other nothing else during a backward: with (5), all
that they begin on one communicator is in one order.

    (5)  ranks that share tensors, parts of a sequence or experts of a stage begin by (3), and so do
         regions of weights, whose copies would need memory

A backend that sums on the host's cores (gloo) would take them from the backward, so with it all
buckets begin by (3).
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from argosy.cost.regions import Region, volume
from argosy.runtime.communication.boxes import HeldPart, rows
from argosy.runtime.communication.collectives import Pending
from argosy.runtime.communication.ledger import BUCKET_BYTES, MOST_BUCKETS
from argosy.runtime.processes.world import await_device
from argosy.runtime.stages.parameters import Weight
from argosy.runtime.weights.summing import RingSum, Way

_Item = TypeVar("_Item")


def _ignored(stage: int) -> None:
    del stage


@dataclass(frozen=True, kw_only=True)
class GradientEvents:
    """Callbacks that are called with the stage as its gradients add up."""

    added: Callable[[int], None] = _ignored
    """Called after a micro-batch."""
    before_last: Callable[[int], None] = _ignored
    """Called before the last backward of a step, if torch computes all weight gradients in it."""
    after_last: Callable[[int], None] = _ignored


class KeptFlags:
    """Numbers that state which weights have a gradient.

    They are kept, because copying them to a GPU makes the host wait for it.
    """

    def __init__(self) -> None:
        self.kept: dict[tuple[tuple[bool, ...], torch.dtype], Tensor] = {}

    def at(self, flags: tuple[bool, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return flags as numbers on a device, which is always the same one."""
        if (flags, dtype) not in self.kept:
            self.kept[flags, dtype] = torch.tensor(flags, dtype=dtype, device=device)
        return self.kept[flags, dtype]


class Summand(NamedTuple):
    """A weight whose gradient several ranks sum: all that this rank holds of it, or regions of
    it."""

    weight: Weight
    regions: Sequence[Region] | None = None
    """Regions of the whole weight; None for everything that this rank holds."""

    @property
    def parameter(self) -> nn.Parameter:
        return self.weight.parameter

    def size(self) -> tuple[int, torch.dtype]:
        """Return the number of elements, equal on all ranks that sum them, and their dtype."""
        elements = self.parameter.numel() if self.regions is None else int(volume(self.regions))
        return elements, self.parameter.dtype

    def of(self, tensor: Tensor) -> list[Tensor]:
        """Return the regions as views of a tensor of what this rank holds."""
        if self.regions is None:
            return [tensor]
        boxes = rows(0, self.weight.shape) if self.weight.boxes is None else self.weight.boxes
        return [HeldPart(tensor, boxes).at(region) for region in self.regions]

    def gradients(self) -> list[Tensor]:
        """Return views of the present gradient."""
        assert self.parameter.grad is not None
        return self.of(self.parameter.grad)


class EarlyBuckets:
    """Begins buckets of weights during the last backward of a stage, by (1) and (3)."""

    def __init__(
        self,
        stage: int,
        buckets: Sequence[Sequence[nn.Parameter]],
        begins: Sequence[Callable[[], object]],
        *,
        is_early: bool,
    ) -> None:
        """Prepare for ``begins`` to be called, one for each bucket, in order; without ``is_early``
        only by ``begin_rest``."""
        self.stage, self.begins, self.is_early = stage, begins, is_early
        self.buckets = [frozenset(bucket) for bucket in buckets]
        self.begun = 0
        self.missing: set[Tensor] | None = None
        """Weights that do not have their last gradient yet; None before the last backward."""
        weights = [weight for bucket in buckets for weight in bucket] if is_early else []
        self.hooks = [
            weight.register_post_accumulate_grad_hook(self._arrived) for weight in weights
        ]

    def close(self) -> None:
        """Remove the hooks from the weights."""
        for hook in self.hooks:
            hook.remove()

    def before_last_backward(self, stage: int) -> None:
        if self.is_early and stage == self.stage:
            self.missing = set(itertools.chain.from_iterable(self.buckets))

    def after_last_backward(self, stage: int) -> None:
        if self.is_early and stage == self.stage:
            self.begin_rest()

    def _arrived(self, weight: Tensor) -> None:
        """Begin buckets whose gradients are complete, by (1)."""
        if self.missing is None:
            return
        self.missing.discard(weight)
        while self.begun < len(self.buckets) and self.missing.isdisjoint(self.buckets[self.begun]):
            self._begin()

    def _begin(self) -> None:
        self.begun += 1
        self.begins[self.begun - 1]()

    def begin_rest(self) -> None:
        """Begin all remaining buckets (3)."""
        while self.begun < len(self.buckets):
            self._begin()

    def reset(self) -> None:
        """Prepare for the next step."""
        self.begun, self.missing = 0, None


class _Bucket(NamedTuple):
    """Gradients that are being summed together."""

    gradients: list[Tensor]
    summed: Sequence[Tensor]
    """The gradients themselves, or copies that are summed instead."""
    pending: Pending


class GradientSum:
    """The sum over the ranks that hold the same weights, of the gradients of these weights."""

    def __init__(
        self,
        way: Way,
        summands: Sequence[Summand],
        filled: set[Tensor],
        *,
        on_device: RingSum | None = None,
        is_early: bool = False,
    ) -> None:
        """Prepare a sum.

        ``on_device`` is the way if it sums on a GPU, in place. ``is_early`` makes the sum begin
        during the last backward of the weights' only stage. ``filled`` holds the weights whose
        gradients a sum of this rank has filled with zeros in this step.
        """
        self.way, self.on_device = way, on_device
        self.filled = filled
        trained = [summand for summand in summands if summand.parameter.requires_grad]
        self.parameters = [summand.parameter for summand in trained]
        buckets = in_buckets(trained[::-1], Summand.size)
        weights = [[summand.parameter for summand in bucket] for bucket in buckets]
        stage = summands[0].weight.stages[0]
        begins = [functools.partial(self._begin, bucket) for bucket in buckets]
        self.order = EarlyBuckets(stage, weights, begins, is_early=is_early)
        self.flags = KeptFlags()
        self.known: Tensor | None = None
        """For each weight, whether this rank has a gradient of it; None until all buckets have
        begun."""
        self.under_way: deque[_Bucket] = deque()

    def close(self) -> None:
        """Remove the hooks of this sum from the weights."""
        self.order.close()

    def before_last_backward(self, stage: int) -> None:
        self.order.before_last_backward(stage)

    def after_last_backward(self, stage: int) -> None:
        if self.order.is_early and stage == self.order.stage and self.parameters:
            self._begin_rest()

    def _begin(self, bucket: Sequence[Summand]) -> None:
        gradients = [gradient for summand in bucket for gradient in summand.gradients()]
        if self.on_device is not None:
            # All holders send the same tensors, also if only some of them have one in pieces.
            summed = [gradient.contiguous() for gradient in gradients]
            if not self.order.is_early and len(self.under_way) == MOST_BUCKETS:
                self._finish_oldest()
            self.under_way.append(_Bucket(gradients, summed, self.on_device.begin_each(summed)))
            return
        if len(self.under_way) == MOST_BUCKETS:
            self._finish_oldest()
        total = _flatten_dense_tensors(gradients)
        parts = _unflatten_dense_tensors(total, gradients)
        self.under_way.append(_Bucket(gradients, parts, self.way.begin(total)))

    def _finish_oldest(self) -> None:
        bucket = self.under_way.popleft()
        bucket.pending.wait()
        for gradient, total in zip(bucket.gradients, bucket.summed, strict=True):
            if total is not gradient:
                gradient.copy_(total)

    def _begin_rest(self) -> None:
        """Begin all remaining buckets (3)."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
                self.filled.add(parameter)
        flags = tuple(parameter not in self.filled for parameter in self.parameters)
        self.order.begin_rest()
        self.known = self.flags.at(flags, self.parameters[0].device, torch.float32).clone()

    def finish(self) -> None:
        """Wait for all sums, and remove gradients that no holder has (4)."""
        if not self.parameters:
            return
        if self.known is None:
            self._begin_rest()
        assert self.known is not None
        counting = self.way.begin(self.known)
        while self.under_way:
            self._finish_oldest()
        counting.wait()
        await_device(self.known.device, "while gradients were summed")
        for parameter, holders in zip(self.parameters, self.known.tolist(), strict=True):
            if not holders:
                parameter.grad = None
        self.known = None
        self.order.reset()


def in_buckets(
    things: Sequence[_Item], size_of: Callable[[_Item], tuple[int, torch.dtype]]
) -> list[list[_Item]]:
    """Divide items into buckets of one dtype, in order, with at most ``BUCKET_BYTES`` each;
    ``size_of`` returns the number of elements and the dtype of an item."""
    buckets: list[list[_Item]] = []
    space, before = 0, None
    for item in things:
        elements, dtype = size_of(item)
        size = elements * dtype.itemsize
        if size > space or dtype != before:
            buckets.append([])
            space, before = BUCKET_BYTES, dtype
        buckets[-1].append(item)
        space -= size
    return buckets
