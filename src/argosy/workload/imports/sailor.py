"""Convert measurements published with the Sailor planner to a chain, profiles and bandwidths.

    layer-times.json               model -> GPU kind -> micro-batch -> tensor width -> layer
                                   -> [forward, backward, update]
    models.json                    model -> tensor width -> layer -> elements and bytes of one
                                   sample on one device
    training_config_*.json         sequence length of one model
    intra_node_bandwidths.json     GPU kind -> GPUs -> [curve, saturated bandwidth]
    multizone_bandwidths_het.json  zone -> GPU kind -> GPUs -> zone -> GPU kind -> GPUs
                                   -> [curve, saturated bandwidth]

The meaning of the figures was found by comparing them with physical limits:

    (1) Times are seconds: a block of OPT-30 on an A100 reaches 18.2 TFLOP/s of the 19.5 that fp32
        allows.
    (2) Everything is stored in fp32, 4 bytes per parameter, and the rows have dtype fp32. OPT-350
        and GPT-Neo-2.7 on A100, and every model on GH200, run at 1.2 to 4.2 times the fp32 peak:
        there products were tf32.
    (3) Times at a tensor width above 1 contain the group's all-reduces; so ``Layer.reduced_bytes``
        is 0.
    (4) Layers 2 to the last block are one measurement, copied. The backward of the embedding, at
        most 4 us, was not really measured. The last layer of GPT-Neo-2.7 lacks the product with the
        vocabulary. Forwards of blocks of OPT-350 on GH200 at width 4 and micro-batches 1, 2 and 4
        are conspicuously round figures (1.5, 1.7, 1.8 ms).
    (5) An update is one figure for all layers, too short for the whole model and too long for one
        layer (2.9 ms of OPT-350 on an A100 move the state of at most 160 M of its 407 M
        parameters). It is not imported.
    (6) "RTX-2080" has 11 GiB and 0.90 of the Titan RTX's memory speed: a 2080 Ti.
    (7) If no training config names the model, its sequence length s follows from what the embedding
        reads: s tokens and s positions of 8 bytes and a mask of s x s bytes, so s^2 + 2s elements
        in s^2 + 16s bytes.
    (8) Bandwidths are bytes/s from all GPUs of one group to all of the other: 22.9, 45.7 and 92.6
        GB/s for 1, 2 and 4 GH200 with a network card of 25 GB/s each. The curve (GB/s over log2 of
        the message in MB) is not read.
    (9) Kept bytes are those at tensor width 1. A device of a group keeps more than its share, by up
        to a half at width 8, because Megatron without sequence parallelism repeats the layer's
        input on every device.

No values are filled in: a hole in the times is a hole in the profile, which interpolates, or raises
an error that names the hole. Real runs are in ``sailor_runs.py``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from pydantic import ConfigDict

from argosy.document import Document, Schema, read_json, validate
from argosy.dtype import Dtype
from argosy.errors import InputError, Problem, bad_input, closest, show
from argosy.units import finite
from argosy.workload.chain import Chain, Layer
from argosy.workload.fields import Amount, Count, Natural
from argosy.workload.profile import Profile, ProfileRow
from argosy.workload.settings import parse_settings

CATALOGUE_NAMES = {
    "A100-40": "A100-40GB",
    "A100-80": "A100-80GB",
    "GH-96": "GH200-96GB",
    "RTX-2080": "RTX-2080Ti",
    "RTX-3090": "RTX-3090",
    "Titan-RTX": "Titan-RTX",
    "V100-16": "V100-16GB",
}
"""The catalogue's name for each of Sailor's GPU kinds; a name that is not here is kept."""


class ForeignSchema(Schema):
    """A table of which only some fields are read."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class _Training(ForeignSchema):
    sequence_length: Count
    num_all_layers: Count


class _Amounts(ForeignSchema):
    params_floats: Natural
    params_bytes: Natural
    act_input_floats: Natural
    act_input_bytes: Natural
    act_output_bytes: Amount
    act_mem_bytes: Amount


