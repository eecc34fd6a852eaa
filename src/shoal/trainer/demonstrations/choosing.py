"""Rows through the filters, in one pass, into a corpus.

    rows ─read─► demonstrations ─encode─► candidates ─filter, filter, …─► corpus ─rank, if asked─► trained on
      └ cannot be read: counted             └ left out: by which filter, and why

A filter takes a few candidates and says of each why it is left out, or nothing. The cheap ones are asked first, and
each sees only what those before it have kept.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shoal.environments import Environment, prompt_settings_of
from shoal.environments.composed import Composed
from shoal.environments.graders.thinking import after_thinking
from shoal.environments.mix import MixedEnvironment
from shoal.environments.protocol import GeneratingEnvironment
from shoal.environments.questions import prompt_digest, question_digest, task_digest, task_digests
from shoal.errors import ConfigError, EnvironmentSetupError, ScoringFailure, UnusableTask
from shoal.rewards import Job, Scorer
from shoal.rewards.panel import PartJudge, Piece
from shoal.rewards.protocol import settled
from shoal.trainer.demonstrations.reading import Demonstration, Demonstrations, Encoder, Tokens

if TYPE_CHECKING:
    from shoal.trainer.samples import Sample

FORMS = {
    "thinking": r"(?s)<think>.*\S.*</think>.*\S",
    "boxed": r"\\(boxed|fbox)\s*\{[^}]*\S",
    "answer": r"(?s)<answer>.*\S.*</answer>",
}
READABLE, RANK = "readable", "rank"
TOGETHER = 256  # candidates that a filter is asked about at a time; a process that is told to stop does so within them
MOST_TASKS = 1_000_000


class Interrupted(Exception):
    """The process was told to stop while it was choosing. Nothing is kept of it."""


@dataclass(frozen=True)
class Choice:
    """Which demonstrations are wanted, as the command line says it."""

    min_tokens: int = 1
    max_tokens: int | None = None
    require: tuple[str, ...] = ()
    duplicates: bool = True
    verify: bool = False
    min_reward: float = 1.0
    rank: Path | None = None
    best: float | None = None
    best_per_prompt: int | None = None
    chat: bool | None = None

    def __post_init__(self) -> None:
        wants_rank = self.best is not None or self.best_per_prompt is not None
        if wants_rank and self.rank is None:
            raise ConfigError("--best and --best-per-prompt are by rank: give the classifier's folder with --rank")
        if self.rank is not None and not wants_rank:
            raise ConfigError("--rank: say how many to keep, with --best SHARE or --best-per-prompt K")
        for wanted in self.require:
            try:
                re.compile(FORMS.get(wanted, wanted))
            except re.error as error:
                known = ", ".join(FORMS)
                raise ConfigError(f"--require {wanted}: no regular expression ({error}), nor one of {known}") from error


@dataclass
class Candidate:
    """A demonstration on its way through the filters."""

    said: Demonstration
    sequences: tuple[Tokens, ...]

    @property
    def question(self) -> bytes:
        """The digest of what it answers, or of the text itself."""
        said = self.said
        return question_digest(said.prompt, said.messages[:-2]) if said.messages else question_digest(said.text)

    @property
    def begins(self) -> int:
        """A number that conversations share which begin with the same question."""
        asked = next((text for role, text in self.said.messages if role == "user"), self.said.text)
        return int.from_bytes(prompt_digest(asked)[:7], "big")

    @property
    def digest(self) -> bytes:
        """Of what is said, by whom, and which of it is trained on, but for how much space there is, case and width."""
        said = self.said.messages or (("", self.said.text),)
        parts = [
            f"{role}{index >= self.said.given and role == 'assistant'}\0"
            + " ".join(unicodedata.normalize("NFKC", text).casefold().split())
            for index, (role, text) in enumerate(said)
        ]
        return sha256("\0".join(parts).encode(errors="surrogatepass")).digest()


Filter = Callable[[Sequence[Candidate]], list[str]]


def _each(reason: Callable[[Candidate], str]) -> Filter:
    return lambda candidates: [reason(each) for each in candidates]


def cheap_filters(choice: Choice, most: int | None, unknown: int | None) -> dict[str, Filter]:
    """Those that look at the demonstration alone, or at those before it. `unknown`: the tokenizer's token for that."""
    first: dict[bytes, int] = {}
    patterns = [(wanted, re.compile(FORMS.get(wanted, wanted))) for wanted in choice.require]

    def form(each: Candidate) -> str:
        return next((f"no {wanted} in it" for wanted, found in patterns if not found.search(each.said.completion)), "")

    def length(each: Candidate) -> str:
        tokens = max((len(sequence.ids) for sequence in each.sequences), default=0)
        if not each.sequences:
            return "no token of it would be trained on"
        if most is not None and tokens > most:
            return f"more than {most} tokens"
        return f"less than {choice.min_tokens} tokens" if tokens < choice.min_tokens else ""

    def characters(each: Candidate) -> str:
        found = unknown is not None and any(unknown in sequence.ids for sequence in each.sequences)
        return "characters that the tokenizer does not know" if found else ""

    def duplicates(each: Candidate) -> str:
        row = first.setdefault(each.digest, each.said.row)
        return "" if row == each.said.row else f"the same as row {row}"

    found = {"form": form} if patterns else {}
    found |= {"length": length, "characters": characters}
    found |= {"duplicates": duplicates} if choice.duplicates else {}
    return {name: _each(reason) for name, reason in found.items()}


