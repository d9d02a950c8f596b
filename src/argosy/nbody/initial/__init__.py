"""Initial conditions: a lattice or a glass, displaced to follow a power spectrum.

May import ``nbody.force``. Start reading at ``conditions``.
"""
