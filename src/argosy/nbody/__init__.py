"""Simulate gravity in a periodic box: the second workload, on the same clusters and controller.

Particles, the cosmological background and the run itself are in this folder. Sub-packages, from
bottom to top: ``files``, ``force``, ``initial``, ``motion``, ``planning``, ``processes``, ``gpu``
and ``analysis``. This package may import everything up to ``adapt``. Start reading at
``force.split``.
"""
