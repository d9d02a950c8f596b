"""Label the indices that an operation's tensors share, for operations whose labels depend on their
arguments.

A ``Pattern`` gives every dim of every tensor a label; dims with the same label are the same index,
and an index may be split if every tensor that has it is split in the same way. ``""`` marks a dim
that cannot be split. Each function here reads a node's arguments and shapes and returns its
pattern; ``space/operations/rules.py`` turns patterns into rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from typing import Any

from argosy.space.operations.sharding import Shape
from argosy.workload.graph import GraphNode

# One label per dim of a tensor; ``""`` if the dim cannot be split.
Labels = tuple[str, ...]
BY_ROWS = "by rows"
"""The implementation that looks up only those rows of a table, or log-probabilities of only those
classes, that a device holds."""
BY_CLASSES = "by classes"
"""The implementation that normalises over the classes of all devices, whose sums it exchanges."""


@dataclass(frozen=True)
class Pattern:
    """Labels of each tensor that an operation has, and further conditions of a split."""

    inputs: tuple[Labels, ...]
    outputs: tuple[Labels, ...]
    _: KW_ONLY
    linear: tuple[frozenset[int], ...] = ()
    additive: frozenset[int] = frozenset()
    whole: frozenset[tuple[str, int]] = frozenset()
    stretched: Mapping[tuple[int, str], int] | None = None
    """(tensor, inputs first; label): the dim holds this many copies of the label one after another
    (parts of a split or cat)."""
    local: Mapping[str, str] = field(default_factory=dict)
    """Labels that are split by an implementation of their own, and its name."""


@dataclass(frozen=True, kw_only=True)
class OperationCall:
    """A node together with the shapes of its tensors."""

    node: GraphNode
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    entry: Mapping[str, Any]

    def argument(self, place: int, default: Any = None) -> Any:
        return self.node.arguments[place] if place < len(self.node.arguments) else default

    def whole_inputs(self, first: int) -> tuple[Labels, ...]:
        """Return no label for every dim of the inputs from the first one on."""
        return tuple(("",) * len(shape) for shape in self.inputs[first:])

    @property
    def rank(self) -> int:
        return len(self.inputs[0])


def letters(rank: int) -> Labels:
    return tuple(f"i{dim}" for dim in range(rank))


def _blocked(labels: Labels, dims: Sequence[int]) -> Labels:
    gone = {dim % len(labels) for dim in dims} if labels else set()
    return tuple("" if dim in gone else label for dim, label in enumerate(labels))


def _without(labels: Labels, dims: Sequence[int]) -> Labels:
    gone = {dim % len(labels) for dim in dims}
    return tuple(label for dim, label in enumerate(labels) if dim not in gone)


def _broadcast(labels: Labels, whole: Shape, shape: Shape) -> Labels:
    """Return the labels of an operand that is broadcast to a shape; a dim that is expanded gets
    none."""
    tail = labels[len(labels) - len(shape) :]
    sizes = whole[len(whole) - len(shape) :]
    return tuple(
        label if size == own else "" for label, size, own in zip(tail, sizes, shape, strict=True)
    )


def pointwise(call: OperationCall) -> Pattern:
    (out,) = call.outputs
    labels = letters(len(out))
    return Pattern(tuple(_broadcast(labels, out, shape) for shape in call.inputs), (labels,))


def addmm(call: OperationCall) -> Pattern:
    bias = _broadcast(("m", "n"), call.outputs[0], call.inputs[0])
    return Pattern((bias, ("m", "k"), ("k", "n")), (("m", "n"),))


def convolution(call: OperationCall) -> Pattern:
    transposed, groups = call.argument(6), call.argument(8)
    space = ("",) * (call.rank - 2)
    i, o = ("c", "o") if groups == 1 else ("", "")
    weight = (i, o) if transposed else (o, i)
    bias = ((o,),) if len(call.inputs) == 3 else ()
    return Pattern((("n", i, *space), (*weight, *space), *bias), (("n", o, *space),))


def convolution_backward(call: OperationCall) -> Pattern:
    transposed, groups = call.argument(7), call.argument(9)
    space = ("",) * (call.rank - 2)
    i, o = ("c", "o") if groups == 1 else ("", "")
    weight = (*((i, o) if transposed else (o, i)), *space)
    x = ("n", i, *space)
    return Pattern((("n", o, *space), x, weight), (x, weight, (o,)))


def attention(call: OperationCall) -> Pattern:
    """Split samples and heads.

    A key head that several query heads read goes with them: a cut has as many units as there are
    key heads, or fewer.
    """
    shapes, whole = [*call.inputs, *call.outputs], call.inputs[0]
    heads = {shape[1] for shape in call.inputs if len(shape) > 2} - {1}
    h = "h" if len(heads) <= 1 or max(heads) % min(heads) == 0 else ""

    def labels(shape: Shape) -> Labels:
        if len(shape) == 2:  # an attention mask of positions alone
            return ("", "")
        return (
            "b" if shape[0] == whole[0] else "",
            h if shape[1] in heads else "",
            *[""] * (len(shape) - 2),
        )

    all_labels = [labels(shape) for shape in shapes]
    return Pattern(tuple(all_labels[: len(call.inputs)]), tuple(all_labels[len(call.inputs) :]))


def _looked_up(call: OperationCall, scaled: int) -> tuple[Labels, Labels]:
    """Return the labels of a table and of the positions that are looked up; only columns are cut if
    gradients are divided by how often a row occurs, which is argument ``scaled``."""
    places = letters(len(call.inputs[1]))
    return (("", "d"), ("",) * len(places)) if call.argument(scaled) else (("v", "d"), places)


def embedding(call: OperationCall) -> Pattern:
    rows, places = _looked_up(call, 3)
    return Pattern((rows, places), ((*places, "d"),), local={"v": BY_ROWS})


def embedding_backward(call: OperationCall) -> Pattern:
    rows, places = _looked_up(call, 4)
    return Pattern(((*places, "d"), places), (rows,), local={"v": BY_ROWS})


def called(call: OperationCall) -> Pattern:
    """Split what the call of a module lists: samples, tokens, or whole experts, for which the
    results of a device's own experts are partial sums."""
    labels = call.argument(-2)
    return parsed(labels)


