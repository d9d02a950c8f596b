"""Training state outside of a step: checkpoints, and moves from one plan to another.

May import ``runtime.sources``. Start reading at ``checkpoint``, then ``migrate``.
"""
