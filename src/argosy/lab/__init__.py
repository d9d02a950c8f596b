"""Emulate a cluster of unequal devices on one Linux machine.

A lab has a network namespace for every node, shaped links that follow their traces while a job
runs, and a share of a core for every device.
"""

from argosy.lab.lab import Lab

__all__ = ["Lab"]
