"""An emulated motley cluster on one Linux machine: a network namespace for every node, shaped links
that follow their traces while a job runs, and a share of a core for every device."""

from argosy.lab.lab import Lab

__all__ = ["Lab"]
