"""Verifiable instructions (IFEval): did the answer do what it was told, each instruction by itself?

grader      InstructionsGrader: all of them, or 0
checks      one function per instruction: CHECKS
words       words, sentences, paragraphs
languages   which language a text is in, by script and common words
"""

from shoal.environments.graders.instructions.grader import InstructionsGrader

__all__ = ["InstructionsGrader"]
