"""How good a model is: completions of held-out tasks, scored, with the uncertainty that belongs to every number.

    plan        Plan: what is sampled, from which dice; tasks_of
    subject     Subject, open_subject: the model in an engine, with its digest
    drawing     Sampler: completions of tasks
    measuring   Measurement: draw, keep, score, batch by batch; Scoring: of what was drawn
    journal     Journal: completions and scores as they come, kept
    records     TaskRecord, SampleRecord, and the Parquet file of them
    summary     Tally: avg@k, pass@k and the rest, for programs and for people
    statistics  intervals and tests: pure functions
    job         Evaluation, evaluate: one from beginning to end
    rescoring   rescore: kept completions, scored again
    comparing   compare: two evaluations of the same tasks
    leaks       find_leaks: evaluated tasks that are in a training set
    rates       Band, Rate: how often tasks are solved
    selection   the data set that a filter writes

Importing it does not import torch.
"""
