"""Analyse a box: halos, power spectra, pictures and movies.

This package may import ``nbody.force`` for its mesh. Start reading at ``power``.
"""
