"""What to do when the world has changed: watch, decide, and the same controller played in the simulator. No torch."""