@dataclass(frozen=True)
class Asking:
    """Filters that ask the environment: which tasks it holds out, and what an answer is worth to it."""

    environment: Environment
    scorer: Scorer | None = None
    least: float = 1.0
    has_tasks: bool = False

    @cached_property
    def _parts(self) -> list[Environment]:
        """The environments that a recipe is made of."""
        parts, waiting = [], [self.environment]
        while waiting:
            part = waiting.pop()
            inner = part.inner if isinstance(part, Composed) else part
            if isinstance(inner, MixedEnvironment):
                waiting += [each.environment for each in inner.parts]
            else:
                parts.append(inner)
        return parts

    @cached_property
    def _held_out(self) -> frozenset[bytes]:
        listing = (part for part in self._parts if not isinstance(part, GeneratingEnvironment))
        return frozenset(digest for part in listing for digest in task_digests(part, "held_out"))

    def held_out(self, candidate: Candidate) -> str:
        """Every question of a conversation counts, not only the last, with what was said before it and without."""
        said = candidate.said
        prompts = [(text, said.messages[:index]) for index, (role, text) in enumerate(said.messages) if role == "user"]
        asked = {candidate.question, *(question_digest(*each) for each in prompts)}
        asked |= {prompt_digest(text) for text, _before in prompts or [(said.text, ())]}
        generating = (part for part in self._parts if isinstance(part, GeneratingEnvironment))
        drawn = (part.holds_out(prompt) for part in generating for prompt, _before in prompts)
        return "" if asked.isdisjoint(self._held_out) and not any(drawn) else "the environment holds this task out"

    def verified(self, candidates: Sequence[Candidate]) -> list[str]:
        """The last words are scored as rollouts are; a failure of the machinery is no reward at all."""
        assert self.scorer is not None
        begun = prompt_settings_of(self.environment).thinking
        tasks = {index: task for index, each in enumerate(candidates) if (task := self._task(each))}
        jobs = [Job(task, candidates[index].said.completion.removeprefix(begun)) for index, task in tasks.items()]
        reasons = ["no task of the environment asks this"] * len(candidates)
        for index, score in zip(tasks, settled(self.scorer.scores, jobs) if jobs else (), strict=True):
            if isinstance(score, ScoringFailure):
                reasons[index] = f"could not be scored: {' '.join(str(score).split())[:160]}"
            else:
                reasons[index] = "" if score.value >= self.least else f"its reward is below {self.least:g}"
        return reasons

    @cached_property
    def _ids(self) -> dict[bytes, str]:
        """Task of each question, for demonstrations that name none."""
        tasks, found = self.environment.tasks("train"), dict[bytes, str]()
        if len(tasks) > MOST_TASKS:
            raise ConfigError(
                f"--verify: the environment has {len(tasks):,} tasks, too many to look for each demonstration's; "
                "name them in a column task (shoal data demos writes it)"
            )
        for index in range(len(tasks)):
            try:
                found[task_digest(tasks[index])] = tasks[index].id
            except EnvironmentSetupError:
                continue
        return found

    def _task(self, candidate: Candidate) -> str:
        named = candidate.said.task
        if not named:
            return "" if self.has_tasks else self._ids.get(candidate.question, "")
        try:
            return named if task_digest(self.environment.task(named)) == candidate.question else ""
        except EnvironmentSetupError:
            return ""


