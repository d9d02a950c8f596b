"""Measure a model's layers one by one: seconds, bytes and FLOP, as a profile to plan with.

    (1)  forward, backward   seconds over repeated runs (``timing``), for each number of samples:
                             the mean on a CPU, whose time other work may share, the median on a GPU
    (2)  activation bytes    distinct storages that autograd keeps of the forward, without weights,
                             and its input; not its output, which is the next layer's input
    (3)  output bytes        of what the layer sends on
    (4)  FLOP                of its matrix products and attention, counted by torch
    (5)  working bytes       the most that its backward holds beyond (2) and the gradient of its
                             output, with the gradients of its weights already allocated

Each layer runs as a stage of its own (``stage.LayerStage``), on the output of the previous layer,
so that the figures include loss, labels and everything else that a model computes around its
layers. Layers of one class with the same weights and position (first, last, between) are measured
once. On a GPU up to ``BLOCKS`` neighbours of one kind are one stage for (1), because they hide each
other's launches. Of compiled layers (1) is measured; (2) to (5) are those of the eager ones, of
which compiled stages keep no more.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.flop_counter import FlopCounterMode

from argosy.dtype import Dtype
from argosy.errors import bad_input
from argosy.measure.allocated import Allocations
from argosy.measure.stack import BLOCKS
from argosy.measure.timing import Between, typical_seconds
from argosy.plan.plan import Recompute
from argosy.runtime.job.program import load_program
from argosy.runtime.sources.recipe import autocast_for
from argosy.runtime.stages.layers import find_layers
from argosy.runtime.stages.moment import Moment
from argosy.runtime.stages.stage import LayerStage, LossFunction
from argosy.runtime.stages.weighing import PartLoss
from argosy.units import counted
from argosy.workload.chain import Frozen, Layer
from argosy.workload.profile import Profile, ProfileRow

Report = Callable[[str], None]
"""A function that is called with what is measured next."""
Save = Callable[[Profile], None]
"""A function that is called with the profile so far, after every measurement."""


@dataclass(frozen=True, kw_only=True)
class _Amounts:
    forward_flop: float
    backward_flop: float
    activation_bytes: float
    output_bytes: float
    working_bytes: float
    forward_bytes: float = 0.0
    """Bytes held for a moment in a forward that keeps nothing, including its input and output."""


@dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    """The settings that a measurement has, and the functions that follow it."""

    name: str
    """The name of the model in the profile."""
    kind: str
    """The name of this process's device in the profile."""
    samples: Sequence[int] = (1, 2, 4, 8)
    dtype: Dtype = Dtype.FP32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seconds: float = 0.3
    """Seconds of repeated runs per measurement."""
    sequence_length: int = 1
    known: Sequence[ProfileRow] = ()
    """Rows that are not measured again."""
    is_compiled: bool = False
    report: Report = lambda what: None
    save: Save = lambda profile: None

    def profile(self, rows: Iterable[ProfileRow]) -> Profile:
        """Return a profile of rows."""
        return Profile(
            device=self.kind,
            model=self.name,
            rows=tuple(rows),
            sequence_length=self.sequence_length,
            measured=software(),
            compiled=self.is_compiled,
        )


def profile_program(program: str, settings: ProfileSettings) -> Profile:
    """Return the profile of a user's ``file.py:build`` on this process's card, or its CPU."""
    model, loss_fn, batch = load_program(program).build()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return profile_model(model, loss_fn, batch, replace(settings, device=device))


def own_kind() -> str:
    """Return the name of this process's device."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU-core"


def software() -> str:
    """Return date, device and versions of a measurement, for ``Profile.measured``."""
    cuda = f", CUDA {torch.version.cuda}" if torch.cuda.is_available() else ""
    return f"{time.strftime('%Y-%m-%d')} on {own_kind()} with torch {torch.__version__}{cuda}"


def profile_model(
    model: nn.Module, loss_fn: LossFunction, batch: Any, settings: ProfileSettings
) -> Profile:
    """Measure (1) to (5) of every layer on this process's device."""
    device, samples = settings.device, settings.samples
    layers = find_layers(model.to(device))
    _check_samples(samples, batch)
    kinds = _kinds(layers)
    widths = [
        _run_length(kinds, index) if device.type == "cuda" else 1 for index in range(len(layers))
    ]
    eager = replace(settings, is_compiled=False)
    stages = _stages(model, layers, loss_fn, [1] * len(layers), eager)
    timed = _stages(model, layers, loss_fn, widths, settings)
    rows = {
        (row.layer, row.micro_batch): row for row in settings.known if row.dtype is settings.dtype
    }
    total = len(set(kinds)) * len(set(samples))
    amounts: list[_Amounts] = []
    working: dict[str, float] = {}
    for count in sorted(set(samples)):
        part = _first_samples(batch, count, device)
        carry: Any = None
        last = count == max(samples)
        for index, stage in enumerate(stages):
            kind = kinds[index]
            if (kind, count) not in rows:
                settings.report(
                    f"layer{index} with {counted(count, 'sample')}, {len(rows) + 1} of {total}"
                )
                rows[kind, count] = _row(kind, timed[index], carry, part, count, settings)
                settings.save(settings.profile(rows.values()))
            if last:
                if kind not in working:
                    working[kind] = _working(stage, carry, part, device) / count
                amounts.append(_amounts(stage, carry, part, count, working[kind]))
            carry = _detached(_run(stage, _detached(carry), part))
    layer_sizes = tuple(_layers(layers, kinds, amounts))
    return replace(settings.profile(rows.values()), layers=layer_sizes)


