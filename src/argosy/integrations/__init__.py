"""Doors into other people's training scripts. Importing this alone needs nothing but Argosy."""