@cache
def parsed(text: str) -> Pattern:
    """Return a pattern that is written as a letter for each dim, inputs then results.

    >>> parsed("mk,k.->m").outputs
    (('m',),)
    """
    left, right = text.split("->")

    def side(part: str) -> tuple[tuple[str, ...], ...]:
        return tuple(
            tuple("" if letter == "." else letter for letter in word) for word in part.split(",")
        )

    return Pattern(side(left), side(right))


def _index_labels(call: OperationCall, indices: Any) -> tuple[Labels, list[Labels], Labels]:
    """Return the labels of the indexed tensor, of the index tensors, and of the result."""
    at = [dim for dim, index in enumerate(indices) if index is not None]
    shapes = call.inputs[1 : 1 + len(at)]
    depth = max(len(shape) for shape in shapes)
    joint = tuple(
        max((s[i - depth] for s in shapes if len(s) >= depth - i), default=1) for i in range(depth)
    )
    names = tuple(f"j{place}" for place in range(depth))
    source = _blocked(letters(call.rank), at)
    adjacent = at == list(range(at[0], at[-1] + 1))
    rest = tuple(label for dim, label in enumerate(source) if dim not in at)
    before = at[0] if adjacent else 0
    return (
        source,
        [_broadcast(names, joint, shape) for shape in shapes],
        (*rest[:before], *names, *rest[before:]),
    )


def index(call: OperationCall) -> Pattern:
    source, places, result = _index_labels(call, call.argument(1))
    return Pattern((source, *places), (result,))


