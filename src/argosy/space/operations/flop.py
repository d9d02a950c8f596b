"""Count the floating-point operations of one ATen operation on whole tensors, by the rules in
``data/sharding.toml``."""

from __future__ import annotations

import math

from argosy.space.operations.families import OperationCall


def flop_of(call: OperationCall) -> float:
    """Return the floating-point operations of the whole operation."""
    kind = call.entry.get("flop", 1)
    sizes = [math.prod(shape) for shape in (*call.inputs, *call.outputs)]
    match kind:
        case "product":
            rows, inner = call.inputs[-2], call.inputs[-1]
            return 2.0 * math.prod(rows) * (inner[-1] if len(inner) > 1 else 1)
        case "convolution":
            return _convolution_flop(call)
        case "called":
            return float(call.argument(-3)[0])
        case "attention":
            backward = "backward" in call.node.op
            q, k = (
                (call.inputs[1], call.inputs[2]) if backward else (call.inputs[0], call.inputs[1])
            )
            return (10.0 if backward else 4.0) * math.prod(q) * k[2]
    return float(kind) * max(sizes, default=0)


def _convolution_flop(call: OperationCall) -> float:
    """Return 2 x output positions x weight per position for a forward, and twice that for a
    backward."""
    backward = "backward" in call.node.op
    weight = call.inputs[2 if backward else 1]
    signal = call.inputs[0] if backward else call.outputs[0]
    if call.argument(7 if backward else 6):  # transposed: the input takes the output's place
        signal = call.inputs[1] if backward else call.inputs[0]
    positions = signal[0] * math.prod(signal[2:])
    return (4.0 if backward else 2.0) * positions * math.prod(weight)
