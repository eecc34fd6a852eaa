"""Formats: how a row of a data set becomes a question and its answer.

protocol        Format, Question, Wanted: what every format is made of
texts           values of a row as text
described       problem_id, task_type, prompt, verification_info
columns         question and answer columns, whatever they are called; AIME
livecodebench   programs with public and private tests (packed ones are unpacked without unpickling)
code            programs with one column of tests
gpqa            one right and three wrong options
ifeval          verifiable instructions
registry        FORMATS, fit
"""

from shoal.environments.formats.protocol import Format, Question, Row, Wanted
from shoal.environments.formats.registry import FORMATS, fit

__all__ = ["FORMATS", "Format", "Question", "Row", "Wanted", "fit"]
