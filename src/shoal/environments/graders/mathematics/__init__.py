"""Mathematics: the final answer of a completion against the gold answer, by value.

grader      MathematicsGrader
answer      final_answer: where the answer stands
normal      plain: one spelling for many
forms       Value, Group, Matrix, Relation, Words
reading     readings: which of the forms a text has; values, units: what a single value says
equality    Comparison: when two readings are the same answer, with the rules; relations
expression  tree: formulas; tokens
evaluate    same_value: formulas compared; exact, numeric
symbolic    same: math-verify in a helper process, for what the grammar does not read; helper
"""

from shoal.environments.graders.mathematics.grader import MathematicsGrader

__all__ = ["MathematicsGrader"]
