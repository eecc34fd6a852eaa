"""Which demonstrations are trained on, and in which order. Imports no torch.

    rows ─read─► demonstrations ─encode─► filters, one after the other ─► ranking, if asked ─► corpus
    corpus ─► validation set, by question
           └► training set: shuffled by (seed, epoch), cut into batches

A filter gives a reason for each demonstration that it removes; it sees only those that the filters before it kept.
Batches and learning rates depend on the settings and the step alone, so a resume restores only the step number.
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
from shoal.environments.graders import after_thinking
from shoal.environments.mix import MixedEnvironment
from shoal.environments.protocol import GeneratingEnvironment, prompt_digest, question_digest, task_digest, task_digests
from shoal.environments.settings import Composed
from shoal.errors import ConfigError, EnvironmentSetupError, ScoringFailure, UnusableTask
from shoal.rewards import Job, Scorer
from shoal.rewards.panel import JudgedText, PartJudge
from shoal.rewards.pool import score_all
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
CHUNK = 256  # demonstrations given to a filter at a time; a request to stop is noticed between chunks
SCHEMA = pa.schema({"ids": pa.list_(pa.int32()), "trained": pa.list_(pa.bool_()), "question": pa.int64()})


class SelectionInterrupted(Exception):
    """The process was told to stop. Nothing is kept."""


@dataclass(frozen=True)
class FilterOptions:
    """Options of the command line that decide which demonstrations are kept."""

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
"""The reason to remove each demonstration; empty: it is kept."""


def each_by(reason: Callable[[Demonstration], str]) -> Filter:
    return lambda candidates: [reason(each) for each in candidates]


def plain_filters(options: FilterOptions, max_tokens: float) -> dict[str, Filter]:
    first: dict[bytes, int] = {}
    patterns = [(wanted, re.compile(FORMS.get(wanted, wanted))) for wanted in options.require]

    def form(each: Demonstration) -> str:
        return next((f"no {wanted} in it" for wanted, found in patterns if not found.search(each.completion)), "")

    def length(each: Demonstration) -> str:
        if not each.sequences:
            return "no token of it would be trained on"
        longest = max(len(sequence.ids) for sequence in each.sequences)
        return f"more than {max_tokens} tokens" if longest > max_tokens else ""

    def duplicates(each: Demonstration) -> str:
        row = first.setdefault(each.digest, each.row)
        return "" if row == each.row else f"the same as row {row}"

    return {reason.__name__: each_by(reason) for reason in [*([form] if patterns else []), length, duplicates]}


@dataclass(frozen=True)
class EnvironmentFilters:
    """Filters that ask the environment: is the task held out, and which reward does the answer get?"""

    environment: Environment
    scorer: Scorer | None = None
    min_reward: float = 1.0

    @cached_property
    def _held_out(self) -> tuple[set[bytes], list[GeneratingEnvironment]]:
        digests, generating, waiting = set[bytes](), list[GeneratingEnvironment](), [self.environment]
        for part in waiting:  # grows in the loop
            inner = part.inner if isinstance(part, Composed) else part
            if isinstance(inner, MixedEnvironment):
                waiting += [each.environment for each in inner.parts]
            elif isinstance(inner, GeneratingEnvironment):
                generating.append(inner)
            else:
                digests |= set(task_digests(inner, "held_out"))
        return digests, generating

    def held_out(self, demonstration: Demonstration) -> str:
        """Every question of a conversation is compared, with and without the messages before it."""
        messages = demonstration.messages
        prompts = [(text, messages[:index]) for index, (role, text) in enumerate(messages) if role == "user"]
        asked = {demonstration.question, *(question_digest(*each) for each in prompts)}
        asked |= {prompt_digest(text) for text, _before in prompts or [(demonstration.text, ())]}
        listed, generating = self._held_out
        generated = (part.holds_out(prompt) for part in generating for prompt, _before in prompts)
        return "" if asked.isdisjoint(listed) and not any(generated) else "the environment holds this task out"

    def verified(self, candidates: Sequence[Demonstration]) -> list[str]:
        """The last answer is scored like a rollout. A failure of the scoring machinery is not a low reward."""
        assert self.scorer is not None
        begun = prompt_settings_of(self.environment).thinking
        tasks = {index: task for index, each in enumerate(candidates) if (task := self._task(each))}
        jobs = [Job(task, candidates[index].completion.removeprefix(begun)) for index, task in tasks.items()]
        reasons = ["it names no task of the environment that asks this"] * len(candidates)
        for index, score in zip(tasks, score_all(self.scorer.scores, jobs) if jobs else (), strict=True):
            if isinstance(score, ScoringFailure):
                reasons[index] = f"could not be scored: {' '.join(str(score).split())[:160]}"
            else:
                reasons[index] = "" if score.value >= self.min_reward else f"its reward is below {self.min_reward:g}"
        return reasons

    def _task(self, given: Demonstration) -> str:
        with suppress(EnvironmentSetupError):
            asks = given.task and task_digest(self.environment.task(given.task)) == given.question
            return given.task if asks else ""
        return ""


class Ranking:
    """A filter that removes only what cannot be judged. The worst are known at the end: `worst`."""

    def __init__(self, judge: PartJudge) -> None:
        self._judge, self._ranked = judge, list[tuple[float, int]]()  # minus the value, row

    def __call__(self, candidates: Sequence[Demonstration]) -> list[str]:
        answers = [after_thinking(each.completion) for each in candidates]
        pieces = [
            JudgedText(c.prompt, answer, history=c.messages[:-2]) for c, answer in zip(candidates, answers, strict=True)
        ]
        values, reasons = self._judge.values(pieces), [""] * len(candidates)
        for number, value in enumerate(values):
            if isinstance(value, ScoringFailure) or not math.isfinite(value):
                reasons[number] = f"could not be judged: {value}"
            else:
                self._ranked.append((-value, candidates[number].row))
        return reasons

    def worst(self, share: float) -> list[int]:
        """The rows beyond the best `share`; of equal values the later rows."""
        return [row for _value, row in sorted(self._ranked)[math.ceil(share * len(self._ranked)) :]]


class Corpus:
    """The selected tokens. `questions`: a number per sequence, equal where sequences begin with the same question."""

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
        """A sequence as a training sample: its prompt is all that comes before the first trained token."""
        from shoal.trainer.samples import Sample  # loads torch

        ids = self.table["ids"][number].values.to_numpy().astype(np.int64)
        trained = self.table["trained"][number].values.to_numpy(zero_copy_only=False)
        first = int(np.argmax(trained))
        return Sample(ids[:first], ids[first:], np.zeros(len(ids) - first, np.float32), 1.0, trained[first:])


@dataclass
class FilterReport:
    """Which filter removed which row, and why. `filters` are all that were asked, in order."""

    data: Demonstrations
    filters: tuple[str, ...]
    left_out: dict[int, tuple[str, str]] = field(default_factory=dict)

    @property
    def kept(self) -> list[int]:
        return [row for row in range(self.data.rows) if row not in self.left_out]

    def lines(self) -> list[str]:
        counts = {"read": self.data.rows, **{f"- {name}": 0 for name in self.filters}, "kept": len(self.kept)}
        examples = dict[str, str]()
        for row, (name, reason) in sorted(self.left_out.items()):
            counts[f"- {name}"] += 1
            examples.setdefault(f"- {name}", f"   e.g. row {row} ({self.data.where(row)}): {reason}")
        width = max(map(len, counts))
        return [f"  {name:<{width}}  {count:>9,}{examples.get(name, '')}" for name, count in counts.items()]


def select(
    data: Demonstrations, encoder: Encoder, options: FilterOptions = FilterOptions(),
    environment: EnvironmentFilters | None = None, judge: PartJudge | None = None,
    progress: Callable[[int, int], None] = lambda _done, _total: None, interrupted: Callable[[], bool] = lambda: False,
) -> tuple[Corpus, FilterReport]:  # fmt: skip
    """If nothing is left, the error says which filters removed what."""
    limits = [each for each in (options.max_tokens, encoder.positions) if each is not None]
    filters, ranking = plain_filters(options, min(limits, default=math.inf)), Ranking(judge) if judge else None
    filters |= {"held out": each_by(environment.held_out)} if environment else {}
    filters |= {"verified": environment.verified} if environment and options.verify else {}
    filters |= {RANK: ranking} if ranking else {}
    report = FilterReport(data, (READABLE, *filters))

    def encoded() -> Iterator[Demonstration]:
        for number, found in enumerate(data.read()):
            if number % CHUNK == 0:
                progress(number, data.rows)
                if interrupted():
                    raise SelectionInterrupted
            try:
                if isinstance(found, UnusableTask):
                    raise found
                yield replace(found, sequences=tuple(each for each in encoder.encode(found) if each.trained.any()))
            except UnusableTask as error:
                report.left_out[number] = (READABLE, str(error))

    tables, rows, waiting = [SCHEMA.empty_table()], list[int](), encoded()  # rows: the row of each sequence
    while left := list(islice(waiting, CHUNK)):
        for name, reasons in filters.items():
            judged = list(zip(left, reasons(left) if left else (), strict=True))
            report.left_out |= {each.row: (name, reason) for each, reason in judged if reason}
            left = [each for each, reason in judged if not reason]
        kept = [(each, tokens) for each in left for tokens in each.sequences]
        columns = [[s.ids for _, s in kept], [s.trained for _, s in kept], [each.begins for each, _ in kept]]
        tables.append(pa.table(columns, schema=SCHEMA))
        rows += [each.row for each, _ in kept]
    worst = ranking.worst(options.best or 1) if ranking else []
    report.left_out |= dict.fromkeys(worst, (RANK, "others are ranked higher"))
    if not report.kept:
        left_out = "; ".join(" ".join(line.split()) for line in report.lines())
        raise ConfigError(f"no demonstration is left: {left_out}")
    mask = pa.array([row not in report.left_out for row in rows], pa.bool_())
    return Corpus(pa.concat_tables(tables).filter(mask).combine_chunks()), report


Indices = npt.NDArray[np.int64]
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
"""Defaults of the [trainer] table that differ from those of RL."""
HARMLESS = frozenset({"tracking", "checkpoint_every", "keep_checkpoints", "evaluate_every"})
"""Settings that may change when a warm start is resumed."""
USED = HARMLESS | {
    "learning_rate", "betas", "weight_decay", "warmup_steps", "grad_clip", "memory", "lora", "guards",
    "micro_batch_tokens", "device", "threads", "publish_dtype",
}  # fmt: skip
"""Settings of [trainer] that a warm start uses. The others are about rollouts, rewards and hubs."""


def refuse_unused(override: str) -> None:
    table, key, *_ = [*override.partition("=")[0].strip().split("."), ""]
    if table != "trainer" or key in TrainerSettings.model_fields.keys() - USED:
        used = ", ".join(sorted(USED))
        raise ConfigError(f"--set {override}: {table}.{key} means nothing to a warm start; of [trainer] {used} do")


@dataclass(frozen=True)
class Schedule:
    """Number of epochs, batch size, order. `steps` ends training whatever the epochs say (None: after all epochs). At
    least `validation` sequences are kept for validation (None: a twentieth, 256 at most)."""

    epochs: int = 1
    steps: int | None = None
    batch: int = 32
    seed: int = 0
    validation: int | None = None

    def batches_of(self, questions: Indices) -> tuple[tuple[Indices, ...], Indices]:
        """The sequences of each step, and those kept for validation."""
        # Validation takes whole questions, the lowest numbers first, with all their answers.
        share = min(len(questions) // VALIDATION_SHARE, MOST_VALIDATION)
        wanted = share if self.validation is None else self.validation
        asked, answers = np.unique(questions, return_counts=True)
        enough = int(np.searchsorted(np.cumsum(answers), wanted)) + 1 if wanted else 0
        aside = np.flatnonzero(np.isin(questions, asked[:enough])).astype(np.int64)
        others = np.setdiff1d(np.arange(len(questions)), aside)
        if not len(others):
            details = "sequences are kept for validation: lower --validation, or give more"
            raise ConfigError(f"all {len(questions)} {details}")
        # Equal sizes: a last batch of one sequence would weigh as much as a full one.
        batches = math.ceil(len(others) / self.batch)

        def in_order() -> Iterator[Indices]:
            for epoch in range(self.epochs) if self.steps is None else count():
                # Raw bits of a counter-based generator are the same on every machine and in every version.
                shuffle = np.random.Philox(key=[self.seed, epoch]).random_raw(len(others))
                yield from np.array_split(others[np.argsort(shuffle, kind="stable")], batches)

        return tuple(islice(in_order(), self.steps)), aside

    def rate_factor(self, step: int, steps: int, warmup: int) -> float:
        """Factor of the learning rate: 1 during warm-up, then a cosine to almost 0."""
        done = max(0, step - warmup) / max(1, steps - warmup)
        return 0.5 * (1.0 + math.cos(math.pi * done))
