"""Execute one training step, and repeat it in a trainer.

Belongs here: the executor of a schedule, batches, evaluation, and ``parallelize``. May import
``runtime.state``. Start reading at ``executor``, then ``trainer``.
"""
