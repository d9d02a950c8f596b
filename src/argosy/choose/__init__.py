"""Choose between plans when the network changes, when money counts, or when links are very slow.

This package holds scenarios, robust choices, re-planning policies, prices, and plans of islands. It
may import everything up to ``explain``. Start reading at ``scenario``.
"""
