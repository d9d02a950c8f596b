"""React to a network and devices that change during a run.

This package holds estimates of bandwidth and speed, the controller and its decisions, and the
player that runs the same controller in the simulator. It may import everything up to ``choose``,
but no torch. Start reading at ``controller``.
"""
