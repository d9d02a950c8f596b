"""Model the costs of a plan: seconds of compute, bytes of memory, and bytes on the network.

Belongs here: equations and their constants, calibrations, and prediction intervals. May import
``plan`` and what is below it. Start reading at ``compute`` and ``memory``.
"""
