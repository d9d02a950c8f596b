"""Simulate discrete events exactly: links shared by max-min fairness, exact traces.

This package may import nothing else of ``sim``. Start reading at ``graph``, then ``exact``.
"""
