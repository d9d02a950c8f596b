"""Write plans for other systems: one module per target lists what its target cannot express.

``write.py`` calls them by the name of a system; start reading at ``form.py``.
"""