def read_sailor(
    folder: Path | str, model: str, *, sequence_length: int | None = None, optimizer: str = "adam"
) -> tuple[Chain, dict[str, Profile]]:
    """Return the model per sample in fp32, and its measured times by the catalogue's device
    kinds."""
    folder = Path(folder)
    settings = parse_settings(
        sequence_length=sequence_length, dtype=None, optimizer=optimizer, fused_attention=False
    )
    described = read_json(folder / "models.json").chosen("model", model)
    amounts = _amounts(described)
    names = [f"{_kind(amounts, index)}.{index}" for index in range(len(amounts))]
    rows = _rows(read_json(folder / "layer-times.json").chosen("model", model), names)
    training = _training(folder, model, len(amounts))
    stated = training.sequence_length if training else None
    length = settings.sequence_length or stated or _length(described, amounts[0])
    widest = max(row.tensor_width for measured in rows.values() for row in measured)
    layers = tuple(_layer(amounts, index, name, widest) for index, name in enumerate(names))
    chain = Chain(
        name=model,
        layers=layers,
        sequence_length=length,
        dtype=Dtype.FP32,
        optimizer=optimizer,
        source="measured by Sailor (eth-easl/sailor) in fp32, tf32 products on some kinds",
    )
    profiles = {
        kind: Profile(
            device=kind, model=model, rows=measured, layers=layers, sequence_length=length
        )
        for kind, measured in rows.items()
    }
    return chain, profiles


def _amounts(document: Document) -> tuple[_Amounts, ...]:
    """Return the amounts of every layer at tensor width 1, in order."""
    table = document.data.get("1")
    if not isinstance(table, dict) or not table:
        raise document.error(("1",), "the layers at tensor width 1", table)
    missing = [str(index) for index in range(len(table)) if str(index) not in table]
    if missing:
        raise document.error(
            ("1",), f"layer {missing[0]} among its {len(table)} layers, counted from 0"
        )
    amounts = tuple(
        validate(document.inside("1", str(index)), _Amounts) for index in range(len(table))
    )
    problems = []
    for index, layer in enumerate(amounts):
        fp32 = layer.params_floats * Dtype.FP32.bytes
        if layer.params_bytes != fp32:
            location = ("1", str(index), "params_bytes")
            expected = f"{fp32}, 4 per parameter"
            problems.append(document.problem(location, expected, layer.params_bytes))
    _refuse(problems)
    return amounts


def _kind(amounts: tuple[_Amounts, ...], index: int) -> str:
    """Return the kind of a layer. Blocks are the layers with as many parameters as layer 1;
    LLAMA-3-8 has a norm between them and the head."""
    if index == 0:
        return "embedding"
    if index == len(amounts) - 1:
        return "head"
    return "block" if amounts[index].params_floats == amounts[1].params_floats else "norm"


def _layer(amounts: tuple[_Amounts, ...], index: int, name: str, widest: int) -> Layer:
    layer = amounts[index]
    return Layer(
        name=name,
        kind=_kind(amounts, index),
        forward_flop=0.0,
        backward_flop=0.0,
        parameters=layer.params_floats,
        activation_bytes=layer.act_mem_bytes,
        output_bytes=0.0 if index == len(amounts) - 1 else layer.act_output_bytes,
        max_tensor_width=widest,
    )


def _training(folder: Path, model: str, num_layers: int) -> _Training | None:
    documents = [read_json(path) for path in sorted(folder.glob("training_config_*.json"))]
    matching = [document for document in documents if document.data.get("model") == model]
    if not matching:
        return None
    if len(matching) > 1:
        raise matching[1].error(
            ("model",), f"a model that {Path(matching[0].file).name} does not train", model
        )
    training = validate(matching[0], _Training)
    if training.num_all_layers != num_layers:
        expected = f"{num_layers}, the layers of {model} in models.json"
        raise matching[0].error(("num_all_layers",), expected, training.num_all_layers)
    return training


def _length(document: Document, embedding: _Amounts) -> int:
    """Return the sequence length that follows from the embedding's input (7)."""
    elements, size = embedding.act_input_floats, embedding.act_input_bytes
    length = math.isqrt(elements + 1) - 1
    if length < 1 or (elements, size) != (length**2 + 2 * length, length**2 + 16 * length):
        expected = (
            "tokens, positions and a mask: "
            "no training config of this folder states the sequence length"
        )
        actual = f"{elements} elements in {size} bytes"
        problem = document.problem(
            ("1", "0", "act_input_floats"), expected, suggestion="pass sequence_length"
        )
        raise InputError([replace(problem, found=actual)])
    return length


