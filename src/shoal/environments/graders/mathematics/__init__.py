"""Mathematics: the final answer of a completion against the gold answer, by value (`grader`)."""
