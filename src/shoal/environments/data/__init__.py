"""Data sets of any size, read row by row: where they lie, what their rows are, which of them can be used.

locating    locate: which files it consists of, in which order
cache       what was found out about files, kept for the next time; digests of files
readers     Source: what reads one file, of each kind; Table: all files as one, rows numbered through
scanning    open_data: what must be known of every row; Splits: no question is in both; check: every answer, on request

Nothing here is imported before a data set is opened: numpy and pyarrow take a moment to load.
"""
