"""Define the plan: a frozen value, its file, its rules, and the systems that can run it.

May import ``schedule``, ``workload`` and ``cluster``. Start reading at ``plan``.
"""
