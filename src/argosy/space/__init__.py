"""The space of choices: pools of equal devices, options of a stage, pruning rules, placement.

May import ``cost`` and what is below it. Start reading at ``option``.
"""
