"""Judges add to the task's own reward: each gives every completion a number, which is added with the judge's weight.

    reward = task's reward (after its length budget) + Σ weight · part         parts: task, judge.LABEL, …

A part is the judge's number, or with `use = "rank"` its rank within the group. If a judge fails, the group is unscored.
Judges see one group at a time; groups for which no time is left are `NotStarted`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from shoal.environments import Score, Task
from shoal.environments.graders import after_thinking
from shoal.environments.settings import JudgeSettings
from shoal.errors import ScoringFailure
from shoal.rewards.pool import NotStarted
from shoal.runtime import Clock, StopToken, SystemClock

PART, ALL_S = "judge.", 600.0


@dataclass(frozen=True)
class JudgedText:
    """The question and the answer that a judge sees, without the thinking part."""

    prompt: str
    completion: str
    answer: str = ""
    history: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, task: Task, completion: str) -> JudgedText:
        return cls(task.prompt, after_thinking(completion), task.answer, task.history)


class PartJudge(Protocol):
    """`prepare` loads what is needed; `EnvironmentSetupError` says what is wrong."""

    def prepare(self) -> None: ...

    def values(self, pieces: Sequence[JudgedText]) -> list[float | ScoringFailure]: ...  # in order

    def close(self) -> None: ...


@dataclass(frozen=True)
class JudgeSeat:
    settings: JudgeSettings
    judge: PartJudge

    @property
    def part(self) -> str:
        return PART + self.settings.label


@dataclass(frozen=True)
class ScoredText:
    piece: JudgedText
    score: Score


@dataclass(frozen=True)
class Panel:
    """All judges of an environment, perhaps none. After `all_s` no further group is started."""

    seats: tuple[JudgeSeat, ...] = ()
    all_s: float = ALL_S
    clock: Clock = field(default_factory=SystemClock)

    @property
    def unreproducible(self) -> tuple[str, ...]:
        """The parts that cannot be computed again. A classifier can: its folder is in the environment's digest."""
        return tuple(seat.part for seat in self.seats if seat.settings.kind == "openai")

    def add(self, groups: Sequence[Sequence[ScoredText]]) -> list[list[Score] | ScoringFailure]:
        ends_s = self.clock.monotonic_s() + self.all_s
        results: list[list[Score] | ScoringFailure] = []
        for group in groups:
            is_late = bool(self.seats and results) and self.clock.monotonic_s() >= ends_s
            late = f"judging took longer than {self.all_s:g} s in all"
            results.append(NotStarted(late) if is_late else self._judged(group))
        return results

    def _judged(self, group: Sequence[ScoredText]) -> list[Score] | ScoringFailure:
        scores = [entry.score for entry in group]
        for seat in self.seats if group else ():
            pieces = list(dict.fromkeys(entry.piece for entry in group))
            values = dict(zip(pieces, seat.judge.values(pieces), strict=True))
            numbers: list[float] = []
            for entry in group:
                value = values[entry.piece]
                if isinstance(value, ScoringFailure):
                    return value
                numbers.append(float(value))
            if seat.settings.use == "rank":
                numbers = ranks(numbers)
            weight, part = seat.settings.weight, seat.part
            scores = [
                replace(each, value=each.value + weight * value, parts={"task": each.value, **each.parts, part: value})
                for each, value in zip(scores, numbers, strict=True)
            ]
        return scores

    def prepare(self) -> None:
        for seat in self.seats:
            seat.judge.prepare()

    def close(self) -> None:
        for seat in self.seats:
            seat.judge.close()


def ranks(numbers: Sequence[float]) -> list[float]:
    """The rank of each number, from 0 (smallest) to 1; equal numbers share the mean rank. A single number: 0.5."""
    others = len(numbers) - 1
    if others == 0:
        return [0.5]
    below = [sum(other < number for other in numbers) for number in numbers]
    equal = [sum(other == number for other in numbers) - 1 for number in numbers]
    return [(less + same / 2) / others for less, same in zip(below, equal, strict=True)]


def panel_of(judges: Sequence[JudgeSettings], stop: StopToken, device: str = "auto") -> Panel:
    seats = []
    for settings in judges:
        if settings.kind == "classifier":
            from shoal.rewards.classifier import Classifier

            assert settings.path is not None, "the settings see to it"
            seats.append(JudgeSeat(settings, Classifier(settings.path, device)))
        else:
            from shoal.rewards.chat import ChatJudge

            seats.append(JudgeSeat(settings, ChatJudge(settings, stop)))
    return Panel(tuple(seats))
