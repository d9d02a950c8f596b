"""Move particles through time: leapfrog and BullFrog steps, energy and momentum.

May import ``nbody.force``. Start reading at ``evolve``.
"""
