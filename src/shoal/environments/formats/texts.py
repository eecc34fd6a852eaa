"""Values of a row as text: prompts that may be conversations, answers that may be anything, JSON that may be text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.environments.formats.protocol import ROLES
from shoal.errors import UnusableTask

Conversation = tuple[str, tuple[tuple[str, str], ...]]
BOXES = ("\\boxed{", "\\fbox{")


def conversation(value: object, column: str) -> Conversation:
    """A prompt and what was said before it, of a text or of a list of messages that ends with the user's.

    >>> conversation([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}], "prompt")
    ('2+2?', (('system', 'Be brief.'),))
    """
    if isinstance(value, str):
        return required(value, column), ()
    said = messages_of(value, column)
    if not said or said[-1][0] != "user":
        raise UnusableTask(f"{column} must end with a message of the user")
    return required(said[-1][1], column), said[:-1]


def messages_of(value: object, column: str) -> tuple[tuple[str, str], ...]:
    """A list of messages as (role, text); a system message is the first or none.

    >>> messages_of([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}], "messages")
    (('user', '2+2?'), ('assistant', '4'))
    """
    if value is None:
        raise UnusableTask(f"{column} is missing")
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise UnusableTask(f"{column} is {type(value).__name__}, neither text nor a list of messages")
    said = [_message(message, column) for message in value]
    if any(role == "system" for role, _ in said[1:]):
        raise UnusableTask(f"{column} has a system message that is not its first")
    return tuple(said)


def _message(message: object, column: str) -> tuple[str, str]:
    if not isinstance(message, Mapping):
        raise UnusableTask(f"{column} holds a message that is no {{role, content}}")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise UnusableTask(f"{column} holds a message of the role {role!r}; roles are {', '.join(sorted(ROLES))}")
    if not isinstance(content, str):
        raise UnusableTask(f"{column} holds a message whose content is no text")
    return str(role), content


def required(value: object, column: str) -> str:
    """Text that must not be missing or empty."""
    if value is None:
        raise UnusableTask(f"{column} is missing")
    if not isinstance(value, str):
        raise UnusableTask(f"{column} is {type(value).__name__}, not text")
    if not value.strip():
        raise UnusableTask(f"{column} is empty")
    return value


def answer_text(value: object, column: str) -> str:
    """An answer of any simple type as text: numbers as they are written, lists and mappings as JSON.

    Of `true` nobody can say how a model should write it (yes? True? correct?), so its row must.
    """
    if isinstance(value, bool):
        raise UnusableTask(f"{column} is {json.dumps(value)}, neither text nor a number: write it as text")
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        finite(value, column)
        return str(int(value)) if value.is_integer() else repr(value)
    if isinstance(value, list | dict):
        return json.dumps(value)
    return required(value, column)


def finite(value: object, column: str) -> None:
    """Refuse a number that is none: as text, `nan` would be an answer like any other."""
    if isinstance(value, float) and not math.isfinite(value):
        raise UnusableTask(f"{column} is {value}, which is no number")


def parsed(value: object, column: str) -> Any:
    """What a column holds as JSON text, or already holds as a value."""
    if not isinstance(value, str | bytes):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise UnusableTask(f"{column} is no JSON: {_short(error)}") from None


def final_answer(text: str) -> str:
    """What a worked solution comes to: what follows `####`, or the last box; the text itself if it has neither.

    >>> final_answer("3 times 4 is 12. #### 12"), final_answer("so $x=\\\\boxed{\\\\frac{1}{2}}$."), final_answer("7")
    ('12', '\\\\frac{1}{2}', '7')
    """
    _work, mark, after = text.rpartition("####")
    if mark:
        return after.strip()
    return _last_box(text) or text


def _last_box(text: str) -> str:
    start = max(text.rfind(box) + len(box) if box in text else -1 for box in BOXES)
    if start < 0:
        return ""
    depth = 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end].strip()
    return ""


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:120]
