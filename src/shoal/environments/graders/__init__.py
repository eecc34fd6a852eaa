"""Graders: what a completion of one kind of task is worth. A data set's rows name theirs (`task_type`).

registry       Grader: what every grader implements; GRADERS, grader
thinking       after_thinking: the part of a completion that is the answer
mathematics    MathematicsGrader: the final answer, by value; MathVerifyGrader: what math-verify says
code           CodeGrader: a Python program against tests, in a sandbox; code_tests: the tests, and what equals what
choice         ChoiceGrader: a letter among several (GPQA); ExactGrader: the very text
"""
