"""Judges beside the task's own reward: each says a number about every completion, and it is added with its weight.

    reward = task's (or what its length made of it) + Σ weight · part         parts: task, judge.LABEL, …

A part is what the judge said, or with `use = "rank"` the rank within the group. A judge that fails leaves the group
unscored: what it would have said is unknown, and 0 is something that it may say. Judges are asked about one group at a
time; those for which there is no time are left for later (`NotBegun`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from shoal.environments import Score, Task
from shoal.environments.graders import after_thinking
from shoal.environments.settings import JudgeSettings
from shoal.errors import ScoringFailure
from shoal.rewards.protocol import NotBegun
from shoal.runtime.clock import Clock, SystemClock
from shoal.runtime.stop import StopToken

PART = "judge."
ALL_S = 600.0


@dataclass(frozen=True)
class Piece:
    """What a judge sees: what was asked, and what was answered. The thinking part is not shown."""

    prompt: str
    completion: str
    answer: str = ""
    history: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, task: Task, completion: str) -> Piece:
        return cls(task.prompt, after_thinking(completion), task.answer, task.history)


class PartJudge(Protocol):
    """`prepare` does what takes long, and finds what is wrong before anything is judged (`EnvironmentSetupError`)."""

    def prepare(self) -> None: ...

    def values(self, pieces: Sequence[Piece]) -> list[float | ScoringFailure]: ...  # what it says of each, in order

    def close(self) -> None: ...


@dataclass(frozen=True)
class Seated:
    """A judge and how its word counts."""

    settings: JudgeSettings
    judge: PartJudge

    @property
    def part(self) -> str:
        return PART + self.settings.label


@dataclass(frozen=True)
class ScoredPiece:
    """A completion with what it is worth so far."""

    piece: Piece
    score: Score


@dataclass(frozen=True)
class Panel:
    """All judges of an environment; without any, nothing is added. After `all_s` no further groups are begun."""

    seats: tuple[Seated, ...] = ()
    all_s: float = ALL_S
    clock: Clock = field(default_factory=SystemClock)

    @property
    def unreproducible(self) -> tuple[str, ...]:
        """The parts that nobody else can compute again. A classifier's folder is in the environment's digest."""
        return tuple(seat.part for seat in self.seats if seat.settings.kind == "openai")

    def add(self, groups: Sequence[Sequence[ScoredPiece]]) -> list[list[Score] | ScoringFailure]:
        """The scores of each group with what every judge says; a group that one of them fails on has none. At least the
        first group is judged, however long it takes."""
        ends_s = self.clock.monotonic_s() + self.all_s
        results: list[list[Score] | ScoringFailure] = []
        for group in groups:
            is_late = bool(self.seats and results) and self.clock.monotonic_s() >= ends_s
            late = f"judging took longer than {self.all_s:g} s in all"
            results.append(NotBegun(late) if is_late else self._judged(group))
        return results

    def _judged(self, group: Sequence[ScoredPiece]) -> list[Score] | ScoringFailure:
        scores = [entry.score for entry in group]
        for seat in self.seats if group else ():
            pieces = list(dict.fromkeys(entry.piece for entry in group))
            said = dict(zip(pieces, seat.judge.values(pieces), strict=True))
            numbers: list[float] = []
            for entry in group:
                value = said[entry.piece]
                if isinstance(value, ScoringFailure):
                    return value
                numbers.append(float(value))
            if seat.settings.use == "rank":
                numbers = ranks(numbers)
            scores = [
                replace(
                    score,
                    value=score.value + seat.settings.weight * number,
                    parts={"task": score.value, **score.parts, seat.part: number},
                )
                for score, number in zip(scores, numbers, strict=True)
            ]
        return scores

    def prepare(self) -> None:
        for seat in self.seats:
            seat.judge.prepare()

    def close(self) -> None:
        for seat in self.seats:
            seat.judge.close()


def ranks(numbers: Sequence[float]) -> list[float]:
    """The place of each among all, from 0 (the least) to 1; equal ones share theirs. One alone is in the middle."""
    others = len(numbers) - 1
    if others == 0:
        return [0.5]
    below = [sum(other < number for other in numbers) for number in numbers]
    equal = [sum(other == number for other in numbers) - 1 for number in numbers]
    return [(less + same / 2) / others for less, same in zip(below, equal, strict=True)]


def panel_of(judges: Sequence[JudgeSettings], stop: StopToken, device: str = "auto") -> Panel:
    """The judges that the settings name. Nothing is loaded or asked yet."""
    seats = []
    for settings in judges:
        if settings.kind == "classifier":
            from shoal.rewards.classifier import Classifier

            assert settings.path is not None, "the settings see to it"
            seats.append(Seated(settings, Classifier(settings.path, device)))
        else:
            from shoal.rewards.chat import ChatJudge

            seats.append(Seated(settings, ChatJudge(settings, stop)))
    return Panel(tuple(seats))
