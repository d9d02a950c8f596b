"""A user's torch program as a ``Graph``: the only part of the workload that imports torch."""
