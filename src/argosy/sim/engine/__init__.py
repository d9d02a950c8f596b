"""The exact engine: discrete events, links shared by max-min fairness, exact traces.

May import nothing else of ``sim``. Start reading at ``graph``, then ``exact``.
"""