def _rows(document: Document, names: list[str]) -> dict[str, tuple[ProfileRow, ...]]:
    """Return the rows by device kind, in the order of layers, widths and micro-batches."""
    problems: list[Problem] = []
    rows: dict[str, list[ProfileRow]] = defaultdict(list)
    _named_once(document, problems)
    levels = ("GPU kinds", "micro-batches", "tensor widths", "layers")
    for place, value in _leaves(document, levels, problems):
        kind, *numbers = place
        batch, width, index = (_number(text) for text in numbers)
        if not batch or not width or index is None or index >= len(names):
            layers = f"a layer of models.json, 0 to {len(names) - 1}"
            expected = f"micro-batch and tensor width from 1 and {layers}"
            problems.append(document.problem(place, expected, ", ".join(numbers)))
        elif (
            not isinstance(value, list)
            or len(value) != 3
            or not all(_is_amount(number) for number in value)
        ):
            problems.append(
                document.problem(place, "[forward, backward, update] in seconds, at least 0", value)
            )
        else:
            row = ProfileRow(
                layer=names[index],
                micro_batch=batch,
                tensor_width=width,
                dtype=Dtype.FP32,
                forward_seconds=float(value[0]),
                backward_seconds=float(value[1]),
            )
            rows[CATALOGUE_NAMES.get(kind, kind)].append(row)
    _refuse(problems)
    position = {name: index for index, name in enumerate(names)}
    return {
        kind: tuple(
            sorted(
                rows[kind], key=lambda row: (position[row.layer], row.tensor_width, row.micro_batch)
            )
        )
        for kind in sorted(rows)
    }


def _named_once(document: Document, problems: list[Problem]) -> None:
    """Add a problem for each GPU kind that the file names twice: by Sailor's name and by the
    catalogue's."""
    for kind in document.data:
        if CATALOGUE_NAMES.get(kind, kind) != kind and CATALOGUE_NAMES[kind] in document.data:
            problems.append(
                document.problem(
                    (kind,), f"a kind that is not also called {CATALOGUE_NAMES[kind]}", kind
                )
            )


@dataclass(frozen=True, kw_only=True)
class NodeBandwidth:
    """A bandwidth that GPUs of one node reached among each other."""

    kind: str
    num_devices: int
    bandwidth: float
    """Bytes/s with large messages."""


@dataclass(frozen=True, kw_only=True)
class SailorGroup:
    """A group of GPUs of one node that is used together to work, send or receive."""

    kind: str
    num_devices: int
    zone: str

    def includes(self, fewer: SailorGroup) -> bool:
        """Return whether ``fewer`` has as many GPUs of this kind and zone, or fewer."""
        same = (self.kind, self.zone) == (fewer.kind, fewer.zone)
        return same and fewer.num_devices <= self.num_devices

    def __str__(self) -> str:
        return f"{self.num_devices} x {self.kind} in {self.zone}"


@dataclass(frozen=True, kw_only=True)
class PairBandwidth:
    """A bandwidth that one node reached to another, in this direction."""

    sender: SailorGroup
    receiver: SailorGroup
    bandwidth: float
    """Bytes/s with large messages, all GPUs of the sender together."""

    def is_part_of(self, one: SailorGroup, other: SailorGroup) -> bool:
        """Return whether these are as many GPUs or fewer of the same nodes, in any direction."""
        ends = (self.sender, self.receiver)
        return any(
            start.includes(ends[0]) and end.includes(ends[1])
            for start, end in ((one, other), (other, one))
        )


@dataclass(frozen=True, kw_only=True)
class SailorBandwidths:
    """A set of saturated bandwidths that are looked up by the catalogue's names of device kinds."""

    nodes: tuple[NodeBandwidth, ...]
    pairs: tuple[PairBandwidth, ...]

    def within_node(self, kind: str, num_devices: int) -> float:
        """Return the bytes/s among ``num_devices`` GPUs of a node."""
        by_count = {node.num_devices: node.bandwidth for node in self.nodes if node.kind == kind}
        if not by_count:
            kinds = sorted({node.kind for node in self.nodes})
            raise bad_input(
                f"a kind that was measured ({', '.join(kinds)})",
                kind,
                "kind",
                suggestion=closest(kind, kinds),
            )
        if num_devices not in by_count:
            counts = ", ".join(str(count) for count in sorted(by_count))
            raise bad_input(
                f"a measured number of {kind} in a node ({counts})", num_devices, "num_devices"
            )
        return by_count[num_devices]

    def between_nodes(self, sender: SailorGroup, receiver: SailorGroup) -> float:
        """Return the bytes/s from one node to another."""
        if (sender, receiver) not in self._index:
            known = ", ".join(str(end) for start, end in self._index if start == sender)
            raise bad_input(
                f"a measured receiver ({known or 'none'})", str(receiver), f"from {sender}"
            )
        return self._index[sender, receiver]

    def between_nics(self, sender: SailorGroup, receiver: SailorGroup) -> float:
        """Return the bytes/s between two nodes: the largest that as many GPUs or fewer reached, in
        either direction, because more GPUs of a node do not get less from its NIC.

        The published rate of eight Titan RTX and eight RTX 2080 is that of another pair of nodes,
        digit for digit, and a 25th of what two GPUs of each got.
        """
        measured = (pair.bandwidth for pair in self.pairs if pair.is_part_of(sender, receiver))
        return max(measured, default=self.between_nodes(sender, receiver))

    @cached_property
    def _index(self) -> dict[tuple[SailorGroup, SailorGroup], float]:
        return {(pair.sender, pair.receiver): pair.bandwidth for pair in self.pairs}


