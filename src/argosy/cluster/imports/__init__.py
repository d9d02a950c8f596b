"""Read cluster descriptions that exist already: host files, Slurm, NCCL and driver output.

May import ``cluster``. Start reading at ``hosts``.
"""
