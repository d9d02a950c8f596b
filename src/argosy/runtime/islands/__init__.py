"""Train in islands: groups of processes that train alone and exchange parameters every H steps.

May import ``runtime.job``. Start reading at ``training``.
"""
