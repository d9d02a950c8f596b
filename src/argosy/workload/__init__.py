"""Describe the workload: a chain of layers from a config, a preset, a profile or a captured
program.

Belongs here: layers with FLOP, bytes and weights, fine-tuning, optimizers, and the graph of a
captured step. May import ``document``, ``units`` and ``errors``. Start reading at ``chain``.
"""