def index_put(call: OperationCall) -> Pattern:
    """Split over the added values if the operation accumulates; overwriting cannot be split."""
    source, places, result = _index_labels(call, call.argument(1))
    if not call.argument(3, False):
        places = [("",) * len(p) for p in places]
        result = tuple("" if x.startswith("j") else x for x in result)
    shape = call.inputs[-1]
    values = (
        tuple(result[len(result) - len(shape) :])
        if len(shape) == len(result)
        else ("",) * len(shape)
    )
    if len(shape) != len(result):
        source = ("",) * len(source)
    return Pattern((source, *places, values), (source,))


def gather(call: OperationCall) -> Pattern:
    source, places = call.inputs
    dim = call.argument(1) % max(len(source), 1)
    result = letters(len(places))
    same = tuple(x if source[d] == places[d] and d != dim else "" for d, x in enumerate(result))
    outside = tuple(x if d == dim or same[d] else "" for d, x in enumerate(result))
    return Pattern((same, outside), (outside,))


def scatter(call: OperationCall) -> Pattern:
    whole = call.inputs[0]
    dim = call.argument(1) % max(len(whole), 1)
    equal = [
        all(shape[d] == whole[d] for shape in call.inputs) and d != dim for d in range(len(whole))
    ]
    labels = tuple(
        label if same else "" for label, same in zip(letters(len(whole)), equal, strict=True)
    )
    return Pattern((labels,) * len(call.inputs), (labels,))


def along(call: OperationCall) -> Pattern:
    """Keep one dim whole; results have the operand's rank."""
    labels = _blocked(letters(call.rank), [call.argument(call.entry["dim"], -1)])
    return Pattern((labels,) * len(call.inputs), (labels,) * len(call.outputs))


def leading(call: OperationCall) -> Pattern:
    labels = _blocked(letters(call.rank), [-1, -2])
    return Pattern((labels,), (labels,))


def _reduced_dims(call: OperationCall, place: int) -> list[int]:
    dims = call.argument(place)
    dims = [dims] if isinstance(dims, int) else list(dims or range(call.rank))
    return [dim % call.rank for dim in dims] if call.rank else []


def sum(call: OperationCall) -> Pattern:  # noqa: A001 (named as the operation is)
    """Split also dims that are summed over: the result is then a partial sum."""
    dims = _reduced_dims(call, 1)
    labels = letters(call.rank)
    kept = len(call.outputs[0]) == call.rank
    return Pattern((labels,), (_blocked(labels, dims) if kept else _without(labels, dims),))


def folded(call: OperationCall) -> Pattern:
    """Keep the reduced dims whole, for reductions that are not sums."""
    dims = _reduced_dims(call, call.entry["dim"])
    labels = _blocked(letters(call.rank), dims)
    kept = len(call.outputs[0]) == call.rank
    out = labels if kept else _without(labels, dims)
    return Pattern((labels,), (out,) * len(call.outputs))


def layer_norm(call: OperationCall) -> Pattern:
    lead = call.rank - len(call.argument(1))
    labels = tuple(label if dim < lead else "" for dim, label in enumerate(letters(call.rank)))
    plain = call.whole_inputs(1)
    return Pattern((labels, *plain), (labels, labels, labels))


def layer_norm_backward(call: OperationCall) -> Pattern:
    lead = call.rank - len(call.argument(2))
    labels = tuple(label if dim < lead else "" for dim, label in enumerate(letters(call.rank)))
    plain = call.whole_inputs(4)
    feature = ("",) * (call.rank - lead)
    return Pattern((labels,) * 4 + plain, (labels, feature, feature))


def group_norm(call: OperationCall) -> Pattern:
    x = ("n", *[""] * (call.rank - 1))
    plain = call.whole_inputs(1)
    return Pattern((x, *plain), (x, ("n", ""), ("n", "")))


