"""A weighted mixture of environments: one sequence of tasks in which every part has its share.

    position ─► `MixSchedule` ─► part, its nth task ─► a permutation of the part's tasks, another one in each pass

A small part starts again, in another order, while others are still on their first pass. Task ids are `label:id`, and
scores have the label among their parts. No part trains on a question that another part holds out.
"""

import hashlib
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache, partial
from math import gcd, lcm
from operator import ge, le
from typing import Any, ClassVar

import msgspec

from shoal.environments import protocol
from shoal.environments.protocol import DialogueRule, Environment, LazyTasks, Score, Split, Task
from shoal.environments.settings import EnvironmentSettings, TaskSource, inner_of
from shoal.errors import EnvironmentSetupError, UnusableTask
from shoal.protocol.lease import permute

ROUNDS, LONGEST_CYCLE = 4, 10_000
LONGEST = 10**12  # positions at most, however rare a part is
MOST_COLUMN_BYTES = 65_536  # of a value of a task's row, as it is sent to the trainer
PASSED_OVER = 256  # tasks of a generating part that are tried to find one that no part holds out


class MixSchedule:
    """Assigns positions to parts by weight, in a cycle that spreads the turns of each part evenly."""

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(weight).limit_denominator(LONGEST_CYCLE) or Fraction(1, LONGEST_CYCLE) for weight in weights]
        turns = [int(share * lcm(*(each.denominator for each in exact))) for share in exact]
        turns = [count // gcd(*turns) for count in turns]
        if sum(turns) > LONGEST_CYCLE:
            turns = [max(1, round(LONGEST_CYCLE * share / sum(exact))) for share in exact]
        spread = sorted(((nth + 0.5) / count, part) for part, count in enumerate(turns) for nth in range(count))
        self._cycle = [part for _when, part in spread]
        self._places: list[list[int]] = [[] for _ in turns]
        for place, part in enumerate(self._cycle):
            self._places[part].append(place)

    def turn(self, position: int) -> tuple[int, int]:
        part = self._cycle[position % len(self._cycle)]
        return part, self.counts(position)[part]

    def counts(self, positions: int) -> list[int]:
        rounds, place = divmod(positions, max(1, len(self._cycle)))
        return [rounds * len(places) + bisect_left(places, place) for places in self._places]


@dataclass(frozen=True)
class Part:
    label: str
    weight: float
    environment: Environment

    @cached_property
    def generates(self) -> bool:
        return isinstance(self.environment, protocol.GeneratingEnvironment)

    def labelled(self, task: Task) -> Task:
        return replace(task, id=f"{self.label}:{task.id}")

    def shuffled(self, split: Split, size: int, nth: int) -> int:
        once, position = divmod(nth, size)
        return permute(position, size, f"shoal/mix/v1\n{self.label}/{split}/{once}", ROUNDS)


class MixedEnvironment:
    """Implements `Environment`, also for parts with dialogues. The train split has `train_size` positions, or enough
    for every task. The held-out split has at most `held_out_size` tasks, none of them twice."""

    name: ClassVar[str] = "mix"
    version: ClassVar[int] = 2

    def __init__(self, parts: Sequence[Part], train_size: int | None, held_out_size: int) -> None:
        self.parts = tuple(parts)
        self._by_label = {part.label: part for part in self.parts}
        self._listing = [part for part in self.parts if not part.generates]
        self._skipped = lru_cache(maxsize=None)(self._positions_held_out)
        holding = [part for part in self.parts if len(part.environment.tasks("held_out"))]
        schedule, rest = (MixSchedule([part.weight for part in some]) for some in (parts, holding))
        sizes = [len(part.environment.tasks("train")) for part in parts]
        most = [len(part.environment.tasks("held_out")) for part in holding]
        if train_size is None:  # the smallest size in which every part has a turn for each of its tasks

            def enough(positions: int) -> bool:
                return all(map(ge, schedule.counts(positions), sizes))

            train_size = bisect_left(range(LONGEST), True, sum(sizes), key=enough)
        wanted = range(1, held_out_size + 1) if holding else range(0)
        held_out = bisect_left(wanted, True, key=lambda n: not all(map(le, rest.counts(n), most)))
        self._tasks: dict[Split, Sequence[Task]] = {
            "train": LazyTasks(train_size, partial(self._train, schedule)),
            "held_out": LazyTasks(held_out, partial(self._held_out, holding, rest)),
        }
        content = [[part.label, part.weight, part.environment.digest] for part in self.parts]
        self.digest = _hash("shoal/mix/v2", [content, train_size, held_out_size])
        data = [[part.label, getattr(part.environment, "data_digest", "")] for part in self.parts]
        self.data_digest = _hash("shoal/mix/data/v1", data) if any(digest for _label, digest in data) else ""

    def tasks(self, split: Split) -> Sequence[Task]:
        return self._tasks[split]

    def task(self, task_id: str) -> Task:
        part, inner = self.part(task_id)
        return part.labelled(part.environment.task(inner))

    @property
    def reads_tokens(self) -> bool:
        return any(protocol.reads_tokens(part.environment) for part in self.parts)

    def score(self, task: Task, completion: str, token_ids: Sequence[int] | None = None) -> Score:
        part, inner = self.part(task.id)
        score = protocol.score_of(part.environment, replace(task, id=inner), completion, token_ids)
        return replace(score, parts={**score.parts, part.label: score.value})

    def prepare(self) -> None:
        for part in self.parts:
            protocol.require_scoring(part.environment)

    def dialogue(self, task: Task) -> DialogueRule | None:
        part, inner = self.part(task.id)
        return dialogue_of(part.environment, replace(task, id=inner))

    def part(self, task_id: str) -> tuple[Part, str]:
        label, _, inner = task_id.partition(":")
        if label not in self._by_label:
            raise EnvironmentSetupError(f"the mixture has no task {task_id!r:.200}")
        return self._by_label[label], inner

    def _train(self, schedule: MixSchedule, position: int) -> Task:
        """The task of a position: the nth of its part, not counting those that a part holds out."""
        number, nth = schedule.turn(position)
        part, tasks = self.parts[number], self.parts[number].environment.tasks("train")
        skipped = self._skipped(part.label)
        size = len(tasks) - len(skipped)
        if not size:
            raise EnvironmentSetupError(f"part {part.label!r} has no task to train on: all its questions are held out")
        place = part.shuffled("train", size, nth)
        index = place + bisect_right(range(len(skipped)), place, key=lambda before: skipped[before] - before)
        if not part.generates:
            return part.labelled(tasks[index])
        for step in range(PASSED_OVER):
            task = tasks[(index + step) % size]
            if protocol.task_digest(task) not in self.aside:
                return part.labelled(task)
        raise UnusableTask(f"{PASSED_OVER} tasks of part {part.label!r} in a row are held out by other parts")

    def _held_out(self, holding: Sequence[Part], schedule: MixSchedule, position: int) -> Task:
        number, nth = schedule.turn(position)
        part, tasks = holding[number], holding[number].environment.tasks("held_out")
        task = tasks[part.shuffled("held_out", len(tasks), nth)]
        if part.generates and protocol.task_digest(task) in self._trained:
            raise UnusableTask(f"the question of held-out task {task.id} is trained on by another part")
        return part.labelled(task)

    @cached_property
    def aside(self) -> frozenset[bytes]:
        """The questions that listing parts hold out; no part trains on them."""
        found = (protocol.task_digests(part.environment, "held_out") for part in self._listing)
        return frozenset(digest for digests in found for digest in digests) - {protocol.UNUSABLE}

    @cached_property
    def _trained(self) -> frozenset[bytes]:
        found = (protocol.task_digests(part.environment, "train") for part in self._listing)
        return frozenset(digest for digests in found for digest in digests) - self.aside

    def _positions_held_out(self, label: str) -> tuple[int, ...]:
        part = self._by_label[label]
        if part.generates or not self.aside:
            return ()
        digests = enumerate(protocol.task_digests(part.environment, "train"))
        return tuple(index for index, digest in digests if digest in self.aside)


def mixed(settings: EnvironmentSettings, build: Callable[[TaskSource], Environment]) -> MixedEnvironment:
    if settings.file or settings.data or settings.options:
        raise EnvironmentSetupError("environment.mix takes the place of name, file, data and options")
    # a label for each part: its own, or else its name, with a number if that is taken
    given, found = [part.label for part in settings.mix if part.label], list[str]()
    if len(given) != len(set(given)):
        raise EnvironmentSetupError("two parts of environment.mix have the same label; give them different ones")
    for part in settings.mix:
        name = re.sub(r"[^a-z0-9_.\-]", "-", part.file.stem.lower() if part.file else part.name.lower())
        names = (name, *(f"{name}-{number}" for number in range(2, len(settings.mix) + 2)))
        found.append(part.label or next(one for one in names if one not in found and one not in given))
        if protocol.is_reserved(found[-1]):
            taken = f"{protocol.RESERVED_NAMES} are parts that shoal adds to scores; give it another label"
            raise EnvironmentSetupError(f"environment.mix, part {found[-1]!r}: {taken}")
    parts = list[Part]()
    for label, source in zip(found, settings.mix, strict=True):
        try:
            environment = build(source)
        except EnvironmentSetupError as error:
            raise EnvironmentSetupError(f"environment.mix, part {label!r}: {error}") from error
        if not len(environment.tasks("train")):
            raise EnvironmentSetupError(f"environment.mix, part {label!r} has no task to train on")
        parts.append(Part(label, source.weight, environment))
    return MixedEnvironment(parts, settings.train_size, settings.held_out_size)


def part_of(environment: Environment, task_id: str) -> str:
    return task_id.partition(":")[0] if isinstance(inner_of(environment), MixedEnvironment) else ""


def has_dialogues(environment: Environment) -> bool:
    """Whether some task of the environment may be a dialogue; no task is made."""
    inner = inner_of(environment)
    if isinstance(inner, MixedEnvironment):
        return any(has_dialogues(part.environment) for part in inner.parts)
    return isinstance(inner, protocol.DialogueEnvironment)


def dialogue_of(environment: Environment, task: Task) -> DialogueRule | None:
    inner = inner_of(environment)
    return inner.dialogue(task) if isinstance(inner, protocol.DialogueEnvironment) else None


def columns_of(environment: Environment, task_id: str) -> dict[str, Any]:
    """The other columns of a task's row: values that a message can hold, up to `MOST_COLUMN_BYTES` each."""
    inner, found = inner_of(environment), dict[str, Any]()
    if isinstance(inner, MixedEnvironment):
        part, name = inner.part(task_id)
        return columns_of(part.environment, name)
    if isinstance(inner, protocol.TableEnvironment):
        for name, value in inner.columns(task_id).items():
            with suppress(TypeError, ValueError, OverflowError):
                if len(msgspec.msgpack.encode(value)) <= MOST_COLUMN_BYTES:
                    found[name] = value
    return found


def _hash(label: str, content: object) -> str:
    return hashlib.sha256(f"{label}\n{json.dumps(content)}".encode()).hexdigest()
