"""The command ``argosy nbody``: create, evolve, plan and analyse boxes of matter.

May import ``nbody`` and the ``cli`` modules that all commands share. Start reading at ``commands``.
"""
