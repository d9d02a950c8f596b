"""Build the task graph of one iteration: compute, transfers, collectives, copies.

This package may import ``sim.engine`` for the graph. Start reading at ``compile``.
"""
