"""Provide commands about devices, models, clusters and calibrations.

This package may import ``cli`` modules that all commands share. Start reading at ``cluster``.
"""
