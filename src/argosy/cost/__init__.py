"""What a plan takes: seconds of compute, bytes of memory, bytes on the network."""
