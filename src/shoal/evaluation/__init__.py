"""How good a model is: completions of held-out tasks, scored, with the uncertainty that belongs to every number.

    plan        SamplingPlan: what is sampled, from which seeds; find_leaks: evaluated tasks that are in a training set
    subject     EvaluatedModel, open_subject: the model in an engine, with its digest
    job         EvaluationJob, evaluate: draw, keep, score, batch by batch; rescore: what is kept, scored again
    records     TaskRecord, SampleRecord; EvaluationJournal: those so far, kept; the Parquet file of all
    summary     summary_of: avg@k, pass@k and the rest, for programs and for people
    statistics  intervals and tests: pure functions
    compare     two evaluations of the same tasks
    filter      RateBand: how often tasks are solved; the data set that a filter writes

Importing it does not import torch.
"""
