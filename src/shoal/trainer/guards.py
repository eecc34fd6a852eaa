"""Guards: a run that goes wrong raises an alarm early, and ends as a failure instead of as a model.

    rows so far ─┬► veto ◄─ the numbers of each update, before it is applied     skip or stop: it is not applied
                 └► judge ◄─ the numbers of the step ─► alarm_NAME in the row, messages for log and hub; stop: run ends

A measure is a function of the rows in metrics.jsonl (never of `held_out`, which may come later) and of the current
numbers, so a resumed run decides the same. It returns None if there is too little to judge by.
"""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, Field, model_validator

from shoal.errors import TrainingDiverged
from shoal.runtime.text import shoal_command

log = logging.getLogger(__name__)

Row = Mapping[str, float]
Measure = Callable[[Sequence[Row], Row], float | None]
SMOOTH = 5  # rows that are averaged, so that one unusual batch is no trend
SLOPE_ROWS = 16
HISTORY = 2000  # rows that measures look at
LEAST_LOSS = 0.05  # of reward: a smaller loss is noise
NOISE = 4.0  # times the mean difference of two rows
CALM = 5  # rows without an alarm end its episode
LOOKBACK = 20  # versions: more than any guard needs to notice; one older checkpoint is kept
ALARM = "alarm_"
RUN_OF_NOT_FINITE = "not_finite_updates"  # consecutive ones at the end of the step
LARGEST = 3.4028234663852886e38  # that float32 holds


def holds(value: float) -> float:
    if not -LARGEST <= value <= LARGEST:
        raise ValueError(f"{value} is not a finite number that float32 holds (at most {LARGEST:.3g})")
    return value


Real = Annotated[float, AfterValidator(holds)]


def values_of(rows: Sequence[Row], *names: str) -> list[float]:
    """The finite numbers under the first of `names` that each row has."""
    found = (next((row[name] for name in names if name in row), None) for row in rows)
    return [float(value) for value in found if isinstance(value, int | float) and math.isfinite(value)]


def mean_of(values: Sequence[float]) -> float:
    return sum(value / len(values) for value in values)  # divided first: a sum of huge values would be infinite


def smoothed(values: Sequence[float]) -> list[float]:
    """Means of the last five values each: [1, 2, 3, 4] → [1.5, 2, 2.5]."""
    return [mean_of(values[max(0, end - SMOOTH) : end]) for end in range(2, len(values) + 1)]


def noise(values: Sequence[float]) -> float:
    """The change that chance explains."""
    return NOISE * mean_of([abs(after - before) for before, after in itertools.pairwise(values)] or [0.0])


def latest(name: str) -> Measure:
    return lambda _rows, row: next(iter(values_of([row], name)), None)


def recent(name: str) -> Measure:
    return lambda rows, row: next(reversed(smoothed(values_of([*rows[-SMOOTH + 1 :], row], name))), None)


def without_tokens(rows: Sequence[Row], row: Row) -> float | None:
    """The number of consecutive steps, up to this one, without a token to train on."""
    counts = reversed(values_of([*rows[-HISTORY:], row], "tokens"))
    return float(sum(1 for _ in itertools.takewhile(lambda tokens: not tokens, counts)))


def spike(name: str, rows: Sequence[Row], row: Row) -> float | None:
    before, now = values_of(rows[-SLOPE_ROWS:], "grad_norm"), values_of([row], name)
    median = statistics.median(before) if len(before) >= SMOOTH else 0.0
    return now[0] / median if now and median > 0 else None


def growth(rows: Sequence[Row], row: Row) -> float | None:
    """The growth factor of the gradient norm over `SLOPE_ROWS` rows, by an exponential fit."""
    norms = [math.log(value) for value in values_of([*rows[-SLOPE_ROWS + 1 :], row], "grad_norm") if value > 0]
    if len(norms) < SLOPE_ROWS:
        return None
    return math.exp(min(50.0, statistics.linear_regression(range(SLOPE_ROWS), norms).slope * (SLOPE_ROWS - 1)))


