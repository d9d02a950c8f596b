"""List the optimizers: the bytes that each keeps per trained weight, and the cost of its update.

(1)  state   bytes of moments per weight, in fp32 or in blocks of 8 bits with a scale per block
(2)  master  4 bytes more for an fp32 copy of a weight that is stored in fewer; optimizers that
             update 16-bit weights in place keep none
(3)  update  reads and writes weight, gradient, state and master copy, ``passes`` times, and holds
             some bytes for a moment
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class OptimizerCost:
    """A cost that an optimizer has per trained weight."""

    state_bytes: float
    """Bytes of moments per weight (1)."""
    has_master: bool = True
    """Whether weights of fewer than 4 bytes have a copy in fp32 (2)."""
    passes: float = 1.0
    """Times that an update reads and writes everything (3)."""
    temporary_bytes: float = 0.0
    """Bytes per weight of those that are updated together, which an update holds for a moment
    (3)."""
    is_elementwise: bool = True
    """Whether parts of a tensor can be updated one after the other."""
    source: str = ""


# Bytes of a moment in blocks of 256 with a 4-byte scale each, as in bitsandbytes.
_EIGHT_BITS = 1 + 4 / 256
OPTIMIZERS: dict[str, OptimizerCost] = {
    "adamw": OptimizerCost(state_bytes=8, temporary_bytes=4, source="torch.optim.AdamW"),
    "adam": OptimizerCost(state_bytes=8, temporary_bytes=4, source="torch.optim.Adam"),
    "lion": OptimizerCost(state_bytes=4, source="one moment in fp32"),
    "momentum": OptimizerCost(state_bytes=4, source="torch.optim.SGD with momentum"),
    "adamw8bit": OptimizerCost(
        state_bytes=2 * _EIGHT_BITS,
        has_master=False,
        is_elementwise=False,
        source="bitsandbytes.optim.AdamW8bit: two moments of 8 bits, "
        "weights updated as they are stored",
    ),
    "adafactor": OptimizerCost(
        state_bytes=4 * 2 / 2048,
        has_master=False,
        is_elementwise=False,
        passes=4.7,
        source="torch.optim.Adafactor: a row and a column of second moments, "
        "here of a matrix of 2048 x 2048; passes over those of AdamW as measured on a CPU "
        "(python -m benchmarks.optimizer_update)",
    ),
    "sgd": OptimizerCost(state_bytes=0, source="torch.optim.SGD"),
}
"""Costs by the name of the optimizer; the dtype of the weights determines whether there is a master
copy."""


def optimizer_bytes_per_weight(name: str, weight_bytes: int) -> float:
    """Return the bytes of state (1) and master copy (2) per weight.

    >>> optimizer_bytes_per_weight("adamw", 2), optimizer_bytes_per_weight("adamw8bit", 2)
    (12, 2.03125)
    """
    cost = OPTIMIZERS[name]
    return cost.state_bytes + (4 if cost.has_master and weight_bytes < 4 else 0)