@dataclass(frozen=True)
class Ranked:
    """The best by a reward model: a share of all, or so many of each question. What is best is known at the end."""

    judge: PartJudge
    share: float | None
    per_question: int | None
    _values: list[tuple[float, int, bytes]] = field(default_factory=list)

    def reasons(self, candidates: Sequence[Candidate]) -> list[str]:
        """Leaves out only what could not be judged."""
        pieces = [
            Piece(each.said.prompt, after_thinking(each.said.completion), history=each.said.messages[:-2])
            for each in candidates
        ]
        reasons = []
        for each, value in zip(candidates, self.judge.values(pieces), strict=True):
            failed = isinstance(value, ScoringFailure) or not math.isfinite(value)
            reasons.append(f"could not be judged: {value}" if failed else "")
            if not failed:
                self._values.append((float(value), each.said.row, each.question))  # type: ignore[arg-type]
        return reasons

    def worst(self) -> Iterator[int]:
        """Rows that are not among the best; of equal ones the earlier row is the better."""
        ordered = sorted(self._values, key=lambda each: (-each[0], each[1]))
        kept, taken = math.ceil((self.share or 1.0) * len(ordered)), Counter[bytes]()
        for place, (_value, row, question) in enumerate(ordered):
            taken[question] += 1
            if place >= kept or (self.per_question is not None and taken[question] > self.per_question):
                yield row


# ── what comes of it ─────────────────────────────────────────────────────────────────────────────────────────────


SCHEMA = pa.schema({"ids": pa.list_(pa.int32()), "trained": pa.list_(pa.bool_()), "question": pa.int64()})


