"""Plans for other systems: one module per target, each of which lists what its target cannot
express.

``write.py`` calls them by the name of a system; ``form.py`` is where to start reading.
"""
