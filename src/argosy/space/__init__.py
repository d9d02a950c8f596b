"""Define the search space: pools of equal devices, options of a stage, pruning rules, placement.

This package may import ``cost`` and the packages below it. Start reading at ``option``.
"""
