"""Weights, gradients and optimizer state of a rank: who holds what, and how it is summed.

Belongs here: gradient sums, ZeRO, PowerSGD, and state kept in host memory.
May import ``runtime.stages``. Start reading at ``holding``.
"""
