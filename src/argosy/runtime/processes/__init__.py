"""The processes of a run: ranks, where they meet, how they fail, and the folder they share.

May import nothing else of ``runtime``. Most modules need no torch. Start reading at ``world``.
"""
