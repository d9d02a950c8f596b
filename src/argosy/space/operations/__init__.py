"""Shard single operations: states of tensors, rules per operation, segments of a step.

This package may import ``workload.graph`` and ``cost``. Start reading at ``sharding``, then
``rules``.
"""
