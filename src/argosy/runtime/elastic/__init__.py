"""A job that outlives the loss of processes and hosts. One agent per host starts the workers of its devices and holds
copies of their state; one of the agents leads. ``agent`` is the place to start reading."""
