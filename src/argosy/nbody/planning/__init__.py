"""Plan gravity on a cluster: prices, cuts of the curve, plan files and their simulation.

This package may import ``nbody.force`` for settings, and the simulator. Start reading at ``plan``.
"""
