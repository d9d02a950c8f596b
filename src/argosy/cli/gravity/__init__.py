"""Run ``argosy nbody``: create, evolve, plan and analyse boxes of matter.

This package may import ``nbody`` and the ``cli`` modules that all commands share. Start reading at
``commands``.
"""
