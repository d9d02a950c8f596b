"""Cluster files from what people have already: host files, Slurm's topology, NCCL's and the driver's view of a node."""
