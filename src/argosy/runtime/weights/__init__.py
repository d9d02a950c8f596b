"""Keep weights, gradients and optimizer state of a rank, divide them, and sum gradients.

Belongs here: gradient sums, ZeRO, PowerSGD, and state kept in host memory. May import
``runtime.stages``. Start reading at ``holding``.
"""
