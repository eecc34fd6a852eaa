"""Tools: what answers a model's turn. Deterministic, shipped with shoal, and the same on every machine.

Contributors run these, so none may execute what a model writes: a tool reads the text and computes, it runs nothing.

    registry    TOOLS, Tool: which there are, and what one promises
    calculator  expressions get their value
    arithmetic  evaluate, shown: exact values of expressions, everything capped
"""

from shoal.environments.tools.registry import TOOLS, Tool

__all__ = ["TOOLS", "Tool"]
