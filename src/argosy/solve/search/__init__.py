"""Branch and bound over pipelines: options, tables, lower bounds, and the search itself.

May import ``space`` and what is below it. Start reading at ``pipeline``, then ``bounds``.
"""
