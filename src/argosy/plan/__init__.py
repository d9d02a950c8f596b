"""The plan: a frozen value, its file, its rules, and which of it our own runtime executes."""
