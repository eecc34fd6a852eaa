"""The supervised warm start: demonstrations in, a model that imitates them out, on the pieces that RL trains with.

reading     Demonstrations, Demonstration: rows of files as conversations or text
encoding    Encoder, Sequence: token ids once, and which of them are learnt
likeness    whether two demonstrations are the same, or nearly
filters     what a demonstration must be; each reason is counted
judged      filters that ask somebody: the environment (verified), a reward model (rank), the held-out set
choosing    choose: rows through the filters, in one pass, into a corpus
corpus      Corpus: the tokens that were chosen, in files, read where they lie
report      what became of every row: a table for people, a Parquet file
course      Course: which sequences each step is trained on, and at which rate
closing     judge_last: whether the last version still knows what it was trained on
training    WarmStart: the loop, its checkpoints and its export
"""
