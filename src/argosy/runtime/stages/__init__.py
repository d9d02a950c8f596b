"""Compute stages: ranges of layers, or operations shared by a group of devices.

Belongs here: forward and backward of one micro-batch on one rank, and what they need: dropout
masks, deferred weight gradients, ring attention, experts. May import ``runtime.graphs``. Start
reading at ``stage``, then ``graph_stage`` and ``tensor_stage``.
"""