def rise_again(rows: Sequence[Row], row: Row) -> float | None:
    """The share of its fall that the entropy has regained since its lowest point; None if it has not fallen."""
    entropies = values_of([*rows[-HISTORY:], row], "entropy")
    curve, chance = smoothed(entropies), noise(entropies)
    if not curve:
        return None
    lowest = curve.index(min(curve))
    peak = max(curve[: lowest + 1])
    fall, rise = peak - curve[lowest], curve[-1] - curve[lowest]
    if not max(0.2 * abs(peak), chance) < fall < math.inf:
        return None
    return rise / fall if rise > chance else 0.0


def lost(rows: Sequence[Row], row: Row) -> float | None:
    """The share of the best mean reward that is lost, measured from 0, or from the lowest reward if that is below 0."""
    if not values_of([row], "sampled_reward", "reward_mean"):
        return None
    looked_at = [*rows[-HISTORY:], row]
    rewards = values_of(looked_at, "sampled_reward", "reward_mean")
    curve = smoothed(rewards)
    if not curve or not max(curve) - curve[-1] > max(LEAST_LOSS, noise(rewards)):
        return 0.0
    scale = max(curve) - min(0.0, *rewards)
    if min(rewards) < 0:  # the lowest reward is no natural zero, so the spread of single rewards counts too
        scale = max(scale, mean_of(values_of(looked_at, "reward_std") or [0.0]))
    return (max(curve) - curve[-1]) / scale if scale < math.inf else None


LOWER = "What to do: lower trainer.learning_rate"


@dataclass(frozen=True)
class Guard:
    """`of_step` judges a row, `of_update` an update before it is applied. The cause may be up to `rows` steps old.
    `of_beginning`: it judges the policy that a step begins with, so it refuses all updates of the step and also checks
    the last version."""

    name: str
    limit: float
    of_step: Measure
    of_update: Measure | None = None
    action: str = "warn"
    actions: tuple[str, ...] = ("off", "warn", "stop")
    seen: str = field(kw_only=True)
    advice: str = field(kw_only=True)
    below: bool = False
    rows: int = SMOOTH
    of_beginning: bool = False
    least: float = 0.0  # limits are above this, and no more than `most`
    most: float = LARGEST


GUARDS = (
    # Cannot be off: such an update would destroy the weights. With skip, `limit` of them in a row stop the run.
    Guard("not_finite", 3, lambda _rows, _: None, None, "stop", ("skip", "stop"), rows=1,
        seen="the loss or gradient of an update is NaN or infinite ({:.0f} in a row)",
        advice=f"Weights, rewards or recorded log-probabilities are broken. {LOWER}, look at the rollouts of the step"),
    Guard("gradient_spike", 20.0, partial(spike, "grad_norm_max"), partial(spike, "grad_norm"), rows=1, least=1.0,
        seen="an update's gradient norm is {:.3g} times the median of the last 16 steps",
        advice=f"Often a broken reward, or a few extreme ratios. {LOWER} or trainer.grad_clip, look at the rollouts"),
    Guard("gradient_slope", 10.0, growth, rows=SLOPE_ROWS, least=1.0,
        seen="the gradient norm grew {:.3g}-fold over 16 steps (fitted trend)",
        advice=f"Steady growth precedes collapse by tens of steps. {LOWER} or trainer.grad_clip"),
    Guard("entropy_rise", 0.5, rise_again, rows=SLOPE_ROWS,
        seen="the entropy rose again by {:.0%} of its fall",
        advice=f"Runs that collapsed showed this about 150 steps before. {LOWER} or run.max_staleness"),
    Guard("clip_fraction", 0.3, latest("clip_fraction"), latest("clip_fraction"), rows=1, most=1.0,
        seen="{:.0%} of the tokens were clipped",
        advice=f"So much of the batch teaches nothing. {LOWER}, trainer.minibatches or run.max_staleness"),
    Guard("effective_samples", 0.05, recent("effective_samples"), latest("effective_samples"), below=True, most=1.0,
        seen="the weighted tokens are worth {:.1%} of their number",
        advice=f"A few tokens with huge ratios decide the update. {LOWER}, run.max_staleness or trainer.minibatches"),
    Guard("mismatch_kl", 1.0, latest("mismatch_kl"), latest("mismatch_kl"), rows=1, of_beginning=True,
        seen="trainer and recorded log-probabilities diverge by {:.3g} nats per token",
        advice=f"{LOWER} or run.max_staleness, compare number types (trainer.publish_dtype, worker.dtype)"),
    Guard("divergence", 3.0, latest("mismatch"), latest("mismatch"), "stop", rows=SLOPE_ROWS, of_beginning=True,
        seen="the trainer's log-probabilities are {:.3g} nats per token away from the recorded ones",
        advice=f"An update destroyed the policy, or workers run another model. {LOWER}; take an earlier version"),
    Guard("truncation", 0.5, recent("truncated_fraction"), most=1.0,
        seen="{:.0%} of the completions were cut off by their length limit, over 5 steps",
        advice="What to do: raise run.max_new_tokens, or reward shorter answers"),
    Guard("no_signal", 2, without_tokens, least=-1.0,
        seen="{:.0f} steps in a row had no token to train on",
        advice="Rewards were equal in each group. What to do: other tasks (shoal filter), a larger run.group_size"),
    Guard("reward_collapse", 0.9, lost, None, "stop", most=1.0,
        seen="{:.0%} of the best mean reward of 5 steps was lost",
        advice=f"Hardly any rollout earns anything. {LOWER}, and begin again from an earlier version"),
)  # fmt: skip
RULES = {guard.name: guard for guard in GUARDS}
# A warm start has no recorded log-probabilities, so the loss of its last batch is judged at the end.
RISEN = "the loss of its batch is {:.3g} nats per token higher than that of the first step"
ENDING = replace(RULES["divergence"], of_step=latest("rise"), seen=RISEN)


