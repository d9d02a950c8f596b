"""Commands that start processes: run, demo, lab, probe, profile and doctor.

May import ``cli.planning`` and the ``cli`` modules that all commands share. Start reading at
``run``.
"""
