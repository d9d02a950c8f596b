"""How results are shown: figures, tables, a text Gantt chart, traces for other viewers.

Everything here is a pure function from values to text; reading and writing files is the command line's affair.
"""
