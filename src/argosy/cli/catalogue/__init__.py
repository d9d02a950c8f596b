"""Commands about devices, models, clusters and calibrations.

May import ``cli`` modules that all commands share. Start reading at ``cluster``.
"""
