"""What a group's rewards say about its task: the task's own part of them, without what length or a judge added."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from shoal.protocol import RolloutReward

TASK_PART = "task"
JUDGE_PART = "judge."


def task_rewards(rewards: Sequence[RolloutReward]) -> list[float]:
    """The part `task` of every reward; the whole ones, unless all have that part.

    >>> task_rewards([RolloutReward(value=0.7, parts={"task": 1.0}), RolloutReward(value=0.9, parts={"task": 1.0})])
    [1.0, 1.0]
    """
    if all(TASK_PART in reward.parts for reward in rewards):
        return [reward.parts[TASK_PART] for reward in rewards]
    return [reward.value for reward in rewards]


def has_equal_rewards(rewards: Sequence[RolloutReward], of: Literal["task", "total"] = "task") -> bool:
    """Whether a group teaches nothing: the task's part of the reward (else the whole) is the same everywhere; or, `of`
    the total, the whole is.

    By the task's part, a length bonus may differ while the task's answer does not; such a group is dropped all the
    same. What judges say is worth learning, also where the task's own reward is the same. A group of one rollout has
    nothing to compare with and is kept.
    """
    if of == "total":
        return len(rewards) > 1 and len({reward.value for reward in rewards}) == 1
    judged = [sorted(item for item in reward.parts.items() if item[0].startswith(JUDGE_PART)) for reward in rewards]
    told = {(task, *said) for task, said in zip(task_rewards(rewards), judged, strict=True)}
    return len(rewards) > 1 and len(told) == 1


def pass_rate(rewards: Sequence[RolloutReward]) -> float | None:
    """How much of its task a group solved, 0 to 1; None of an empty group. The same in whatever order they come.

    >>> pass_rate([RolloutReward(value=1.0), RolloutReward(value=-0.5)])
    0.5
    """
    solved = [min(1.0, max(0.0, value)) for value in task_rewards(rewards)]
    return math.fsum(solved) / len(solved) if solved else None
