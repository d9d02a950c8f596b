"""Provide the commands to plan, simulate, explain, compare, report and export.

This package may import ``cli.gravity`` and the ``cli`` modules that all commands share. Start
reading at ``plan``.
"""
