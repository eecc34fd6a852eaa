"""Data sets of any size, read row by row: where they lie, what their rows are, which of them can be used.

options     DatasetOptions: what may be said about a data set in a recipe
locating    locate: which files it consists of, in which order
source      Source: what reads one file
parquet, arrow, jsonl, csv    the kinds of files
table       Table: all files as one, rows numbered through
cache       what was found out about files, kept for the next time
unpacking   files in the cache that packed ones were unpacked to
digest      data_digest: which data it is
prompts     prompt_digest, question_digest: whether two prompts are the same question
problems    Problems: rows that cannot be used
scanning    scan: what must be known of every row
splitting   train and held out, without a question in both
checking    check: every answer, on request
opening     open_data: all of this in order

Nothing here imports numpy or pyarrow before a data set is opened.
"""

from shoal.environments.data.options import DatasetOptions
from shoal.environments.data.prompts import prompt_digest, question_digest

__all__ = ["DatasetOptions", "prompt_digest", "question_digest"]
