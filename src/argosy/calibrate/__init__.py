"""How well the cost model predicts runs that somebody measured, and what its constants should be there."""
