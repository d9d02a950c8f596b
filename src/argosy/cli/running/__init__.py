"""Provide the commands that start processes: run, demo, lab, probe, profile and doctor.

This package may import ``cli.planning`` and the ``cli`` modules that all commands share. Start
reading at ``run``.
"""
