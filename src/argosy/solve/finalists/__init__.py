"""Judge complete plans: exact or estimated times, neighbours of plans, and the final verdict.

This package may import ``solve.search``. Start reading at ``verdict``, then ``judge``.
"""
