"""Sharding of single operations: states of tensors, rules per operation, segments of a step.

May import ``workload.graph`` and ``cost``. Start reading at ``sharding``, then ``rules``.
"""
