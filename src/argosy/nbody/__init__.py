"""Gravity in a periodic box: the second workload, on the same clusters, cut and controller."""