def _stages(
    model: nn.Module,
    layers: Sequence[nn.Module],
    loss_fn: LossFunction,
    widths: Sequence[int],
    settings: ProfileSettings,
) -> list[LayerStage]:
    """Return the stage that begins at each layer, with as many layers as ``widths`` gives."""
    return [
        LayerStage(
            model,
            layers,
            loss_fn,
            first=index,
            end=index + width,
            recompute=Recompute.NONE,
            autocast=autocast_for(settings.dtype, model.parameters()),
            device=settings.device,
            is_compiled=settings.is_compiled,
        )
        for index, width in enumerate(widths)
    ]


def _check_samples(samples: Sequence[int], batch: Any) -> None:
    most = min((len(leaf) for leaf in _tensors(batch)), default=0)
    if not samples or min(samples) < 1 or max(samples) > most:
        expected = f"numbers of samples from 1 to {most}, the size of the batch"
        raise bad_input(expected, str(list(samples)), "samples")


def _kinds(layers: Sequence[nn.Module]) -> list[str]:
    """Return a name for every layer that equal ones share: ``Block``, or ``Block-2`` for the second
    kind of that class."""
    known: dict[tuple[object, ...], str] = {}
    names = []
    needed = _trains_all(
        layers
    )  # True if the input of a layer needs a gradient, as behind a trained layer
    for index, layer in enumerate(layers):
        shapes = tuple(
            (tuple(parameter.shape), parameter.requires_grad) for parameter in layer.parameters()
        )
        place = "first" if index == 0 else "last" if index == len(layers) - 1 else "between"
        key = (
            type(layer),
            shapes,
            place,
            needed,
            0 if shapes else index,
        )  # without weights, shapes do not distinguish layers
        needed = needed or any(is_trained for _, is_trained in shapes)
        if key not in known:
            number = 1 + sum(known_key[0] is type(layer) for known_key in known)
            known[key] = type(layer).__name__ + (f"-{number}" if number > 1 else "")
        names.append(known[key])
    return names


def _run_length(kinds: Sequence[str], index: int) -> int:
    """Return how many layers of one kind follow one another from here, at most ``BLOCKS``.

    >>> _run_length(["Embedding", "Block", "Block", "Head"], 1)
    2
    """
    return len(
        list(itertools.takewhile(lambda kind: kind == kinds[index], kinds[index : index + BLOCKS]))
    )


def _trains_all(layers: Sequence[nn.Module]) -> bool:
    return all(parameter.requires_grad for layer in layers for parameter in layer.parameters())


def _row(
    kind: str, stage: LayerStage, carry: Any, part: Any, count: int, settings: ProfileSettings
) -> ProfileRow:
    """Measure one of a stage's equal layers by (1), and the memory of all if it is counted."""
    device = settings.device
    run = functools.partial(_forward_and_backward, stage, carry, part)
    for _ in range(3 if stage.is_compiled else 1):  # the first is eager, the second compiles
        run(lambda: None)
    before = _memory(device, reset=True)
    forward, backward = (
        taken / stage.num_layers for taken in typical_seconds(run, device, settings.seconds)
    )
    peak = _memory(device, reset=False)
    for module in stage.layers:
        module.zero_grad(set_to_none=True)
    return ProfileRow(
        layer=kind,
        micro_batch=count,
        tensor_width=1,
        dtype=settings.dtype,
        forward_seconds=forward,
        backward_seconds=backward,
        peak_bytes=None if peak is None or before is None else peak - before,
    )


def _memory(device: torch.device, *, reset: bool) -> float | None:
    if device.type != "cuda":
        return None
    if reset:
        torch.cuda.reset_peak_memory_stats(device)
    return float(torch.cuda.max_memory_allocated(device))


def _run(stage: LayerStage, carry: Any, part: Any) -> Any:
    """Return what a stage sends to the next one, or its loss."""
    made = stage(carry, part, Moment(0, 0, len(_tensors(part)[0])))
    return made.loss if isinstance(made, PartLoss) else made


def _forward_and_backward(stage: LayerStage, carry: Any, part: Any, between: Between) -> None:
    result = _run(stage, _detached(carry), part)
    between()
    outputs = _differentiable(result)
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(leaf) for leaf in outputs])


def _differentiable(result: Any) -> list[Tensor]:
    """The tensors of a result that a backward begins with."""
    return [leaf for leaf in _tensors(result) if leaf.requires_grad]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _detached(carry: Any) -> Any:
    def fresh(leaf: Any) -> Any:
        return (
            leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
        )

    return tree_map(fresh, carry)


