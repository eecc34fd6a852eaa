"""Measures a model: scored completions of held-out tasks, with confidence intervals. Imports no torch.

plan        SamplingPlan: tasks, samples, seeds; find_leaks: evaluated tasks that are in a training set
subject     EvaluatedModel, open_subject: the model in an engine, with its digest
job         EvaluationJob, evaluate: draw, store and score, batch by batch; rescore: score stored completions again
records     TaskRecord, SampleRecord; EvaluationJournal while it runs; the Parquet file at the end
summary     summary_of: avg@k, pass@k and other figures
statistics  intervals and tests: pure functions
compare     two evaluations of the same tasks
filter      RateBand: solve rates; the data set that a filter writes
"""
