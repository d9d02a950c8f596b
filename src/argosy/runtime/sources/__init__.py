"""Build the stages of a plan from a user's model: from its layers or from its operations.

May import ``runtime.weights``. Start reading at ``source``.
"""
