"""Provide the processes of a run with ranks, a rendezvous, a shared folder, and notes of failures.

May import nothing else of ``runtime``. Most modules need no torch. Start reading at ``world``.
"""
