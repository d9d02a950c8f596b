"""Read and write the files of a gravity run: snapshots, their headers, restart files, light cones.

This package may import the particles and the cosmology, but no forces. Start reading at
``snapshot``.
"""
