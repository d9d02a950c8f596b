"""Simulate a plan on a cluster under traces.

``tasks`` turns a plan into a task graph, and ``engine`` simulates the graph exactly. The modules of
this folder choose how a plan is simulated, and time folded plans and islands without a task graph.
This package may import ``space`` and the packages below it. Start reading at ``simulate``.
"""
