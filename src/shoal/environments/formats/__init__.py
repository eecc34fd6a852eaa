"""Formats: how a row of a data set becomes a question and its answer.

protocol    Format, Question, Wanted: what every format is made of; values of a row as text
columns     the described schema; question and answer columns, whatever they are called; AIME, GPQA, IFEval
programs    LiveCodeBench, and programs with one column of tests
registry    FORMATS, fit; DatasetOptions: what may be said about a data set in a recipe
"""
