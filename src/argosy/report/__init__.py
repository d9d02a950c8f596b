"""How results are shown: figures, tables, a text Gantt chart, traces for other viewers.

Functions from values to text. Files are the command line's affair, but for what a run decided,
which is read here, and a page that a notebook saves.
"""
