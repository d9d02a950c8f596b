"""Train through the loss of processes and hosts.

One agent per host starts the workers of its devices and holds copies of their state; one of the
agents leads. May import ``runtime.job``. Start reading at ``agent``.
"""
