"""Show results as figures, tables, a text Gantt chart, and traces for other viewers.

The functions turn values into text. The command line reads and writes the files, with two
exceptions: the decisions of a run are read here, and a notebook can save a page.
"""
