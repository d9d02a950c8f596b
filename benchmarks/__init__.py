"""Benchmarks: figures that the README may quote, each as a ratio against a baseline of the same
run."""
