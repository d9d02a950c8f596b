"""Files of a gravity run: snapshots, their headers, restart files and light cones.

May import the particles and the cosmology, no forces. Start reading at ``snapshot``.
"""
