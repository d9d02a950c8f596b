"""Move particles through time: leapfrog and BullFrog steps, energy and momentum.

This package may import ``nbody.force``. Start reading at ``evolve``.
"""
