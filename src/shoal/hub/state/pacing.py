"""How many units may be alive: what keeps generation ahead of training, but never too far.

    policy v ─► may serve steps v … v + max_staleness ─► those without a batch yet × groups_per_step = cap
                                                                      │
    alive = open + leased + submitted + accepted and not in a batch ──┴─ never above the cap

A lost unit (equal rewards, or too many attempts) leaves room for another one, its refill. Once a step has lost more
than `refill_cap × groups_per_step`, every further loss lowers the cap instead, and by as much what the step waits
for: the step takes what there is. Counting it this way, and not by who came first, keeps staleness 0 deterministic.
"""

from __future__ import annotations

from shoal.hub.state.rows import Progress, Rules


def is_finished(rules: Rules, progress: Progress) -> bool:
    return progress.policy is not None and progress.policy.version >= rules.steps


def overdraw(rules: Rules, progress: Progress) -> int:
    """Losses of the next step beyond what is refilled."""
    return max(0, progress.dropped + progress.failed - rules.refill_cap * rules.groups_per_step)


def cap(rules: Rules, progress: Progress) -> int:
    """The most units that may be alive now.

    With 16 groups a step and `max_staleness` 1, right after version 3 is out and before batch 3: 32.
    """
    if progress.policy is None:
        return 0
    last_step = min(progress.policy.version + rules.max_staleness, rules.steps - 1)
    steps_served = last_step + 1 - progress.next_step
    return max(0, rules.groups_per_step * steps_served - overdraw(rules, progress))


def room(rules: Rules, progress: Progress) -> int:
    """How many units may be made now."""
    return max(0, cap(rules, progress) - progress.alive)


def wanted_groups(rules: Rules, progress: Progress) -> int:
    """How many groups the next batch waits for: fewer than usual once its refills are used up."""
    return max(0, rules.groups_per_step - overdraw(rules, progress))


def is_stale(rules: Rules, step: int, version: int) -> bool:
    """Whether a group of `version` is too old for `step`."""
    return step - version > rules.max_staleness
