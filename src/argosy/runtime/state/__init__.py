"""Save, load and migrate training state between steps.

May import ``runtime.sources``. Start reading at ``checkpoint``, then ``migrate``.
"""
