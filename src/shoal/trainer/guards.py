"""Guards: a run that goes wrong says so early, and ends as a failure, not as a model.

    rows so far ──► rate_factor ─► the step's learning rate
         │
         ├──► veto ◄─ each update's numbers, before it is made          skip, stop: it is not made
         │
         └──► judge ◄─ the step's numbers ──► alarm_NAME in the row, sentences for log and hub
                                              stop: TrainingDiverged, before the version is saved or published

Everything is a function of the rows in metrics.jsonl (which a resume cuts back to its checkpoint) and of the numbers at
hand: a resumed run decides as the uninterrupted one did, and no state is saved. What is measured is in `guard_rules`.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.errors import TrainingDiverged
from shoal.trainer.guard_rules import LOWER_RATE, RULES, Row, Rule
from shoal.trainer.guard_settings import GuardSettings

log = logging.getLogger(__name__)

CALM = 5  # rows without it end an episode: what comes back after that is said again
SETTLE = 10  # rows between two reductions of the rate: the effect of one shows after a while
LOOKBACK = 20  # versions: more than any guard needs to notice; a checkpoint from before that is kept
OLDEST_SHOWN = 15
NOT_FINITE = "not_finite"
RUN_OF_NOT_FINITE = "not_finite_updates"  # how many there were in a row when the step ended


@dataclass(frozen=True)
class Alarm:
    """A guard whose limit is passed. `is_new`: it was calm before, so people hear of it.

    `seen` says what was seen, against which limit; `advice` what it usually means, and what to do.
    """

    name: str
    step: int
    value: float
    react: str
    is_new: bool
    seen: str
    advice: str

    @property
    def code(self) -> str:
        return f"guard.{self.name}"

    @property
    def message(self) -> str:
        return f"{self.seen}. {self.advice}"


@dataclass(frozen=True)
class Judged:
    """What the guards say of a step: numbers for its row, and alarms."""

    alarms: tuple[Alarm, ...]
    numbers: Mapping[str, float]

    def news(self) -> dict[str, str]:
        """Code → sentence, of those that people should hear of now."""
        return {alarm.code: alarm.message for alarm in self.alarms if alarm.is_new or alarm.react == "stop"}

    def by_step(self) -> dict[int, dict[str, str]]:
        """The same, if there is any, by the step that it is of."""
        return {self.alarms[0].step: self.news()} if self.news() else {}

    @property
    def stops(self) -> bool:
        return any(alarm.react == "stop" for alarm in self.alarms)

    def refuse(self, folder: Path, versions: Iterable[int]) -> None:
        """Raise `TrainingDiverged` if a guard stops the run; `versions` are those of the checkpoints in `folder`."""
        for alarm in self.alarms:
            if alarm.react == "stop":
                raise TrainingDiverged(f"{alarm.message}. {_way_back(alarm, folder, versions)}")


# ── pure functions of rows ───────────────────────────────────────────────────────────────────────────────────────


def judge(settings: GuardSettings, rows: Sequence[Row], row: Row) -> tuple[Alarm, ...]:
    """The alarms of a step, from the rows before it and its own numbers."""
    found = []
    for name, rule in RULES.items():
        guard = getattr(settings, name)
        value = rule.of_step(rows, row) if guard.react != "off" else None
        if value is not None and rule.beyond(value, guard.limit):
            found.append(_alarm(settings, name, value, rows, int(row.get("step", len(rows)))))
    return tuple(found)


def rate_factor(settings: GuardSettings, rows: Sequence[Row]) -> float:
    """What the next step's learning rate is multiplied by: the last one's factor, less if a guard slows.

    It never rises again by itself: what was too fast once is too fast.
    """
    factor = float(rows[-1].get("rate_factor", 1.0)) if rows else 1.0
    slowing = [name for name in RULES if getattr(settings, name).react == "slow"]
    if not rows or not any(f"alarm_{name}" in rows[-1] for name in slowing):
        return factor
    settled = all(row.get("rate_factor", 1.0) == factor for row in rows[-SETTLE:])
    return factor * settings.slow_factor if settled else factor


def is_new(name: str, rows: Sequence[Row]) -> bool:
    return not any(f"alarm_{name}" in row for row in rows[-CALM:])


def staleness_shares(ages: Sequence[int]) -> dict[str, float]:
    """The histogram of a step's groups by age, as shares; the last one holds all that are older.

    >>> staleness_shares([0, 1, 1, 1])
    {'staleness_0': 0.25, 'staleness_1': 0.75}
    """
    counts = Counter(min(age, OLDEST_SHOWN) for age in ages)
    return {f"staleness_{age}": counts[age] / len(ages) for age in range(max(counts, default=-1) + 1)}


def needs_lookback(settings: GuardSettings) -> bool:
    """Whether an older checkpoint must be kept: some guard stops the run on what began some steps ago."""
    return any(rule.rows > 1 and getattr(settings, name).react == "stop" for name, rule in RULES.items())


# ── what a training run holds ────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Watch:
    """The guards of a run: `resume` with the rows there are, then for every step `begin`, `veto`, `judge`, `add`."""

    settings: GuardSettings
    rows: list[Row] = field(default_factory=list)
    _step: int = 0
    _factor: float = 1.0
    _not_finite: int = 0
    _refused: dict[str, Alarm] = field(default_factory=dict)

    def resume(self, rows: Iterable[Row]) -> None:
        self.rows = list(rows)

    def begin(self, step: int) -> float:
        """A step comes: what its learning rate is multiplied by."""
        self._step, self._refused = step, {}
        self._not_finite = int(self.rows[-1].get(RUN_OF_NOT_FINITE, 0)) if self.rows else 0
        self._factor = rate_factor(self.settings, self.rows)
        return self._factor

    def veto(self, numbers: Mapping[str, float]) -> str | None:
        """Why this update must not be made; None if it may. Called before each, with its numbers."""
        stopped = [alarm for alarm in self._refused.values() if alarm.react == "stop"]
        if stopped:
            return stopped[0].seen
        if not all(math.isfinite(numbers.get(name, 0.0)) for name in ("loss", "grad_norm")):
            return self._refuse(self._not_a_number())
        self._not_finite = 0
        for name, rule in RULES.items():
            value = self._vetoed(name, rule, numbers)
            if value is not None:
                return self._refuse(_alarm(self.settings, name, value, self.rows, self._step))
        return None

    def judge(self, metrics: Row) -> Judged:
        """What is wrong with the step that was trained, and the numbers that its row must hold."""
        measured = judge(self.settings, self.rows, {**metrics, "step": self._step})
        alarms = {alarm.name: alarm for alarm in measured} | self._refused
        numbers = {"rate_factor": self._factor} | {f"alarm_{name}": alarm.value for name, alarm in alarms.items()}
        if self._not_finite:
            numbers[RUN_OF_NOT_FINITE] = float(self._not_finite)
        judged = Judged(tuple(alarms.values()), numbers)
        for sentence in judged.news().values():
            log.warning("%s", sentence)
        return judged

    def add(self, row: Row) -> None:
        """The row of the step, as it was written."""
        self.rows.append(row)

    def _vetoed(self, name: str, rule: Rule, numbers: Row) -> float | None:
        guard = getattr(self.settings, name)
        if rule.of_update is None or guard.react not in ("skip", "stop"):
            return None
        value = rule.of_update(self.rows, numbers)
        return value if rule.beyond(value, guard.limit) else None

    def _refuse(self, alarm: Alarm) -> str:
        self._refused[alarm.name] = alarm
        return alarm.seen

    def _not_a_number(self) -> Alarm:
        self._not_finite += 1
        guard, count = self.settings.not_finite, self._not_finite
        ends = guard.react == "stop" or count >= guard.limit
        said = f"step {self._step} diverged: the loss or gradient of an update is no finite number ({count} in a row; "
        said += f'trainer.guards.not_finite: react = "{guard.react}", limit = {guard.limit})'
        advice = (
            "The update was refused. Weights, rewards or recorded log-probabilities are broken. What to do: look at "
            f"the rollouts of the step, {LOWER_RATE}"
        )
        react = "stop" if ends else "skip"
        return Alarm(NOT_FINITE, self._step, float(count), react, is_new(NOT_FINITE, self.rows), said, advice)


# ── words ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _alarm(settings: GuardSettings, name: str, value: float, rows: Sequence[Row], step: int) -> Alarm:
    rule, guard = RULES[name], getattr(settings, name)
    side = "below" if rule.below else "above"
    seen = f"step {step}: {rule.seen.format(value=value)}, {side} trainer.guards.{name}.limit = {guard.limit:g}"
    advice = f"{rule.meaning[0].upper()}{rule.meaning[1:]}. What to do: {rule.advice}"
    return Alarm(name, step, value, guard.react, is_new(name, rows), seen, advice)


def _way_back(alarm: Alarm, folder: Path, versions: Iterable[int]) -> str:
    """Which checkpoint to go back to: the newest from before whatever the guard looked at."""
    before = alarm.step - (RULES[alarm.name].rows if alarm.name in RULES else 1) + 1
    kept = sorted(versions)
    good = [version for version in kept if version <= max(0, before)]
    ended = f"The run was stopped at version {alarm.step}; nothing newer was saved or published"
    if not kept:
        return f"{ended}. There is no checkpoint in {folder}"
    if not good:
        return f"{ended}. The oldest checkpoint in {folder} is version {kept[0]}, from after it may have begun"
    taken = f"; to take it out: shoal export {folder.parent.parent} OUT --version {good[-1]}"
    named = f"{ended}. The last good checkpoint, from before it began, is version {good[-1]} in {folder}"
    return named + (taken if folder.parent.name == "trainer" else "")