def group_norm_backward(call: OperationCall) -> Pattern:
    x = ("n", *[""] * (call.rank - 1))
    plain = call.whole_inputs(4)
    return Pattern((x, x, ("n", ""), ("n", ""), *plain), (x, ("",), ("",)))


def nll_loss(call: OperationCall) -> Pattern:
    """Sum over samples, positions and classes, or over classes alone for one loss of each position;
    weights of classes stay whole."""
    target = letters(len(call.inputs[1]))
    x = (target[0], "c", *target[1:]) if target else ("c",)
    weight = (("",),) * (len(call.inputs) - 2)
    result = () if call.argument(3) != 0 else target
    return Pattern((x, target, *weight), (result, ()), local={"c": BY_ROWS})


def nll_loss_backward(call: OperationCall) -> Pattern:
    target = letters(len(call.inputs[2]))
    x = (target[0], "c", *target[1:]) if target else ("c",)
    weight = (("",),) * (len(call.inputs) - 4)
    grad = target if call.inputs[0] else ()
    return Pattern((grad, x, target, *weight, ()), (x,), local={"c": BY_ROWS})


def log_softmax(call: OperationCall) -> Pattern:
    """Split classes too: devices exchange one number for each position, in the backward also."""
    labels = letters(call.rank)
    classes = labels[call.argument(call.entry["dim"])] if labels else ""
    return Pattern((labels,) * len(call.inputs), (labels,), local={classes: BY_CLASSES})


def permute(call: OperationCall) -> Pattern:
    labels = letters(call.rank)
    order = list(range(call.rank))
    if call.node.op == "aten.permute.default":
        order = [dim % call.rank for dim in call.argument(1)]
    elif call.rank > 1:
        first, second = (
            (0, 1) if call.node.op == "aten.t.default" else (call.argument(1), call.argument(2))
        )
        order[first], order[second] = order[second], order[first]
    return Pattern((labels,), (tuple(labels[dim] for dim in order),))


def unsqueeze(call: OperationCall) -> Pattern:
    labels = letters(call.rank)
    dim = call.argument(1) % (call.rank + 1)
    return Pattern((labels,), ((*labels[:dim], "", *labels[dim:]),))


def squeeze(call: OperationCall) -> Pattern:
    dims = call.argument(1)
    dims = [dims] if isinstance(dims, int) else list(dims)
    gone = [dim for dim in dims if call.inputs[0][dim] == 1]
    labels = letters(call.rank)
    return Pattern((labels,), (_without(labels, gone) if gone else labels,))


def expand(call: OperationCall) -> Pattern:
    labels = letters(len(call.outputs[0]))
    return Pattern((_broadcast(labels, call.outputs[0], call.inputs[0]),), (labels,))


def repeat(call: OperationCall) -> Pattern:
    labels = letters(len(call.outputs[0]))
    same = _broadcast(labels, call.outputs[0], call.inputs[0])
    pad = ("",) * (len(labels) - len(same))
    return Pattern((same,), ((*pad, *same),))


def select(call: OperationCall) -> Pattern:
    dim = call.argument(1, 0)
    labels = _blocked(letters(call.rank), [dim])
    return Pattern((labels,), (_without(labels, [dim]),) * len(call.outputs))


def slice(call: OperationCall) -> Pattern:  # noqa: A001 (named as the operation is)
    labels = letters(call.rank)
    if call.inputs[0] != call.outputs[0]:
        labels = _blocked(labels, [call.argument(1, 0)])
    return Pattern((labels,), (labels,))


def split(call: OperationCall) -> Pattern:
    """Split equal parts also along the split dim: each device then holds its share of every
    part."""
    dim = call.argument(2, 0) % call.rank
    labels = letters(call.rank)
    sizes = {shape[dim] for shape in call.outputs}
    if len(sizes) > 1 or len(call.outputs) * max(sizes) != call.inputs[0][dim]:
        labels = _blocked(labels, [dim])
    stretched = {(0, labels[dim]): len(call.outputs)} if labels[dim] else None
    return Pattern((labels,), (labels,) * len(call.outputs), stretched=stretched)


