"""Compute the force on GPUs, in torch and Triton.

This package may import ``nbody.force``, ``nbody.motion`` and ``nbody.processes``. Start reading at
``force``.
"""
