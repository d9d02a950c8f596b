"""Move tensors between ranks, and record what was moved when.

Belongs here: transports, collectives with parts of unequal size, regions of tensors, and the
marks from which a measured timeline is made. May import ``runtime.processes``.
Start reading at ``transport``.
"""
