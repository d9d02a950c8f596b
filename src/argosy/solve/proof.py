"""Choose the proof that the certificate of level 1 states."""

from __future__ import annotations

from collections.abc import Sequence

from argosy.space.option import Vector

# If the gap of level 1 is larger than this, its certificate is about the finest units whose gap is
# not.
_PROVEN = 0.15

Proof = tuple[float, Vector, int]
"""The bound, the units and the level of a proof."""


def widest_proof(proofs: Sequence[Proof], best: float) -> Proof:
    """Return the proof with the finest units whose bound is close to the best plan, or else with
    the finest units.

    ``proofs`` go from coarse to fine units. Units without a plan as fast as the best one prove
    nothing about it.
    """
    close = [proof for proof in proofs if best / (1 + _PROVEN) <= proof[0] <= best]
    return close[-1] if close else proofs[-1]
