"""Which demonstrations are trained on, and when. Imports no torch.

    rows ─read─► demonstrations ─encode─► candidates ─filter, filter, …─► corpus ─rank, if asked─► trained on
      └ cannot be read: counted             └ left out: by which filter, and why
    corpus ─► validation, by question ─┐
           └► the others: epoch 0, an order by (seed, 0), cut into batches; epoch 1, …

A filter says of each candidate why it is left out, or nothing; each sees only what those before it have kept. Batches
and rates are functions of the settings alone: a resume restores the number of the step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from shoal.environments import Environment, prompt_settings_of
from shoal.environments.composed import Composed
from shoal.environments.graders import after_thinking
from shoal.environments.mix import MixedEnvironment
from shoal.environments.protocol import GeneratingEnvironment, prompt_digest, question_digest, task_digest, task_digests
from shoal.errors import ConfigError, EnvironmentSetupError, ScoringFailure, UnusableTask
from shoal.rewards import Job, Scorer
from shoal.rewards.panel import JudgedText, PartJudge
from shoal.rewards.protocol import score_all
from shoal.trainer.demonstrations.reading import Demonstration, Demonstrations, Encoder
from shoal.trainer.settings import LossName, TrainerSettings

if TYPE_CHECKING:
    from shoal.trainer.samples import Sample

FORMS = {
    "thinking": r"(?s)<think>.*\S.*</think>.*\S",
    "boxed": r"\\(boxed|fbox)\s*\{[^}]*\S",
    "answer": r"(?s)<answer>.*\S.*</answer>",
}
READABLE, RANK = "readable", "rank"
TOGETHER = 256  # candidates that a filter is asked about at a time; a process that is told to stop does so within them
SCHEMA = pa.schema({"ids": pa.list_(pa.int32()), "trained": pa.list_(pa.bool_()), "question": pa.int64()})


class Interrupted(Exception):
    """The process was told to stop while it was choosing. Nothing is kept of it."""


@dataclass(frozen=True)
class Choice:
    """Which demonstrations are wanted, as the command line says it."""

    max_tokens: int | None = None
    require: tuple[str, ...] = ()
    verify: bool = False
    min_reward: float = 1.0
    rank: Path | None = None
    best: float | None = None
    chat: bool | None = None

    def __post_init__(self) -> None:
        if (self.best is None) != (self.rank is None):
            raise ConfigError("--rank FOLDER and --best SHARE belong together: give both, or none of them")
        for wanted in self.require:
            try:
                re.compile(FORMS.get(wanted, wanted))
            except re.error as error:
                names = ", ".join(FORMS)
                raise ConfigError(f"--require {wanted}: no regular expression, nor one of {names}") from error


Filter = Callable[[Sequence[Demonstration]], list[str]]


def each_by(reason: Callable[[Demonstration], str]) -> Filter:
    return lambda candidates: [reason(each) for each in candidates]


def cheap_filters(choice: Choice, most: float) -> dict[str, Filter]:
    """Those that look at the demonstration alone, or at those before it."""
    first: dict[bytes, int] = {}
    patterns = [(wanted, re.compile(FORMS.get(wanted, wanted))) for wanted in choice.require]

    def form(each: Demonstration) -> str:
        return next((f"no {wanted} in it" for wanted, found in patterns if not found.search(each.completion)), "")

    def length(each: Demonstration) -> str:
        if not each.sequences:
            return "no token of it would be trained on"
        return f"more than {most} tokens" if max(len(sequence.ids) for sequence in each.sequences) > most else ""

    def duplicates(each: Demonstration) -> str:
        row = first.setdefault(each.digest, each.row)
        return "" if row == each.row else f"the same as row {row}"

    return {reason.__name__: each_by(reason) for reason in [*([form] if patterns else []), length, duplicates]}


@dataclass(frozen=True)
class Asking:
    """Filters that ask the environment: which tasks it holds out, and what an answer is worth to it."""

    environment: Environment
    scorer: Scorer | None = None
    least: float = 1.0

    @cached_property
    def _held_out(self) -> tuple[set[bytes], list[GeneratingEnvironment]]:
        """Of the environments that a recipe is made of: the digests of tasks that are listed, and those that draw."""
        digests, drawing, waiting = set[bytes](), list[GeneratingEnvironment](), [self.environment]
        for part in waiting:  # which grows
            inner = part.inner if isinstance(part, Composed) else part
            if isinstance(inner, MixedEnvironment):
                waiting += [each.environment for each in inner.parts]
            elif isinstance(inner, GeneratingEnvironment):
                drawing.append(inner)
            else:
                digests |= set(task_digests(inner, "held_out"))
        return digests, drawing

    def held_out(self, said: Demonstration) -> str:
        """Every question of a conversation counts, not only the last, with what was said before it and without."""
        prompts = [(text, said.messages[:index]) for index, (role, text) in enumerate(said.messages) if role == "user"]
        asked = {said.question, *(question_digest(*each) for each in prompts)}
        asked |= {prompt_digest(text) for text, _before in prompts or [(said.text, ())]}
        listed, drawing = self._held_out
        drawn = (part.holds_out(prompt) for part in drawing for prompt, _before in prompts)
        return "" if asked.isdisjoint(listed) and not any(drawn) else "the environment holds this task out"

    def verified(self, candidates: Sequence[Demonstration]) -> list[str]:
        """The last words are scored as rollouts are; a failure of the machinery is no reward at all."""
        assert self.scorer is not None
        begun = prompt_settings_of(self.environment).thinking
        tasks = {index: task for index, each in enumerate(candidates) if (task := self._task(each))}
        jobs = [Job(task, candidates[index].completion.removeprefix(begun)) for index, task in tasks.items()]
        reasons = ["it names no task of the environment that asks this"] * len(candidates)
        for index, score in zip(tasks, score_all(self.scorer.scores, jobs) if jobs else (), strict=True):
            if isinstance(score, ScoringFailure):
                reasons[index] = f"could not be scored: {' '.join(str(score).split())[:160]}"
            else:
                reasons[index] = "" if score.value >= self.least else f"its reward is below {self.least:g}"
        return reasons

    def _task(self, said: Demonstration) -> str:
        with suppress(EnvironmentSetupError):
            return said.task if said.task and task_digest(self.environment.task(said.task)) == said.question else ""
        return ""


class Corpus:
    """The tokens that were chosen, as samples for the step, by number. `questions`: equal where they begin alike."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self.questions: npt.NDArray[np.int64] = table["question"].to_numpy()

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

    def lines(self) -> list[str]:
        """For people: rows, what each filter left out with an example, and what is kept."""
        counts = {"read": self.data.rows, **{f"- {name}": 0 for name in self.filters}, "kept": len(self.kept)}
        examples = dict[str, str]()
        for row, (name, reason) in sorted(self.left_out.items()):
            counts[f"- {name}"] += 1
            examples.setdefault(f"- {name}", f"   e.g. row {row} ({self.data.where(row)}): {reason}")
        width = max(map(len, counts))
        return [f"  {name:<{width}}  {count:>9,}{examples.get(name, '')}" for name, count in counts.items()]


