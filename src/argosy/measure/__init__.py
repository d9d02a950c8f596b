"""Measure this machine and a model's layers: probes and profiles.

Belongs here: everything that times real devices in order to plan with the result. May import
``runtime``; torch is allowed. Start reading at ``profile``.
"""
