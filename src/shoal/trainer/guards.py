"""Guards: a run that goes wrong says so early, and ends as a failure, not as a model.

    rows so far ──► rate_factor ─► the step's learning rate
         │
         ├──► veto ◄─ each update's numbers, before it is made          skip, stop: it is not made
         │
         ├──► judge ◄─ the step's numbers ──► alarm_NAME in the row, sentences for log and hub
         │                                    stop: TrainingDiverged, before the version is saved or published
         │
         └──► at the end: conclude ◄─ how the last version sees its own batch; conclude_scores ◄─ held-out scores

Everything is a function of the rows in metrics.jsonl (which a resume cuts back to its checkpoint) and of the numbers at
hand: a resumed run decides as the uninterrupted one did, and no state is saved. What is measured is in `guard_rules`.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from shoal.errors import TrainingDiverged
from shoal.runtime.program import shoal_command
from shoal.trainer.guard_rules import LOWER_RATE, RULES, Row, Rule, lost_score
from shoal.trainer.guard_settings import GuardSettings

log = logging.getLogger(__name__)

CALM = 5  # rows without it end an episode: what comes back after that is said again
SETTLE = 10  # rows between two reductions of the rate: the effect of one shows after a while
LOOKBACK = 20  # versions: more than any guard needs to notice; a checkpoint from before that is kept
OLDEST_SHOWN = 15
ALARM = "alarm_"
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
    way_back: str = ""  # which checkpoint to take, if it is known already

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
                raise TrainingDiverged(f"{alarm.message}. {alarm.way_back or _way_back(alarm, folder, versions)}")


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


def standing(rows: Sequence[Row]) -> dict[str, tuple[int, Row]]:
    """Alarms whose episode has not ended with the last row: guard → the step that it began with, and its last row.

    >>> standing([{"step": 0}, {"step": 1, "alarm_staleness": 5.0}, {"step": 2, "alarm_staleness": 6.0}, {"step": 3}])
    {'staleness': (1, {'step': 2, 'alarm_staleness': 6.0})}
    """
    names = {name for row in rows[-CALM:] for name in row if name.startswith(ALARM)}
    found = {}
    for name in sorted(names):
        fired = [index for index, row in enumerate(rows) if name in row]
        breaks = [after for before, after in itertools.pairwise(fired) if after - before > CALM]
        found[name.removeprefix(ALARM)] = (int(rows[(breaks or fired[:1])[-1]]["step"]), rows[fired[-1]])
    return found


def words_of(name: str, value: float) -> str:
    """What a guard has seen, for example "85% of the tokens were clipped"."""
    return RULES[name].seen.format(value=value) if name in RULES else f"{value:g} (trainer.guards.{name})"


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
        """Why this update must not be made; None if it may. Called before each, with its numbers.

        A guard that stops, or that judges what the step began with, has refused the rest of the step, too.
        """
        for alarm in self._refused.values():
            if alarm.react == "stop" or (alarm.name in RULES and RULES[alarm.name].of_beginning):
                return alarm.seen
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
        return _said(Judged(tuple(alarms.values()), numbers))

    def conclude(self, step: int, seen: Row) -> Judged:
        """What is wrong with the version that the last step made. `seen`: how it sees the batch that it was made of."""
        alarms = [] if all(map(math.isfinite, seen.values())) else [self._ruined(step)]
        for name, rule in RULES.items() if not alarms else ():
            guard = getattr(self.settings, name)
            value = rule.of_step(self.rows, seen) if rule.of_beginning and guard.react != "off" else None
            if value is not None and rule.beyond(value, guard.limit):
                alarms.append(_alarm(self.settings, name, value, self.rows, step, f"after step {step}, the last"))
        return _said(Judged(tuple(alarms), {f"alarm_{alarm.name}": alarm.value for alarm in alarms}))

    def conclude_scores(self, scores: Mapping[int, float], version: int, tasks: int, folder: Path) -> Judged:
        """Whether the last version has lost what an earlier one could, by held-out score; `folder` has checkpoints."""
        name, guard = "reward_collapse", self.settings.reward_collapse
        share = lost_score(scores, version, tasks) if guard.react != "off" else None
        if share is None or not share > guard.limit:
            return Judged((), {})
        alarm = _lost_score(_alarm(self.settings, name, share, (), version), scores, folder)
        return _said(Judged((alarm,), {f"alarm_{name}": share}))

    def add(self, row: Row) -> None:
        """The row of the step, as it was written."""
        self.rows.append(row)

    def _vetoed(self, name: str, rule: Rule, numbers: Row) -> float | None:
        guard = getattr(self.settings, name)
        if rule.of_update is None or guard.react not in ("skip", "stop"):
            return None
        value = rule.of_update(self.rows, numbers)
        return value if rule.beyond(value, guard.limit) else None

    def _ruined(self, step: int) -> Alarm:
        said = f"after step {step}, the last: weights, or the log-probabilities that they give, are no usable numbers"
        advice = f"The step has destroyed the policy. What to do: {LOWER_RATE} or trainer.grad_clip"
        return Alarm(NOT_FINITE, step, 1.0, "stop", True, said, advice)

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


def _said(judged: Judged) -> Judged:
    for sentence in judged.news().values():
        log.warning("%s", sentence)
    return judged


def _alarm(
    settings: GuardSettings, name: str, value: float, rows: Sequence[Row], step: int, when: str | None = None
) -> Alarm:
    rule, guard = RULES[name], getattr(settings, name)
    side = "below" if rule.below else "above"
    seen = f"{when or f'step {step}'}: {words_of(name, value)}, {side} trainer.guards.{name}.limit = {guard.limit:g}"
    advice = f"{rule.meaning[0].upper()}{rule.meaning[1:]}. What to do: {rule.advice}"
    return Alarm(name, step, value, guard.react, is_new(name, rows), seen, advice)


def _lost_score(alarm: Alarm, scores: Mapping[int, float], folder: Path) -> Alarm:
    """The same alarm, said of held-out scores."""
    best = max(scores, key=lambda version: (scores[version], version))
    was, now = f"{scores[best]:.3g} of version {best}", f"{scores[alarm.step]:.3g} of version {alarm.step}"
    seen = f"{alarm.value:.0%} of the best held-out score was lost, from {was} to {now}, the last"
    _, _, limit = alarm.seen.rpartition(", ")
    advice = f"The last steps have unlearnt what was there. What to do: take the best version, {LOWER_RATE}"
    kept = f"Version {alarm.step} is not exported, its checkpoint is in {folder}"
    return replace(alarm, seen=f"{seen}, {limit}", advice=advice, way_back=kept + _to_take(folder, "--best"))


def _to_take(folder: Path, which: str) -> str:
    """The command that takes a checkpoint out, if the folder of checkpoints is that of a run."""
    if folder.parent.name != "trainer":
        return ""
    what = "the best" if which == "--best" else "it"
    return f"; to take {what} out: {shoal_command()} export {folder.parent.parent} OUT {which}"


def _way_back(alarm: Alarm, folder: Path, versions: Iterable[int]) -> str:
    """Which checkpoint to go back to: the newest from before whatever the guard looked at."""
    before = alarm.step - (RULES[alarm.name].rows if alarm.name in RULES else 1) + 1
    kept = sorted(versions)
    good = [version for version in kept if version <= max(0, before)]
    ended = f"The run was stopped at version {alarm.step}"
    ended += "" if kept and kept[-1] > alarm.step else "; nothing newer was saved or published"
    if not kept:
        return f"{ended}. There is no checkpoint in {folder}"
    if not good:
        return f"{ended}. The oldest checkpoint in {folder} is version {kept[0]}, from after it may have begun"
    named = f"{ended}. The last good checkpoint, from before it began, is version {good[-1]} in {folder}"
    return named + _to_take(folder, f"--version {good[-1]}")
