"""Connect Argosy to other libraries' training scripts.

Importing this package alone needs only Argosy; each module needs its own library. May import
``runtime``. Start reading at ``hf``.
"""
