"""Mathematics: the final answer of a completion against the gold answer, by value.

grader      MathematicsGrader, MathVerifyGrader
answer      final_answer: where the answer stands; plain: one spelling for many
reading     readings: what a text says: values with units, lists, brackets, relations
equality    Comparison: when two readings are the same answer
formula     tree, same_value: formulas, compared exactly or to sixty digits
algebra     same: math-verify in a helper process, for what the grammar does not read
"""
