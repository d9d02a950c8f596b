"""Define the cluster: device kinds, nodes, links, routes, and how they change over time.

Belongs here: the topology, traces, and readers and writers of cluster files. May import
``document``, ``units`` and ``errors``. Start reading at ``topology``, then ``trace``.
"""
