"""How many units may be alive, and how many of them one node gets: generation stays ahead of training, never too far.

    policy v ─► may serve steps v … v + max_staleness ─► those without a batch yet × groups_per_step = cap
    alive = open + leased + submitted + accepted and not in a batch, never above the cap

A lost unit (equal rewards, or too many attempts) leaves room for its refill. Once a step has lost more than
`refill_cap × groups_per_step`, every further loss lowers the cap instead, and what the step waits for. Counting, not
who came first, decides: that keeps staleness 0 deterministic.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shoal.hub.state.rows import Moment, Rules, RunProgress
from shoal.protocol import PolicyRef

LAST_BATCHES = 5  # the time between so many batches tells how long a step takes
OVERDUE_PART = 4  # nobody knows when an overdue step ends: a quarter of a step is left
SURE = 0.75  # the part of the time left that is counted on: paces vary, and what is submitted has to be judged as well


def is_finished(rules: Rules, progress: RunProgress) -> bool:
    return progress.policy is not None and progress.policy.version >= rules.steps


def overdraw(rules: Rules, progress: RunProgress) -> int:
    return max(0, progress.dropped + progress.failed - rules.refill_cap * rules.groups_per_step)


def steps_served(rules: Rules, progress: RunProgress) -> int:
    if progress.policy is None:
        return 0
    return max(0, min(progress.policy.version + rules.max_staleness, rules.steps - 1) + 1 - progress.next_step)


def serves(rules: Rules, progress: RunProgress, policy: PolicyRef) -> bool:
    """Whether groups by `policy`, perhaps not the newest, may be trained on in a step without a batch."""
    newest = progress.policy
    if newest is None or policy.incarnation != newest.incarnation or policy.version > newest.version:
        return False
    return steps_served(rules, replace(progress, policy=policy)) > 0


def cap(rules: Rules, progress: RunProgress) -> int:
    """The most units that may be alive now. With 16 groups a step and `max_staleness` 1, after version 3: 32."""
    return max(0, rules.groups_per_step * steps_served(rules, progress) - overdraw(rules, progress))


def room(rules: Rules, progress: RunProgress) -> int:
    return max(0, cap(rules, progress) - progress.alive)


def wanted_groups(rules: Rules, progress: RunProgress) -> int:
    return max(0, rules.groups_per_step - overdraw(rules, progress))


def is_stale(rules: Rules, step: int, version: int) -> bool:
    return step - version > rules.max_staleness


@dataclass(frozen=True)
class Tempo:
    step_ms: int
    written_at_ms: int


def tempo(written_at_ms: Sequence[int]) -> Tempo | None:
    if len(written_at_ms) < 2:
        return None
    first, last = written_at_ms[0], written_at_ms[-1]
    return Tempo(max(1, (last - first) // (len(written_at_ms) - 1)), last)


def lease_size(moment: Moment, pace: Tempo | None, pace_ms: int, held: int, count: int) -> int:
    """How many of `count` units a node gets that takes `pace_ms` for one and `held` some already."""
    if pace_ms <= 0:
        return count
    left_ms = moment.rules.lease_hard_ms
    if pace is not None and moment.rules.max_staleness > 0:  # until the batch of the policy's last step is written
        due_ms = pace.step_ms - (moment.now_ms - pace.written_at_ms)
        further = max(1, steps_served(moment.rules, moment.progress)) - 1
        left_ms = min(left_ms, max(due_ms, pace.step_ms // OVERDUE_PART) + further * pace.step_ms)
    return min(count, max(round(SURE * left_ms) // pace_ms - held, int(held == 0)))
