"""Data sets of any size, read row by row. Imported only when one is opened: numpy and pyarrow take a moment to load."""
