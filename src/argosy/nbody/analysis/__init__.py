"""Analyse a box: halos, power spectra, pictures and movies.

May import ``nbody.force`` for its mesh. Start reading at ``power``.
"""
