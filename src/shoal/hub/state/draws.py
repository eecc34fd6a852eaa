"""What a unit consists of: its seeds (secret), its task (public). How audits are drawn.

Seeds are HMAC-SHA256 under the run's secret: nobody knows those of a unit before its lease, and a unit that is issued
again has the same ones. Tasks follow a keyed permutation of the train split, another one in each epoch, so that every
task occurs once per epoch (`protocol.permutation`): no list of a million tasks is shuffled.

Rows of tasks change only in the transaction that writes a batch: with `max_staleness` 0 the tasks of all units follow
from the verdicts alone, in any order. Seed, data and rows are public: anyone can draw the tasks again.
"""

import hashlib
import hmac
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.errors import EnvironmentSetupError
from shoal.hub.state import Command, Moment, Pool, PoolRules, TaskRow, alarm
from shoal.protocol.lease import permute

ROUNDS = 6
MOST_DRAWN = 64  # tasks that are drawn for a unit before it takes what there is
RECENT = 0.5  # the weight of the newest group in the recent pass rate
NO_TASK, EXHAUSTED = "tasks.unusable", "pools.exhausted"


def unit_seeds(secret: bytes, run: str, unit: int, count: int) -> tuple[str, ...]:
    texts = [f"shoal/seed/v1\n{run}\n{unit}\n{index}".encode() for index in range(count)]
    return tuple(hmac.new(secret, text, hashlib.sha256).hexdigest()[:16] for text in texts)


def audit_fraction(secret: bytes, submission: str) -> float:
    """A number in [0, 1) from a submission's bytes and the secret. A worker cannot know whether its bytes will be
    audited fully, and cannot try others: the first stand."""
    return _fraction(hmac.new(secret, b"shoal/audit/v1" + submission.encode(), hashlib.sha256).digest())


def _fraction(digest: bytes) -> float:
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53  # as many bits as a float holds exactly


def task_index(task_count: int, seed: int, unit: int) -> int:
    if task_count < 1:
        raise EnvironmentSetupError("the environment has no tasks in its train split: nothing can be generated")
    epoch, position = divmod(unit, task_count)
    return permute(position, task_count, f"shoal/tasks/v1\n{seed}/{epoch}", ROUNDS)


def candidates(task_count: int, seed: int, unit: int) -> Iterator[int]:
    """A unit's own task of this epoch, then those of `MOST_DRAWN` - 1 other permutations."""
    yield task_index(task_count, seed, unit)
    epoch, position = divmod(unit, task_count)
    for attempt in range(1, MOST_DRAWN):
        yield permute(position, task_count, f"shoal/tasks/v1\n{seed}/{epoch}/again/{attempt}", ROUNDS)


def share(seed: int, unit: int, attempt: int) -> float:
    """A public number in [0, 1) that decides whether a candidate is in the share of its pool that is taken."""
    return _fraction(hashlib.sha256(f"shoal/share/v1\n{seed}\n{unit}\n{attempt}".encode()).digest())


@dataclass(frozen=True)
class Drawn:
    """A task drawn for a unit (None: its data cannot be used), and whether its prompt can be used (None: not known)."""

    task: str | None
    row: TaskRow | None = None
    usable: bool | None = None


@dataclass(frozen=True)
class Pick:
    """The task of a unit (None: none can be used, or candidate number `unknown` has to be made first). `exhausted`: all
    that can be used are retired."""

    task: str | None = None
    exhausted: bool = False
    unknown: int | None = None


def pick(rules: PoolRules | None, seed: int, unit: int, known: Sequence[Drawn]) -> Pick:
    """The first candidate that may be taken; if shares exclude all, the first that is not retired, then the first."""
    passed: list[tuple[bool, int]] = []
    for attempt, each in enumerate(known):
        if each.task is None:
            continue
        if rules is not None and each.row is not None:
            shares = {Pool.EASY: rules.easy_share, Pool.HARD: rules.hard_share, Pool.RETIRED: 0.0}
            if share(seed, unit, attempt) >= shares.get(each.row.pool, 1.0):
                passed.append((each.row.pool is Pool.RETIRED, attempt))
                continue
        if each.usable is None:
            return Pick(unknown=attempt)
        if each.usable:
            return Pick(each.task)
    if len(known) < MOST_DRAWN:
        return Pick(unknown=len(known))
    for retired, attempt in sorted(passed):
        if known[attempt].usable is None:
            return Pick(unknown=attempt)
        if known[attempt].usable:
            return Pick(known[attempt].task, exhausted=retired)
    return Pick()


def alarms(moment: Moment, unit: int, picked: Pick) -> list[Command]:
    if picked.task is None:
        message = f"none of {MOST_DRAWN} tasks drawn for unit {unit} can be used: see the hub's log, and fix the data"
        return [alarm(moment, NO_TASK, message)]
    if picked.exhausted:
        message = f"all of {MOST_DRAWN} tasks drawn for a unit are retired (solved): harder ones would teach more"
        return [alarm(moment, EXHAUSTED, message)]
    return []


@dataclass(frozen=True)
class Result:
    unit: int
    task: str
    rate: float


def fold(rules: PoolRules, known: Mapping[str, TaskRow], results: Sequence[Result]) -> list[Command]:
    rows = dict(known)
    for result in sorted(results, key=lambda each: each.unit):
        rows[result.task] = after(rules, rows.get(result.task), result)
    return [row for task, row in rows.items() if row != known.get(task)]


def after(rules: PoolRules, row: TaskRow | None, result: Result) -> TaskRow:
    before = row or TaskRow(result.task)
    rate = result.rate if before.groups == 0 else RECENT * result.rate + (1 - RECENT) * before.rate
    solved = before.solved + 1 if result.rate >= 1 else 0
    if rules.retire_after and solved >= rules.retire_after:
        pool = Pool.RETIRED
    else:
        pool = Pool.EASY if rate >= rules.easy else Pool.HARD if rate <= rules.hard else Pool.NORMAL
    return replace(before, groups=before.groups + 1, rate=rate, solved=solved, last_unit=result.unit, pool=pool)
