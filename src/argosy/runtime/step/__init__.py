"""One training step, and the trainer that repeats it.

Belongs here: the executor of a schedule, batches, evaluation, and ``parallelize``.
May import ``runtime.state``. Start reading at ``executor``, then ``trainer``.
"""
