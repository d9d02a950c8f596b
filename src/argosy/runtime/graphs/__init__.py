"""Turn operations of a captured program into calls, and divide them into stages.

Belongs here: what an operation does to samples, which operations a stage runs, and how one device
runs an operation on its shard. May import ``runtime.communication``. Start reading at ``cut``.
"""
