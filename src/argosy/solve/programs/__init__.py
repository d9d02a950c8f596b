"""SPMD programs of a captured step: which device holds what, and which collectives run.

May import ``space`` and what is below it. Start reading at ``placement``, then ``spmd``.
"""
