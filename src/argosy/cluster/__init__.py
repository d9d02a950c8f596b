"""On what it is computed: devices, multi-edge links, and how both change over time."""
