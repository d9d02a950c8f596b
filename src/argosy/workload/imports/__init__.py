"""Read measured profiles of other systems: DAPPLE and Sailor.

May import ``workload.chain`` and ``workload.profile``. Start reading at ``dapple``.
"""
