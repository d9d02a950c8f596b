"""The same force on GPUs, in torch and Triton.

May import ``nbody.force``, ``nbody.motion`` and ``nbody.processes``. Start reading at ``force``.
"""
