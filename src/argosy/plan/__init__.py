"""The plan: a frozen value, its file, its rules, and which systems can run it.

May import ``schedule``, ``workload`` and ``cluster``. Start reading at ``plan``.
"""