def cat(call: OperationCall) -> Pattern:
    rank = len(call.outputs[0])
    if any(len(shape) != rank for shape in call.inputs):  # torch joins an empty vector to anything
        return _joined_to_nothing(call)
    dim = call.argument(1, 0) % len(call.outputs[0])
    labels = letters(len(call.outputs[0]))
    if len({shape[dim] for shape in call.inputs}) > 1:
        labels = _blocked(labels, [dim])
    count = len(call.inputs)
    stretched = {(count, labels[dim]): count} if labels[dim] else None
    return Pattern((labels,) * count, (labels,), stretched=stretched)


def _joined_to_nothing(call: OperationCall) -> Pattern:
    """Treat one tensor joined to empty vectors as the tensor itself, as when a cache is filled for
    the first time."""
    labels, empty = letters(len(call.outputs[0])), (0,)
    if [shape for shape in call.inputs if shape != empty] != [call.outputs[0]]:
        return whole(call)
    return Pattern(tuple(("",) if shape == empty else labels for shape in call.inputs), (labels,))


def stack(call: OperationCall) -> Pattern:
    dim = call.argument(1, 0) % len(call.outputs[0])
    labels = letters(call.rank)
    return Pattern((labels,) * len(call.inputs), ((*labels[:dim], "", *labels[dim:]),))


def flip(call: OperationCall) -> Pattern:
    labels = _blocked(letters(call.rank), call.argument(1))
    return Pattern((labels,), (labels,))


def pad(call: OperationCall) -> Pattern:
    changed = [dim for dim in range(call.rank) if call.inputs[0][dim] != call.outputs[0][dim]]
    labels = _blocked(letters(call.rank), changed)
    return Pattern((labels,), (labels,))


def select_backward(call: OperationCall) -> Pattern:
    labels = letters(len(call.outputs[0]))
    dim = call.argument(2)
    return Pattern((_without(labels, [dim]),), (_blocked(labels, [dim]),))


def slice_backward(call: OperationCall) -> Pattern:
    labels = letters(call.rank)
    if call.inputs[0] != call.outputs[0]:
        labels = _blocked(labels, [call.argument(2)])
    return Pattern((labels,), (labels,))


def select_scatter(call: OperationCall) -> Pattern:
    labels = letters(call.rank)
    dim = call.argument(2)
    return Pattern((_blocked(labels, [dim]), _without(labels, [dim])), (_blocked(labels, [dim]),))


def slice_scatter(call: OperationCall) -> Pattern:
    labels = letters(call.rank)
    if call.inputs[0] != call.inputs[1]:
        labels = _blocked(labels, [call.argument(2, 0)])
    return Pattern((labels, labels), (labels,))


def factory(call: OperationCall) -> Pattern:
    return Pattern((), (letters(len(call.outputs[0])),))


def whole(call: OperationCall) -> Pattern:
    """Split nothing: every device makes the result in full, or the operation is unknown."""
    inputs = tuple(("",) * len(shape) for shape in call.inputs)
    return Pattern(inputs, tuple(("",) * len(shape) for shape in call.outputs))


# The functions above by the name that entries of the table use.
FAMILIES: dict[str, Callable[[OperationCall], Pattern]] = {
    function.__name__: function
    for function in (
        addmm, along, attention, called, cat, convolution, convolution_backward, embedding,
        embedding_backward, expand, factory, flip, folded, gather, group_norm,
        group_norm_backward, index, index_put, layer_norm, layer_norm_backward, leading,
        log_softmax, nll_loss, nll_loss_backward, pad, permute, pointwise, repeat, scatter, select,
        select_backward, select_scatter, slice, slice_backward, slice_scatter, split, squeeze,
        stack, sum, unsqueeze, whole,
    )
}  # fmt: skip
