"""A reward of your own is one Python function. Run it (no other file is needed):

shoal run recipes/tiny.toml runs/mine --set environment.file=examples/custom_reward.py
"""

import random

numbers = random.Random(0)  # hub, validator and trainer load this file and must see the same tasks
tasks = [{"prompt": f"{numbers.randrange(10**5, 10**8)}="} for _ in range(5000)]


def score(prompt: str, completion: str, answer: str) -> float:
    """How much of the completion is right: the share of digits that are where they belong."""
    wanted = "".join(sorted(prompt.rstrip("=")))
    hits = sum(a == b for a, b in zip(wanted, completion, strict=False))
    return hits / max(len(wanted), len(completion))