class Corpus:
    """The tokens that were chosen, as samples for the step, by number. `questions`: equal where they begin alike."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self.questions: npt.NDArray[np.int64] = table["question"].to_numpy()

    @classmethod
    def read(cls, path: Path) -> Corpus:
        """The file is mapped: memory goes with a step."""
        return cls(pa.ipc.open_file(pa.memory_map(str(path))).read_all())

    def as_bytes(self) -> bytes:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, SCHEMA) as writer:
            writer.write(self.table)
        return bytes(sink.getvalue())

    def __len__(self) -> int:
        return len(self.questions)

    def sample(self, number: int) -> Sample:
        """A sequence as the step takes it: what comes before the first token that is trained on is its prompt."""
        from shoal.trainer.samples import Sample  # loads torch, which choosing does without

        ids = self.table["ids"][number].values.to_numpy().astype(np.int64)
        trained = self.table["trained"][number].values.to_numpy(zero_copy_only=False)
        first = int(np.argmax(trained))
        return Sample(ids[:first], ids[first:], np.zeros(len(ids) - first, np.float32), 1.0, trained[first:])


@dataclass
class Outcome:
    """What left a row out, by its number: the filter and the reason. `filters` are those asked, in their order."""

    data: Demonstrations
    filters: tuple[str, ...]
    left_out: dict[int, tuple[str, str]] = field(default_factory=dict)

    @property
    def kept(self) -> list[int]:
        return [row for row in range(self.data.rows) if row not in self.left_out]

    @property
    def counts(self) -> dict[str, int]:
        """How many each filter left out."""
        found = Counter(name for name, _reason in self.left_out.values())
        return {name: found[name] for name in self.filters}

    def example(self, name: str) -> str:
        found = ((row, reason) for row, (by, reason) in sorted(self.left_out.items()) if by == name)
        return next((f"row {row} ({self.data.where(row)}): {reason}" for row, reason in found), "")

    def lines(self) -> list[str]:
        """For people: rows, what each filter left out with an example, and what is kept."""
        counts = {"read": self.data.rows, **{f"- {name}": n for name, n in self.counts.items()}, "kept": len(self.kept)}
        width = max(map(len, counts))
        examples = {f"- {name}": f"   e.g. {said}" for name in self.filters if (said := self.example(name))}
        return [f"  {name:<{width}}  {count:>9,}{examples.get(name, '')}" for name, count in counts.items()]


@dataclass(frozen=True)
class Choosing:
    """What is needed to choose: `asking` with an environment, `judge` for a rank."""

    data: Demonstrations
    encoder: Encoder
    choice: Choice = Choice()
    asking: Asking | None = None
    judge: PartJudge | None = None
    progress: Callable[[int, int], None] = field(default=lambda _done, _total: None)
    interrupted: Callable[[], bool] = field(default=lambda: False)

    def run(self) -> tuple[Corpus, Outcome]:
        """If nothing is left, that is an error which says what left it out."""
        choice, asking = self.choice, self.asking
        most = min((each for each in (choice.max_tokens, self.encoder.positions) if each is not None), default=None)
        filters = cheap_filters(choice, most, self.encoder.tokenizer.unknown_token_id)
        filters |= {"held out": _each(asking.held_out)} if asking else {}
        filters |= {"verified": asking.verified} if asking and choice.verify else {}
        ranked = Ranked(self.judge, choice.best, choice.best_per_prompt) if self.judge else None
        filters |= {RANK: ranked.reasons} if ranked else {}
        outcome = Outcome(self.data, (READABLE, *filters))
        tables, rows = [SCHEMA.empty_table()], list[int]()  # the row of each sequence
        candidates = self._candidates(outcome)
        while left := list(islice(candidates, TOGETHER)):
            for name, reasons in filters.items():
                found = list(zip(left, reasons(left) if left else (), strict=True))
                outcome.left_out |= {each.said.row: (name, reason) for each, reason in found if reason}
                left = [each for each, reason in found if not reason]
            kept = [(each, tokens) for each in left for tokens in each.sequences]
            columns = [[s.ids for _, s in kept], [s.trained for _, s in kept], [each.begins for each, _ in kept]]
            tables.append(pa.table(columns, schema=SCHEMA))
            rows += [each.said.row for each, _ in kept]
        outcome.left_out |= dict.fromkeys(ranked.worst() if ranked else (), (RANK, "others are ranked higher"))
        if not outcome.kept:
            by = next(name for name, count in outcome.counts.items() if count)
            raise ConfigError(
                f"no demonstration is left of {self.data.rows:,} (left out by: "
                f"{', '.join(f'{name} {count:,}' for name, count in outcome.counts.items() if count)}); "
                f"for example by {by}: {outcome.example(by)}"
            )
        mask = pa.array([row not in outcome.left_out for row in rows], pa.bool_())
        return Corpus(pa.concat_tables(tables).filter(mask).combine_chunks()), outcome

    def _candidates(self, outcome: Outcome) -> Iterator[Candidate]:
        for number, found in enumerate(self.data.read()):
            if number % TOGETHER == 0:
                self.progress(number, self.data.rows)
                if self.interrupted():
                    raise Interrupted
            try:
                if isinstance(found, UnusableTask):
                    raise found
                yield Candidate(found, tuple(each for each in self.encoder.encode(found) if each.trained.any()))
            except UnusableTask as error:
                outcome.left_out[number] = (READABLE, str(error))
