"""Simulate a plan on a cluster under traces.

``tasks`` turns a plan into a task graph, ``engine`` plays the graph exactly; modules of this folder
decide how a plan is played, and time folded plans and islands without a task graph.
May import ``space`` and what is below it. Start reading at ``simulate``.
"""
