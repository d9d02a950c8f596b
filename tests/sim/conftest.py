"""What pytest must not import here."""

collect_ignore = ["simgrid_oracle.py"]  # for the interpreter that has SimGrid, which is another one
