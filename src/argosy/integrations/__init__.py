"""Plug-ins for other people's training scripts.

Importing this package alone needs only Argosy; each module needs its own library.
May import ``runtime``. Start reading at ``hf``.
"""
