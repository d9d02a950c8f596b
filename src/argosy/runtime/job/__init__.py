"""Run ``argosy run``: launch processes, check that they agree, train, adapt, report metrics.

May import ``runtime.step``. Modules that only launch need no torch. Start reading at ``worker``.
"""
