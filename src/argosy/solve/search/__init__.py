"""Search pipelines by branch and bound: options, tables, lower bounds, and the search itself.

This package may import ``space`` and the packages below it. Start reading at ``pipeline``, then
``bounds``.
"""
