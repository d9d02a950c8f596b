"""Execute a plan on torch.distributed, and measure it while it runs.

Sub-packages, from bottom to top: ``processes``, ``communication``, ``graphs``, ``stages``,
``weights``, ``sources``, ``state``, ``step``, ``job``, ``elastic`` and ``islands``; each imports
only those before it. May import everything up to ``adapt``. Importing this package alone needs no
torch. Start reading at ``step.executor``.
"""
