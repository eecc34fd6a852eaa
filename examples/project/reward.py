"""Your tasks and your reward. Hub, trainer and validators load this file; workers never see it.

After a change to it start a new run, in another folder: a validator that finds another file scores nothing.
"""

import random

numbers = random.Random(0)  # several processes load this file and must see the same tasks
tasks = [{"prompt": f"{numbers.randrange(10**5, 10**8)}="} for _ in range(5000)]
# A task may also have an "answer", an "id" and a "split" ("train" or "held_out"; without it some are held out).


def score(prompt: str, completion: str, answer: str) -> float:
    """The reward: here, the share of the prompt's digits that the completion has in ascending order."""
    wanted = "".join(sorted(prompt.rstrip("=")))
    hits = sum(a == b for a, b in zip(wanted, completion, strict=False))
    return hits / max(len(wanted), len(completion))
