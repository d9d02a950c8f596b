"""Compute a force with several processes: domains on the curve and slabs of the mesh.

May import ``nbody.force`` and ``nbody.planning``. Start reading at ``shared``.
"""
