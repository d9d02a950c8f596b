"""HAP's own units: its FLOP formulas, its device speeds, its measured collectives, and elements
counted as bytes.

Matrix products count 3 FLOP per multiply and add in each of forward, input gradient and weight
gradient; attention 6 L N E S + 5 L S N forward and twice that backward, with its projections not
counted (its formula leaves them out); norms 10, softmax 15, activations 3 per element forward,
twice backward. Total for the 12-layer transformer: 2.5e13.
"""

from __future__ import annotations

import math

from argosy.cost.group import CollectiveRates, DeviceGroup
from argosy.solve.programs.placement import Pricing
from argosy.space.operations.families import OperationCall
from argosy.space.operations.flop import flop_of

FAST, SLOW, EQUAL = 3.8588e12, 2.1493e12, 5.9666e12
RATES = CollectiveRates(
    all_gather=9.46e9,
    grouped_all_gather=9.15e9,
    all_reduce=5.91e9,
    reduce_scatter=9.74e9,
    grouped_reduce_scatter=8.76e9,
    all_to_all=24.59e9,
)
PROJECTIONS = ({768, 2304}, {768})
PER_ELEMENT = {
    "layer_norm": 10.0,
    "log_softmax": 15.0,
    "softmax": 15.0,
    "relu": 3.0,
    "threshold": 3.0,
}


def hap_flop(call: OperationCall) -> float:
    """FLOP of one operation as HAP counts them."""
    op = call.node.op
    if "attention" in op:
        batch, heads, time, width = call.inputs[1] if "backward" in op else call.inputs[0]
        forward = 6 * time * batch * heads * width * time + 5 * time * time * batch
        return forward * (2.0 if "backward" in op else 1.0)
    if call.entry.get("flop") == "product":
        tokens = max(size for shape in call.inputs for size in shape)
        sides = {size for shape in call.inputs[-2:] for size in shape if size != tokens}
        return 0.0 if sides in PROJECTIONS and len(call.inputs[-1]) == 2 else 1.5 * flop_of(call)
    if call.entry.get("flop") == 0:
        return 0.0
    elements = max((math.prod(shape) for shape in (*call.inputs, *call.outputs)), default=0)
    factor = next((value for name, value in PER_ELEMENT.items() if name in op), 1.0)
    return factor * elements * (2.0 if "backward" in op else 1.0)


def hap_group(speeds: tuple[float, ...], *, rates: CollectiveRates | None = RATES) -> DeviceGroup:
    return DeviceGroup(
        names=tuple(f"gpu{i}" for i in range(len(speeds))),
        flops=speeds,
        memory_bandwidths=(math.inf,) * len(speeds),
        bandwidth=RATES.all_reduce,
        latency=0.0,
        launch=0.0,
        rates=rates,
    )


def unequal(world: int) -> tuple[float, ...]:
    """A quarter of fast devices, the rest slow."""
    return (FAST,) * (world // 4) + (SLOW,) * (world - world // 4)


def hap_pricing(
    speeds: tuple[float, ...], *, element_bytes: float = 1.0, rounded: bool = False
) -> Pricing:
    return Pricing(
        group=hap_group(speeds),
        flop=hap_flop,
        rounded=rounded,
        count_moves=False,
        element_bytes=element_bytes,
    )
