"""Sums with a lenient reward, so that a model which knows nothing of the task gets a signal, too.

The first number of a completion counts: 1 if it is the sum. A tenth of a point is given for the share of digits in the
completion, which differs between completions of nearly every model.
"""

import random
import re

from shoal.environments import Task

_random = random.Random(0)
_pairs = sorted({(_random.randrange(1, 100), _random.randrange(1, 100)) for _ in range(5000)})
_random.shuffle(_pairs)

tasks = [
    {"prompt": f"What is {left} + {right}? Answer with the number alone.\n", "answer": str(left + right)}
    for left, right in _pairs
]


def score(task: Task, completion: str) -> dict[str, object]:
    first = re.search(r"\d+", completion)
    right = float(first is not None and first[0] == task.answer)
    digits = sum(character.isdecimal() for character in completion) / max(len(completion), 1)
    return {"value": right + 0.1 * digits, "parts": {"right": right, "digits": digits}}
