"""Capture a user's torch program as a ``Graph``, without its weights in memory.

This is the only part of ``workload`` that imports torch. Start reading at ``trace``.
"""