class GuardRule(BaseModel, frozen=True, extra="forbid"):
    """`[trainer.guards.NAME]`. Defaults are those of the table of guards (docs/guides/guards.md)."""

    limit: Real | None = Field(default=None, description="what the guard fires beyond")
    action: Literal["off", "warn", "skip", "stop"] | None = Field(default=None, description="what is done then")


class GuardSettings(BaseModel, frozen=True, extra="allow"):
    __pydantic_extra__: dict[str, GuardRule]

    @property
    def lookback(self) -> int:
        """How many versions back a checkpoint must be kept, because a guard may stop the run for an older cause."""
        stops = any(guard.rows > 1 and self.rule(guard.name).action == "stop" for guard in GUARDS)
        return LOOKBACK if stops else 0

    def rule(self, name: str) -> Any:
        return self.__pydantic_extra__[name]

    @model_validator(mode="after")
    def _complete(self) -> GuardSettings:
        rules = self.__pydantic_extra__
        if unknown := sorted(set(rules) - set(RULES)):
            raise ValueError(f"there is no guard {unknown[0]!r}; there are {', '.join(RULES)}")
        for name, guard in RULES.items():
            given = rules.pop(name, GuardRule())
            limit, action = guard.limit if given.limit is None else given.limit, given.action or guard.action
            actions = (*guard.actions, *(["skip"] if guard.of_update else []))
            if not guard.least < limit <= guard.most:
                raise ValueError(f"{name}.limit = {limit:g} must be above {guard.least:g}, at most {guard.most:g}")
            if action not in actions:
                raise ValueError(f"{name}.action = {action!r}: it may be {', '.join(actions)}")
            rules[name] = given.model_copy(update={"limit": limit, "action": action})
        return self


class Alarm(NamedTuple):
    """A guard whose limit is exceeded. `is_new`: there was no such alarm in the last rows, so people are told."""

    name: str
    step: int
    value: float
    action: str
    is_new: bool
    message: str


class GuardReport(NamedTuple):
    alarms: tuple[Alarm, ...]
    numbers: Mapping[str, float]

    def news(self) -> dict[str, str]:
        return {f"guard.{each.name}": each.message for each in self.alarms if each.is_new or each.action == "stop"}

    @property
    def stopping(self) -> Alarm | None:
        return next((alarm for alarm in self.alarms if alarm.action == "stop"), None)

    def refuse(self, folder: Path, versions: Iterable[int]) -> None:
        """Raise `TrainingDiverged` if a guard stops the run. `versions` are the checkpoints in `folder`."""
        if (alarm := self.stopping) is None:
            return
        # The last good checkpoint is the newest from before the rows that the guard looked at.
        kept, oldest = sorted(versions), max(0, alarm.step - RULES[alarm.name].rows + 1)
        good = max((version for version in kept if version <= oldest), default=None)
        newer = "" if kept and kept[-1] > alarm.step else "; nothing newer was saved or published"
        message = f"There is no checkpoint from before it began in {folder}; there are versions {kept}"
        if good is not None:
            message = f"The last good checkpoint, from before it began, is version {good} in {folder}"
            if folder.parent.name == "trainer":  # of a run, which has `shoal export`
                message += f"; to export it: {shoal_command()} export {folder.parent.parent} OUT --version {good}"
        raise TrainingDiverged(f"{alarm.message}. The run was stopped at version {alarm.step}{newer}. {message}")


