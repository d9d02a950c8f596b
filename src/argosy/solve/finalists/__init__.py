"""Complete plans: their exact or estimated times, their neighbours, and the final verdict.

May import ``solve.search``. Start reading at ``verdict``, then ``judge``.
"""
