"""Create initial conditions: a lattice or a glass, displaced to follow a power spectrum.

This package may import ``nbody.force``. Start reading at ``conditions``.
"""
