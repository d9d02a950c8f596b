"""Convert layer profiles in the text form of DAPPLE (and of PipeDream before it) to a chain and a
profile.

    node5 -- layer_0 -- forward_compute_time=2.69, backward_compute_time=4.47,
                        activation_size=4325376, ...      (on one line)
        node4 -- node5

Nodes come first, then indented edges. Times are milliseconds, sizes (also ``parameter_size``) bytes
of fp32, for the profile batch that the file name ends with (``-pbs-2``). A size may be a list,
``[a; b]``: its sum counts. The graph may branch; it becomes a chain:

    (1) layers are in topological order, ties broken by the order of the file
    (2) output of layer i   the sizes of all layers up to i that a layer behind i reads: skip edges
                            cost bytes at every cut
    (3) kept by layer i     its own output, because the file has no sizes inside a layer; a view
                            (``__getitem__``) keeps 0
    (4) parameters          parameter bytes / 4, rounded

Amounts are per sample; FLOP are unknown and 0.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from argosy.document import read_text
from argosy.dtype import Dtype
from argosy.errors import Problem, in_order, invalid, raise_any, show
from argosy.workload.chain import Chain, Layer
from argosy.workload.profile import Profile, ProfileRow

# Fields of a node that are read.
_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
# Line of a node: key, label, fields.
_NODE = re.compile(r"(\S+) -- (.*) -- (\w+=.*)")
# Line of an edge: source and target.
_EDGE = re.compile(r"\s+(\S+) -- (\S+)\s*")
# File name: model and profile batch.
_BATCH = re.compile(r"(.*?)-pbs-(\d+)")

# Largest number of bytes or milliseconds; anything above was not measured.
_LARGEST = 1e18


@dataclass(frozen=True, kw_only=True)
class _Node:
    key: str
    label: str
    forward: float
    """Milliseconds, as all times here."""
    backward: float
    activation: float
    """Bytes of the profile batch."""
    weights: float
    """Bytes."""

    @property
    def short_label(self) -> str:
        return self.label.split("(")[0].strip() or self.label

    @property
    def kind(self) -> str:
        """Return the label without its numbers.

        >>> [_Node(key="n", label=text, forward=0, backward=0, activation=0, weights=0).kind
        ...  for text in ("layer_12", "Conv2d_1_1", "LSTM(2048, 1024)")]
        ['layer', 'Conv2d', 'LSTM']
        """
        name = self.short_label
        numbers = re.match(r"(?:\d+_)*", name[::-1])
        return name[: len(name) - numbers.end()] if numbers else name


# The kind of the devices that the profiles were measured on.
_DEVICE = "V100-16GB"


def read_dapple(
    path: Path | str, *, profile_batch: int | None = None, optimizer: str = "adamw"
) -> tuple[Chain, Profile]:
    """Return the model per sample, and its measured times for ``profile_batch`` samples."""
    path = Path(path)
    name, batch = _name_and_batch(path, profile_batch)
    nodes, edges = _parse(read_text(path), str(path))
    ordered = _topological(nodes, edges, str(path))
    layers = _layers(ordered, edges, batch)
    rows = tuple(_row(layer, node, batch) for layer, node in zip(layers, ordered, strict=True))
    profile = Profile(device=_DEVICE, model=name, rows=rows, layers=layers)
    return profile.chain(optimizer=optimizer), profile


def _name_and_batch(path: Path, profile_batch: int | None) -> tuple[str, int]:
    match = _BATCH.fullmatch(path.stem)
    name = match[1] if match else path.stem
    batch = profile_batch if profile_batch is not None else int(match[2]) if match else None
    if batch is None or batch < 1:
        expected = (
            "the samples per measurement, at least 1, in the file name, as in bert-48-pbs-2.txt"
        )
        actual = None if batch is None else str(batch)
        raise invalid(
            file=str(path), found=actual, expected=expected, suggestion="or pass profile_batch"
        )
    return name, batch


def _parse(text: str, file: str) -> tuple[dict[str, _Node], list[tuple[str, str]]]:
    nodes: dict[str, _Node] = {}
    edges: list[tuple[str, str]] = []
    problems: list[Problem] = []
    ends: list[tuple[int, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        if edge := _EDGE.fullmatch(line):
            edges.append((edge[1], edge[2]))
            ends += [(number, edge[1]), (number, edge[2])]
            continue
        parsed = _parse_node(line, file, number)
        if isinstance(parsed, Problem):
            problems.append(parsed)
        elif parsed.key in nodes:
            problems.append(
                Problem(
                    file=file, line=number, found=show(parsed.key), expected="a node named once"
                )
            )
        else:
            nodes[parsed.key] = parsed
    unknown = [(number, end) for number, end in ends if end not in nodes]
    problems += [
        Problem(file=file, line=n, found=show(end), expected="a node of this file")
        for n, end in unknown
    ]
    if not nodes and not problems:
        problems.append(Problem(file=file, expected="at least one node"))
    raise_any(in_order(problems))
    return nodes, edges


def _parse_node(line: str, file: str, number: int) -> _Node | Problem:
    match = _NODE.fullmatch(line.rstrip())
    if match is None:
        expected = '"node -- label -- field=value, ..." or, indented, "node -- node"'
        return Problem(file=file, line=number, found=show(line.strip()), expected=expected)
    pairs = dict(part.split("=", 1) for part in match[3].split(", ") if "=" in part)
    values = []
    for name in _FIELDS:
        value = _amount(pairs[name]) if name in pairs else None
        if value is None:
            actual = show(pairs[name]) if name in pairs else None
            expected = (
                f"a value of {name}: a number, at least 0"
                if actual is None
                else "a number, at least 0"
            )
            return Problem(name, actual, expected, file=file, line=number)
        values.append(value)
    forward, backward, activation, weights = values
    return _Node(
        key=match[1],
        label=match[2],
        forward=forward,
        backward=backward,
        activation=activation,
        weights=weights,
    )


def _amount(text: str) -> float | None:
    """Return a number, or the sum of a list such as ``[9175040.0; 262144.0]``; None if the text is
    neither.

    >>> _amount("0.5"), _amount("[1; 2.5]"), _amount("-1"), _amount("many")
    (0.5, 3.5, None, None)
    """
    parts = text.strip().removeprefix("[").removesuffix("]").split(";")
    numbers = [part.strip() for part in parts]
    if not all(re.fullmatch(r"\d+(\.\d*)?([eE][+-]?\d+)?", number) for number in numbers):
        return None
    amount = sum(float(number) for number in numbers)
    return amount if amount <= _LARGEST else None


def _topological(nodes: dict[str, _Node], edges: list[tuple[str, str]], file: str) -> list[_Node]:
    """Return the nodes in topological order (1)."""
    place = {key: index for index, key in enumerate(nodes)}
    keys = list(nodes)
    waiting = Counter(end for _, end in edges)
    readers: dict[str, list[str]] = {key: [] for key in nodes}
    for start, end in edges:
        readers[start].append(end)
    ready = [index for key, index in place.items() if not waiting[key]]
    ordered: list[_Node] = []
    while ready:
        key = keys[heapq.heappop(ready)]
        ordered.append(nodes[key])
        for end in readers[key]:
            waiting[end] -= 1
            if not waiting[end]:
                heapq.heappush(ready, place[end])
    if len(ordered) < len(nodes):
        stuck = min((key for key in nodes if waiting[key]), key=place.__getitem__)
        raise invalid(
            file=file, found=f"a cycle through {stuck}", expected="a graph without cycles"
        )
    return ordered


def _layers(ordered: list[_Node], edges: list[tuple[str, str]], batch: int) -> tuple[Layer, ...]:
    """Return the layers of a chain by (2) to (4)."""
    place = {node.key: index for index, node in enumerate(ordered)}
    last_reader = list(range(len(ordered)))
    for start, end in edges:
        last_reader[place[start]] = max(last_reader[place[start]], place[end])
    crossing = [
        sum(
            node.activation
            for index, node in enumerate(ordered[: cut + 1])
            if last_reader[index] > cut
        )
        for cut in range(len(ordered))
    ]
    return tuple(
        Layer(
            name=f"{node.key}.{node.short_label}",
            kind=node.kind,
            forward_flop=0.0,
            backward_flop=0.0,
            parameters=round(node.weights / Dtype.FP32.bytes),
            activation_bytes=0.0 if node.kind == "__getitem__" else node.activation / batch,
            output_bytes=crossing[index] / batch,
        )
        for index, node in enumerate(ordered)
    )


def _row(layer: Layer, node: _Node, batch: int) -> ProfileRow:
    return ProfileRow(
        layer=layer.name,
        micro_batch=batch,
        tensor_width=1,
        dtype=Dtype.FP32,
        forward_seconds=node.forward / 1e3,
        backward_seconds=node.backward / 1e3,
    )
