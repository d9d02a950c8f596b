"""Plans for other systems: one module per target, each of which says what its target cannot express."""
