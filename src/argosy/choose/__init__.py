"""Which plan is best when the network changes, or when money counts."""