def choose(
    data: Demonstrations, encoder: Encoder, choice: Choice = Choice(), asking: Asking | None = None,
    judge: PartJudge | None = None, progress: Callable[[int, int], None] = lambda _done, _total: None,
    interrupted: Callable[[], bool] = lambda: False,
) -> tuple[Corpus, Outcome]:  # fmt: skip
    """`asking` with an environment, `judge` for a rank. If nothing is left, the error says what left it out."""
    ranked: list[tuple[float, int]] = []  # value and row; what is best is known at the end

    def rank(candidates: Sequence[Demonstration]) -> list[str]:
        """Leaves out only what could not be judged."""
        assert judge is not None
        answers = [after_thinking(each.completion) for each in candidates]
        pieces = [
            JudgedText(c.prompt, said, history=c.messages[:-2]) for c, said in zip(candidates, answers, strict=True)
        ]
        values, reasons = judge.values(pieces), [""] * len(candidates)
        for number, value in enumerate(values):
            if isinstance(value, ScoringFailure) or not math.isfinite(value):
                reasons[number] = f"could not be judged: {value}"
            else:
                ranked.append((-value, candidates[number].row))
        return reasons

    limits = [each for each in (choice.max_tokens, encoder.positions) if each is not None]
    filters = cheap_filters(choice, min(limits, default=math.inf))
    filters |= {"held out": each_by(asking.held_out)} if asking else {}
    filters |= {"verified": asking.verified} if asking and choice.verify else {}
    filters |= {RANK: rank} if judge else {}
    outcome = Outcome(data, (READABLE, *filters))

    def candidates() -> Iterator[Demonstration]:
        for number, found in enumerate(data.read()):
            if number % TOGETHER == 0:
                progress(number, data.rows)
                if interrupted():
                    raise Interrupted
            try:
                if isinstance(found, UnusableTask):
                    raise found
                yield replace(found, sequences=tuple(each for each in encoder.encode(found) if each.trained.any()))
            except UnusableTask as error:
                outcome.left_out[number] = (READABLE, str(error))

    tables, rows, waiting = [SCHEMA.empty_table()], list[int](), candidates()  # rows: that of each sequence
    while left := list(islice(waiting, TOGETHER)):
        for name, reasons in filters.items():
            judged = list(zip(left, reasons(left) if left else (), strict=True))
            outcome.left_out |= {each.row: (name, reason) for each, reason in judged if reason}
            left = [each for each, reason in judged if not reason]
        kept = [(each, tokens) for each in left for tokens in each.sequences]
        columns = [[s.ids for _, s in kept], [s.trained for _, s in kept], [each.begins for each, _ in kept]]
        tables.append(pa.table(columns, schema=SCHEMA))
        rows += [each.row for each, _ in kept]
    worst = sorted(ranked)[math.ceil((choice.best or 1) * len(ranked)) :]  # of equal ones the earlier row is the better
    outcome.left_out |= {row: (RANK, "others are ranked higher") for _value, row in worst}
    if not outcome.kept:
        left_out = "; ".join(" ".join(line.split()) for line in outcome.lines())
        raise ConfigError(f"no demonstration is left: {left_out}")
    mask = pa.array([row not in outcome.left_out for row in rows], pa.bool_())
    return Corpus(pa.concat_tables(tables).filter(mask).combine_chunks()), outcome


