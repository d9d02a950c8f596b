"""Compare the cost model with measured runs, and fit its constants to them.

Belongs here: readers of published tables, predictions of measured runs, and the fit.
May import everything up to ``sim``. Start reading at ``fit``.
"""
