"""React to a network and devices that change during a run.

Belongs here: estimates of bandwidth and speed, the controller and its decisions, and the player
that runs the same controller in the simulator. May import everything up to ``choose``; no torch.
Start reading at ``controller``.
"""