def _working(stage: LayerStage, carry: Any, part: Any, device: torch.device) -> float:
    """Return (5) in bytes for all samples."""

    def run(allocations: Allocations | None) -> None:
        result = _run(stage, _detached(carry), part)
        outputs = _differentiable(result)
        given = [torch.ones_like(leaf) for leaf in outputs]
        del result
        if allocations is not None:
            allocations.mark()
        if outputs:
            torch.autograd.backward(outputs, given)

    run(None)  # allocates the gradients of the weights
    with Allocations(device) as allocations:
        run(allocations)
    for module in stage.layers:
        module.zero_grad(set_to_none=True)
    backward = allocations.segments[-1]
    return backward.peak - backward.start


def _amounts(stage: LayerStage, carry: Any, part: Any, count: int, working: float) -> _Amounts:
    """Return (2) to (4) per sample."""
    weights = {p.untyped_storage().data_ptr() for layer in stage.layers for p in layer.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    inputs = _detached(carry)
    for leaf in _tensors(inputs):
        keep(leaf)
    given = set(kept)
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        FlopCounterMode(display=False) as flop,
    ):
        result = _run(stage, inputs, part)
    backward_flop = 2.0 * flop.get_total_flops()
    if not _trains_all(stage.layers):
        backward_flop = _backward_flop(stage, result)
    handed = _tensors(result)
    for leaf in (
        handed if not stage.is_last else ()
    ):  # counted as the next layer's input or as output
        if leaf.untyped_storage().data_ptr() not in given:
            kept.pop(leaf.untyped_storage().data_ptr(), None)
    return _Amounts(
        forward_flop=flop.get_total_flops() / count,
        backward_flop=backward_flop / count,
        activation_bytes=sum(kept.values()) / count,
        output_bytes=0.0
        if stage.is_last
        else sum(leaf.numel() * leaf.element_size() for leaf in handed) / count,
        working_bytes=working,
        forward_bytes=0.0 if _differentiable(result) else _forward_bytes(stage, carry, part, count),
    )


def _forward_bytes(stage: LayerStage, carry: Any, part: Any, count: int) -> float:
    """Return the most bytes per sample that a forward which keeps nothing holds, including its
    input and output."""
    inputs = _detached(carry)
    size = sum(leaf.untyped_storage().nbytes() for leaf in _tensors(inputs))
    with Allocations(stage.device) as allocations:
        _run(stage, inputs, part)
    return (allocations.segments[-1].peak + size) / count


def _backward_flop(stage: LayerStage, result: Any) -> float:
    """Return the FLOP of the backward of a layer with frozen weights."""
    outputs = _differentiable(result)
    with FlopCounterMode(display=False) as flop:
        if outputs:
            torch.autograd.backward(
                outputs, [torch.ones_like(leaf) for leaf in outputs], retain_graph=True
            )
    for module in stage.layers:
        module.zero_grad(set_to_none=True)
    return float(flop.get_total_flops())


def _layers(
    layers: Sequence[nn.Module], kinds: Sequence[str], amounts: Sequence[_Amounts]
) -> list[Layer]:
    """Return the chain's layers; a weight that an earlier layer already has is tied to it."""
    home: dict[int, int] = {}
    built = []
    has_backward = _trains_all(layers)
    for index, (layer, kind, amount) in enumerate(zip(layers, kinds, amounts, strict=True)):
        own = tied = still = still_bytes = still_tied = 0
        partner = None
        for parameter in layer.parameters():
            is_own = (first := home.setdefault(id(parameter), index)) == index
            partner = partner if is_own else first
            size, trained = parameter.numel(), parameter.requires_grad
            own += size if is_own and trained else 0
            tied += size if not is_own and trained else 0
            still += size if is_own and not trained else 0
            still_bytes += size * parameter.element_size() if is_own and not trained else 0
            still_tied += size * parameter.element_size() if not is_own and not trained else 0
        has_backward = has_backward or own > 0 or tied > 0
        frozen = None
        if still or still_tied or not has_backward:
            frozen = Frozen(
                parameters=still,
                bytes=float(still_bytes),
                tied_bytes=float(still_tied),
                forward_bytes=0.0 if has_backward else amount.forward_bytes,
                has_backward=has_backward,
            )
        built.append(
            Layer(
                name=f"layer{index}",
                kind=kind,
                forward_flop=float(amount.forward_flop),
                backward_flop=amount.backward_flop if has_backward else 0.0,
                parameters=own,
                activation_bytes=amount.activation_bytes if has_backward else 0.0,
                output_bytes=amount.output_bytes,
                working_bytes=amount.working_bytes,
                tied_to=partner,
                tied_parameters=tied,
                frozen=frozen,
            )
        )
    return built


def _first_samples(batch: Any, count: int, device: torch.device) -> Any:
    """Return a batch with the first ``count`` samples of every tensor, on ``device``."""
    return tree_map(
        lambda leaf: leaf[:count].to(device) if isinstance(leaf, Tensor) else leaf, batch
    )