@dataclass
class GuardMonitor:
    """For each step: `begin`, `veto` for each update, `judge`, then its row is added to `rows`."""

    settings: GuardSettings
    rows: list[Row] = field(default_factory=list)
    _step: int = 0
    _not_finite: int = 0
    _refused: dict[str, Alarm] = field(default_factory=dict)

    def begin(self, step: int) -> None:
        self._step, self._refused = step, {}
        self._not_finite = int(self.rows[-1].get(RUN_OF_NOT_FINITE, 0)) if self.rows else 0

    def veto(self, numbers: Row) -> str | None:
        """Why this update must not be applied, or None. A stop, or a guard `of_beginning`, refuses the whole step."""
        for refused in self._refused.values():
            if refused.action == "stop" or RULES[refused.name].of_beginning:
                return refused.message
        if all(math.isfinite(numbers.get(name, 0.0)) for name in ("loss", "grad_norm")):
            self._not_finite = 0
            found = (self._alarm(each, each.of_update(self.rows, numbers)) for each in GUARDS if each.of_update)
            alarm = next((alarm for alarm in found if alarm and alarm.action in ("skip", "stop")), None)
        else:
            self._not_finite += 1
            own = self.settings.rule("not_finite")
            action = "stop" if own.action == "stop" or self._not_finite >= own.limit else "skip"
            alarm = self._alarm(RULES["not_finite"], float(self._not_finite), action=action)
        self._refused |= {alarm.name: alarm} if alarm else {}
        return alarm.message if alarm else None

    def judge(self, metrics: Row) -> GuardReport:
        """The alarms of the step, and the numbers that its row must hold."""
        measured = (self._alarm(guard, guard.of_step(self.rows, metrics)) for guard in GUARDS)
        count = {RUN_OF_NOT_FINITE: float(self._not_finite)} if self._not_finite else {}
        return self._judged([*filter(None, measured), *self._refused.values()], count)

    def check_last_version(self, step: int, seen: Row) -> GuardReport:
        self._step, when = step, f"after step {step}, the last"
        if not all(map(math.isfinite, seen.values())):
            message = f"{when}: weights, or log-probabilities by them, are NaN, infinite or huge. {LOWER} or grad_clip"
            return self._judged([Alarm("not_finite", step, 1.0, "stop", True, message)])
        judging = (ENDING, *(guard for guard in GUARDS if guard.of_beginning))
        found = (self._alarm(guard, guard.of_step(self.rows, seen), when) for guard in judging)
        return self._judged(filter(None, found))

    def _judged(self, alarms: Iterable[Alarm], numbers: Mapping[str, float] = {}) -> GuardReport:
        """One alarm for each guard (the last one); new alarms are logged."""
        by_name = {alarm.name: alarm for alarm in alarms}
        values = {f"{ALARM}{name}": alarm.value for name, alarm in by_name.items()}
        judged = GuardReport(tuple(by_name.values()), {**numbers, **values})
        for sentence in judged.news().values():
            log.warning("%s", sentence)
        return judged

    def _alarm(self, guard: Guard, value: float | None, when: str = "", action: str = "") -> Alarm | None:
        """The alarm of a guard that is on, if `value` is beyond its limit, or if `action` is given."""
        name, own = guard.name, self.settings.rule(guard.name)
        beyond = value is not None and (action or (value < own.limit if guard.below else value > own.limit))
        if value is None or not beyond or own.action == "off":
            return None
        value = min(value, sys.float_info.max)  # rows hold no infinite numbers
        is_new = not any(f"{ALARM}{name}" in row for row in self.rows[-CALM:])
        limit = f"trainer.guards.{name}.limit = {own.limit:g}"
        message = f"{when or f'step {self._step}'}: {guard.seen.format(value)} ({limit}). {guard.advice}"
        return Alarm(name, self._step, value, action or own.action, is_new, message)
