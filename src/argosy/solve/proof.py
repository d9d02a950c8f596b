"""Choose the proof that the certificate of level 1 states."""

from __future__ import annotations

from collections.abc import Sequence

from argosy.space.option import Vector

# If the gap of level 1 is larger than this, its certificate is about the finest units whose gap is
# not. All proofs are true, and no bound depends on this number: it only selects the statement that
# is printed, with its units. Some size is needed, because finer units always have the wider gap:
# the widest statement would often be about tens of percent, and the smallest gap would always be
# that of the coarsest units. A limit on the work of proofs cannot replace it: how long a proof may
# take is limited by its rounds, and all units have the same. On the 13 bundled clusters every value
# from 4.3 to 19.3 % selects the same certificates.
_PROVEN = 0.15

Proof = tuple[float, Vector, int, bool]
"""The bound, the units and the level of a proof, and whether it includes groups across nodes."""


def widest_proof(proofs: Sequence[Proof], best: float, *, spans: bool) -> Proof:
    """Return the proof with the finest units whose bound is close to the best plan, or else with
    the finest units.

    ``proofs`` go from coarse to fine units, and from groups inside nodes to all. Units without a
    plan as fast as the best one prove nothing about it, and neither do groups inside nodes if it
    has one across nodes (``spans``).
    """
    proofs = [proof for proof in proofs if proof[-1] or not spans]
    close = [proof for proof in proofs if best / (1 + _PROVEN) <= proof[0] <= best]
    return close[-1] if close else proofs[-1]