def read_sailor_bandwidths(folder: Path | str) -> SailorBandwidths:
    """Return the bandwidths within nodes and between them (8)."""
    folder = Path(folder)
    problems: list[Problem] = []
    document = read_json(folder / "intra_node_bandwidths.json")
    nodes = [
        NodeBandwidth(
            kind=CATALOGUE_NAMES.get(place[0], place[0]), num_devices=counts[0], bandwidth=bandwidth
        )
        for place, counts, bandwidth in _bandwidths(document, ("GPU kinds", "GPU counts"), problems)
    ]
    document = read_json(folder / "multizone_bandwidths_het.json")
    levels = ("zones", "GPU kinds", "GPU counts") * 2
    pairs = [
        PairBandwidth(
            sender=device_group(place[1], counts[0], place[0]),
            receiver=device_group(place[4], counts[1], place[3]),
            bandwidth=bandwidth,
        )
        for place, counts, bandwidth in _bandwidths(document, levels, problems)
    ]
    _refuse(problems)
    return SailorBandwidths(nodes=tuple(nodes), pairs=tuple(pairs))


def device_group(kind: str, count: int, zone: str) -> SailorGroup:
    """Return a group of GPUs; ``kind`` is Sailor's name."""
    return SailorGroup(kind=CATALOGUE_NAMES.get(kind, kind), num_devices=count, zone=zone)


def _bandwidths(
    document: Document, levels: tuple[str, ...], problems: list[Problem]
) -> Iterator[tuple[tuple[str, ...], list[int], float]]:
    """Yield every entry with its counts of GPUs and its last number."""
    for place, value in _leaves(document, levels, problems):
        counts = [
            _number(text)
            for text, level in zip(place, levels, strict=True)
            if level == "GPU counts"
        ]
        if not all(counts):
            problems.append(
                document.problem(place, "whole numbers of GPUs, at least 1", ", ".join(place))
            )
        elif (
            not isinstance(value, list)
            or len(value) != 2
            or not _is_amount(value[1])
            or not value[1]
        ):
            problems.append(document.problem(place, "[curve, bytes/s above 0]", value))
        else:
            yield place, [count for count in counts if count], float(value[1])


def _leaves(
    document: Document,
    levels: tuple[str, ...],
    problems: list[Problem],
    place: tuple[str, ...] = (),
) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield the values below ``levels`` of tables, with the names that lead there; add a problem
    for each value that is no table."""
    value: object = document.data
    for name in place:
        assert isinstance(value, dict)
        value = value[name]
    if len(place) == len(levels):
        yield place, value
    elif not isinstance(value, dict) or not value:
        problem = document.problem(place, f"a table of {levels[len(place)]}")
        problems.append(replace(problem, found="an empty table" if value == {} else show(value)))
    else:
        for name in value:
            yield from _leaves(document, levels, problems, (*place, name))


def _number(text: str) -> int | None:
    """Return a whole number in its usual spelling; None for any other text.

    >>> _number("16"), _number("016"), _number("many")
    (16, None, None)
    """
    return int(text) if text.isascii() and text.isdigit() and str(int(text)) == text else None


def _is_amount(value: object) -> bool:
    amount = finite(value)
    return amount is not None and amount >= 0


def _refuse(problems: list[Problem]) -> None:
    if problems:
        raise InputError(
            sorted(problems, key=lambda problem: (problem.file or "", problem.line or 0))
        )
