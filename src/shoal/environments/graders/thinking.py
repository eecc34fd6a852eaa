"""The part of a completion that is the answer: what comes after the thinking."""

from __future__ import annotations

import re

OPENING = "<think>"
CLOSING = "</think>"
_MARK = re.compile(f"```|{OPENING}|{CLOSING}")


def after_thinking(completion: str) -> str:
    """What follows the last `</think>`, up to a thinking that is begun after it and never ended.

    Without any `</think>`: nothing if the completion begins with `<think>`, all of it otherwise. A `<think>` further
    down is text, and so is either of the two within a block of code.
    """
    begun, end = completion.lstrip().startswith(OPENING), completion.find(CLOSING)
    if end < 0:
        return "" if begun else completion
    # What was thought may leave a block of code open: where thinking was begun, its first end always counts.
    start = end + len(CLOSING) if begun else None
    cut, in_code = None, False
    for found in _MARK.finditer(completion, start or 0):
        at, mark = found.start(), found[0]
        # outside blocks of code, or on a line that it begins
        if mark == CLOSING and (not in_code or at == 0 or completion[at - 1] == "\n"):
            start, cut, in_code = found.end(), None, False
        elif mark == OPENING:
            cut = at if cut is None and not in_code else cut
        elif mark != CLOSING:
            in_code = not in_code
    return completion if start is None else completion[start:cut]
