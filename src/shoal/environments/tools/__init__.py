"""Tools: what answers a model's turn. Deterministic, shipped with shoal, and the same on every machine.

Contributors run these, so none may execute what a model writes: a tool reads the text and computes, it runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from shoal.environments.tools.calculator import calculator

Tool = Callable[[Sequence[str]], str | None]
"""All of the model's turns so far, as texts, to what is said to the last one; None if that was the last one.

The same on every machine, for any text, in bounded time; it runs nothing that it reads. A tool never changes under its
name, for workers and validators compare its answers token by token: a better one is another entry.
"""

TOOLS: Mapping[str, Tool] = {"calculator": calculator}
