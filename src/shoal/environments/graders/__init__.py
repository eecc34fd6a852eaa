"""Graders: what a completion of one kind of task is worth. A data set's rows name theirs (`task_type`).

protocol       Grader: what every grader implements
thinking       after_thinking: the part of a completion that is the answer
mathematics    MathematicsGrader: the final answer, by value; MathVerifyGrader: what math-verify says
code           CodeGrader: a Python program against tests, in a sandbox
choice         ChoiceGrader: a letter among several (GPQA); ExactGrader: the very text
instructions   InstructionsGrader: verifiable instructions (IFEval)
registry       GRADERS, grader
"""

from shoal.environments.graders.protocol import Grader

__all__ = ["Grader"]
