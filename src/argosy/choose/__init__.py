"""Choose between plans when the network changes, when money counts, or when links are very slow.

Belongs here: scenarios, robust choices, re-planning policies, prices, and plans of islands.
May import everything up to ``explain``. Start reading at ``scenario``.
"""
