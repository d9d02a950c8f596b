"""The task graph of one iteration: compute, transfers, collectives, copies.

May import ``sim.engine`` for the graph. Start reading at ``compile``.
"""
