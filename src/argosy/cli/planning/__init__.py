"""Commands that plan, simulate, explain, compare, report and export.

May import ``cli.gravity`` and the ``cli`` modules that all commands share. Start reading at
``plan``.
"""