Numbers = npt.NDArray[np.int64]
VALIDATION_SHARE, MOST_VALIDATION = 20, 256
LOSS: LossName = "cross_entropy"
DEFAULTS = """
learning_rate = 2e-5
betas = [0.9, 0.999]
warmup_steps = 10
grad_clip = 1.0
minibatches = 1
checkpoint_every = 50
evaluate_every = 50
"""
"""Of the [trainer] table, where imitation wants others than RL."""
HARMLESS = frozenset({"tracking", "checkpoint_every", "keep_checkpoints", "evaluate_every"})
"""Settings that may be others when a warm start continues."""
USED = HARMLESS | {
    "learning_rate", "betas", "weight_decay", "warmup_steps", "grad_clip", "memory", "lora", "guards",
    "micro_batch_tokens", "device", "threads", "publish_dtype",
}  # fmt: skip
"""Settings of [trainer] that mean something here. The others are about rollouts, rewards and hubs."""


def refuse_unused(override: str) -> None:
    """An override that would change nothing is a mistake."""
    table, key, *_ = [*override.partition("=")[0].strip().split("."), ""]
    if table != "trainer" or key in TrainerSettings.model_fields.keys() - USED:
        used = ", ".join(sorted(USED))
        raise ConfigError(f"--set {override}: {table}.{key} means nothing to a warm start; of [trainer] {used} do")


@dataclass(frozen=True)
class Course:
    """How long, in batches of how many sequences, in which order. `steps` ends it whatever the epochs; None: all of
    them. At least `validation` sequences are kept for validation; None: a twentieth, 256 at most."""

    epochs: int = 1
    steps: int | None = None
    batch: int = 32
    seed: int = 0
    validation: int | None = None

    def timetable(self, questions: Numbers) -> tuple[tuple[Numbers, ...], Numbers]:
        """The sequences of every step, and those that are kept for validation; `questions` are those of all."""
        # Those of the lowest questions, each with all its answers, until they are enough.
        share = min(len(questions) // VALIDATION_SHARE, MOST_VALIDATION)
        wanted = share if self.validation is None else self.validation
        asked, answers = np.unique(questions, return_counts=True)
        enough = int(np.searchsorted(np.cumsum(answers), wanted)) + 1 if wanted else 0
        aside = np.flatnonzero(np.isin(questions, asked[:enough])).astype(np.int64)
        others = np.setdiff1d(np.arange(len(questions)), aside)
        if not len(others):
            told = "sequences are kept for validation: lower --validation, or give more"
            raise ConfigError(f"all {len(questions)} {told}")
        # As even as can be: a last batch of one sequence would weigh as much as one of many.
        batches = math.ceil(len(others) / self.batch)

        def in_order() -> Iterator[Numbers]:
            for epoch in range(self.epochs) if self.steps is None else count():
                # The raw bits of a counter-based generator: the same on every machine and in every version.
                shuffle = np.random.Philox(key=[self.seed, epoch]).random_raw(len(others))
                yield from np.array_split(others[np.argsort(shuffle, kind="stable")], batches)

        return tuple(islice(in_order(), self.steps)), aside

    def rate_factor(self, step: int, steps: int, warmup: int) -> float:
        """What the rate of a step is multiplied by: 1 while it warms up, then a cosine to almost 0."""
        done = max(0, step - warmup) / max(1, steps - warmup)
        return 0.5 * (1.0 + math.cos(math.pi * done))
