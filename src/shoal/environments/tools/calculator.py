"""The calculator: a turn that is an expression gets its value, a turn that is anything else is the model's answer."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.environments.tools.arithmetic import NoValue, evaluate, is_number, shown

ERROR = "error"
_SIGNS = frozenset("0123456789.+-*/^()= \t\n\r")
_DIGITS = frozenset("0123456789")


def calculator(turns: Sequence[str]) -> str | None:
    """What is said to the last turn. A bare number is a question the first time, and an answer ever after.

    So a dialogue is: calculate once or more, then say the result; or say in words what it is at once.

    >>> calculator(["12*(3+4)="]), calculator(["12*("]), calculator(["12*(3+4)=", "84"]), calculator(["it is 84"])
    ('84', 'error', None, None)
    """
    turn = turns[-1].strip(" \t\n\r")
    if not _DIGITS & set(turn) or not set(turn) <= _SIGNS:
        return None
    if len(turns) > 1 and is_number(turn):
        return None
    try:
        return shown(evaluate(turn.removesuffix("=")))
    except NoValue:
        return ERROR
