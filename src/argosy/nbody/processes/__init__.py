"""Compute a force with several processes: domains on the curve and slabs of the mesh.

This package may import ``nbody.force`` and ``nbody.planning``. Start reading at ``shared``.
"""
