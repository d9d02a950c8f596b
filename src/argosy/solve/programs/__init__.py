"""Find SPMD programs of a captured step: which device holds what, and which collectives run.

This package may import ``space`` and the packages below it. Start reading at ``placement``, then
``spmd``.
"""
