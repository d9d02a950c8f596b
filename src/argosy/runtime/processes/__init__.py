"""Manage the processes of a run: ranks, rendezvous, failures, and the folder they share.

May import nothing else of ``runtime``. Most modules need no torch. Start reading at ``world``.
"""
