"""Rows through the filters, in one pass, into a corpus.

    rows ─read─► demonstrations ─encode─► candidates ─filter, filter, …─► corpus ─rank, if asked─► trained on
      └ cannot be read: counted             └ left out: by which filter, and why

A filter takes a few candidates and says of each why it is left out, or nothing. The cheap ones are asked first, and
each sees only what those before it have kept. Memory goes with the number of rows: tokens are written as they come.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from blake3 import blake3

from shoal.environments import Environment, prompt_settings_of
from shoal.environments.composed import Composed
from shoal.environments.graders.thinking import after_thinking
from shoal.environments.mix import MixedEnvironment
from shoal.environments.protocol import GeneratingEnvironment
from shoal.environments.questions import prompt_digest, question_digest, task_digest, task_digests
from shoal.errors import CheckpointError, ConfigError, EnvironmentSetupError, ScoringFailure, UnusableTask
from shoal.rewards import Job, Scorer
from shoal.rewards.panel import PartJudge, Piece
from shoal.rewards.protocol import settled
from shoal.runtime.files import ensure_folder, resource_error, write_atomically
from shoal.trainer.demonstrations.likeness import Lookalikes, digest_of, plain_text
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
COMMON = 16  # what is asked in more conversations than this ("thanks") says nothing of them
CORPUS, MARK = "corpus.arrow", "corpus.json"


class Interrupted(Exception):
    """The process was told to stop while it was choosing. Nothing is kept of it."""


@dataclass(frozen=True)
class Choice:
    """Which demonstrations are wanted, as the command line says it."""

    min_tokens: int = 1
    max_tokens: int | None = None
    truncate: bool = False
    require: tuple[str, ...] = ()
    duplicates: bool = True
    near_duplicates: float | None = None
    verify: bool = False
    min_reward: float = 1.0
    rank: Path | None = None
    best: float | None = None
    best_per_prompt: int | None = None
    chat: bool | None = None

    def __post_init__(self) -> None:
        """What cannot be meant is said before anything is opened."""
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


class Fate(NamedTuple):
    """What became of a row; `filter` is empty if it is kept."""

    filter: str
    reason: str
    tokens: int | None = None
    trained: int | None = None
    reward: float | None = None
    rank: float | None = None


@dataclass
class Candidate:
    """A demonstration on its way through the filters; what they find out about it is kept for the report."""

    said: Demonstration
    sequences: tuple[Tokens, ...]
    reward: float | None = None
    rank: float | None = None

    @property
    def tokens(self) -> int:
        return max((len(sequence.ids) for sequence in self.sequences), default=0)

    @property
    def trained(self) -> int:
        return sum(int(sequence.trained.sum()) for sequence in self.sequences)

    @property
    def question(self) -> bytes:
        """The digest of what it answers, or of the text itself."""
        said = self.said
        return question_digest(said.prompt, said.messages[:-2]) if said.messages else question_digest(said.text)

    @property
    def turns(self) -> list[bytes]:
        """The digest of everything that it is asked, in order, each without what was said before; or of the text."""
        asked = [text for role, text in self.said.messages if role == "user"]
        return [prompt_digest(text) for text in asked or [self.said.text]]

    @property
    def plain(self) -> tuple[bytes, bytes]:
        """The system message; and what is said, by whom, and which of it is trained on."""
        said, given = self.said.messages or (("", self.said.text),), self.said.given
        who = ["" if role == "assistant" and index >= given else role for index, (role, _) in enumerate(said)]
        rest = [(role, text) for role, (_, text) in zip(who, said, strict=True) if role != "system"]
        return plain_text(each for each in said if each[0] == "system"), plain_text(rest)


Filter = Callable[[Sequence[Candidate]], list[str]]


def _each(reason: Callable[[Candidate], str]) -> Filter:
    return lambda candidates: [reason(each) for each in candidates]


def cheap_filters(choice: Choice, most: int | None, unknown: int | None) -> dict[str, Filter]:
    """Those that look at the demonstration alone, or at those before it. `unknown`: the tokenizer's token for that."""
    first: dict[bytes, int] = {}
    patterns = [(wanted, re.compile(FORMS.get(wanted, wanted))) for wanted in choice.require]
    known = Lookalikes(choice.near_duplicates or 1.0)

    def form(each: Candidate) -> str:
        return next((f"no {wanted} in it" for wanted, found in patterns if not found.search(each.said.completion)), "")

    def length(each: Candidate) -> str:
        if not each.trained:
            return "no token of it would be trained on"
        if most is not None and each.tokens > most:
            return f"more than {most} tokens"
        return f"less than {choice.min_tokens} tokens" if each.tokens < choice.min_tokens else ""

    def characters(each: Candidate) -> str:
        found = unknown is not None and any(unknown in sequence.ids for sequence in each.sequences)
        return "characters that the tokenizer does not know" if found else ""

    def duplicates(each: Candidate) -> str:
        row = first.setdefault(digest_of(b"".join(each.plain)), each.said.row)
        return "" if row == each.said.row else f"the same as row {row}"

    def near_duplicates(each: Candidate) -> str:
        system, plain = each.plain  # part of the text, a long system message would make all rows alike
        row = known.earlier(each.said.row, plain, digest_of(system))
        return "" if row is None else f"nearly the same as row {row}"

    found = {"form": form} if patterns else {}
    found |= {"length": length, "characters": characters}
    found |= {"duplicates": duplicates} if choice.duplicates else {}
    found |= {"near duplicates": near_duplicates} if choice.near_duplicates is not None else {}
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
        messages = candidate.said.messages
        prompts = [(text, messages[:index]) for index, (role, text) in enumerate(messages) if role == "user"]
        asked = {candidate.question, *candidate.turns, *(question_digest(*each) for each in prompts)}
        generating = (part for part in self._parts if isinstance(part, GeneratingEnvironment))
        if asked.isdisjoint(self._held_out) and not any(
            part.holds_out(prompt) for part in generating for prompt, _before in prompts
        ):
            return ""
        return "the environment holds this task out"

    def verified(self, candidates: Sequence[Candidate]) -> list[str]:
        """The last words are scored as rollouts are; a failure of the machinery is no reward at all."""
        assert self.scorer is not None
        begun = prompt_settings_of(self.environment).thinking
        tasks = {index: task for index, each in enumerate(candidates) if (task := self._task(each))}
        jobs = [Job(task, candidates[index].said.completion.removeprefix(begun)) for index, task in tasks.items()]
        scores = dict(zip(tasks, settled(self.scorer.scores, jobs) if jobs else (), strict=True))
        reasons = ["no task of the environment asks this"] * len(candidates)
        for index, score in scores.items():
            if isinstance(score, ScoringFailure):
                reasons[index] = f"could not be scored: {' '.join(str(score).split())[:160]}"
            else:
                candidates[index].reward = score.value
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
                each.rank = float(value)  # type: ignore[arg-type]
                self._values.append((each.rank, each.said.row, each.question))
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


class Corpus:
    """The tokens that were chosen, as samples for the step, by number. The file is mapped: memory goes with a step."""

    def __init__(self, folder: Path) -> None:
        again = f"remove {folder.parent} and begin again"
        try:
            mark = json.loads((folder / MARK).read_bytes())
            found = blake3(max_threads=blake3.AUTO).update_mmap(folder / CORPUS).hexdigest()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"the chosen demonstrations in {folder} cannot be read: {error}; {again}") from error
        if mark["blake3"] != found:
            raise CheckpointError(f"the chosen demonstrations in {folder} are damaged; {again}")
        self._table = pa.ipc.open_file(pa.memory_map(str(folder / CORPUS))).read_all()
        self._places, self.questions = np.array(mark["sequences"], np.int64).reshape(-1, 2).T
        every: npt.NDArray[np.int64] = pc.list_value_length(self._table["ids"]).to_numpy().astype(np.int64)
        self.lengths = every[self._places]

    def __len__(self) -> int:
        return len(self._places)

    def sample(self, number: int) -> Sample:
        """A sequence as the step takes it: what comes before the first token that is trained on is its prompt."""
        from shoal.trainer.samples import Sample  # loads torch, which choosing does without

        place = int(self._places[number])
        ids = self._table["ids"][place].values.to_numpy().astype(np.int64)
        trained = self._table["trained"][place].values.to_numpy(zero_copy_only=False)
        first = int(np.argmax(trained))
        return Sample(ids[:first], ids[first:], np.zeros(len(ids) - first, np.float32), 1.0, trained[first:])


SCHEMA = pa.schema({"ids": pa.list_(pa.int32()), "trained": pa.list_(pa.bool_())})


def tied(asked: Sequence[Sequence[bytes]]) -> list[int]:
    """Of each conversation, by the digests of its questions, a number of its group: validation has all or none.

    Conversations that share a question are tied, and so are those that are tied to the same one. What is asked in more
    than `COMMON` different conversations ties nothing, or all would hang together. The number follows from the texts.
    """
    keys = [int.from_bytes(sha256(b"".join(turns)).digest()[:7], "big") for turns in asked]
    group, places = {key: key for key in keys}, dict[bytes, dict[int, None]]()

    def lowest(key: int) -> int:
        while group[key] != key:
            group[key] = key = group[group[key]]
        return key

    for key, turns in zip(keys, asked, strict=True):
        for turn in turns:
            places.setdefault(turn, {})[key] = None
    for first, *others in (list(found) for found in places.values() if len(found) <= COMMON):
        for other in others:
            low, high = sorted((lowest(first), lowest(other)))
            group[high] = low
    return [lowest(key) for key in keys]


@dataclass
class Outcome:
    """What became of every row, by its number. `filters` are those that were asked, in their order."""

    data: Demonstrations
    filters: tuple[str, ...]
    fates: dict[int, Fate] = field(default_factory=dict)

    @property
    def kept(self) -> list[int]:
        return [row for row, fate in sorted(self.fates.items()) if not fate.filter]

    @property
    def counts(self) -> dict[str, int]:
        """How many each filter left out."""
        found = Counter(fate.filter for fate in self.fates.values())
        return {name: found[name] for name in self.filters}

    def example(self, name: str) -> str:
        found = ((row, fate.reason) for row, fate in sorted(self.fates.items()) if fate.filter == name)
        return next((f"row {row} ({self.data.where(row)}): {reason}" for row, reason in found), "")

    def lines(self) -> list[str]:
        """For people: rows, what each filter left out with an example, and what is kept."""
        counts = {"read": self.data.rows, **{f"- {name}": n for name, n in self.counts.items()}, "kept": len(self.kept)}
        width = max(map(len, counts))
        examples = {f"- {name}": f"   e.g. {said}" for name in self.filters if (said := self.example(name))}
        return [f"  {name:<{width}}  {count:>9,}{examples.get(name, '')}" for name, count in counts.items()]

    def write(self, path: Path) -> None:
        """A Parquet file, one row for each row of the data, in order."""
        fates = sorted(self.fates.items())
        where = {"row": [row for row, _ in fates], "where": [self.data.where(row) for row, _ in fates]}
        columns = {name: [getattr(fate, name) for _, fate in fates] for name in Fate._fields}
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table({**where, "kept": [not fate.filter for _, fate in fates], **columns}), sink)
        ensure_folder(path.absolute().parent)
        write_atomically(path, sink.getvalue().to_pybytes())


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

    def run(self, folder: Path) -> tuple[Corpus, Outcome]:
        """Choose, and write the corpus. If nothing is left, that is an error which says what left it out."""
        choice, asking = self.choice, self.asking
        most = min((each for each in (choice.max_tokens, self.encoder.positions) if each is not None), default=None)
        filters = cheap_filters(choice, most, self.encoder.tokenizer.unknown_token_id)
        filters |= {"held out": _each(asking.held_out)} if asking else {}
        filters |= {"verified": asking.verified} if asking and choice.verify else {}
        ranked = Ranked(self.judge, choice.best, choice.best_per_prompt) if self.judge else None
        filters |= {RANK: ranked.reasons} if ranked else {}
        outcome = Outcome(self.data, (READABLE, *filters))
        shutil.rmtree(folder, ignore_errors=True)  # what a kill left of an earlier one
        ensure_folder(folder)
        try:
            self._write(folder, filters, ranked, outcome, most if choice.truncate else None)
        except OSError as error:
            raise resource_error("write", folder, error) from error
        return Corpus(folder), outcome

    def _write(
        self, folder: Path, filters: dict[str, Filter], ranked: Ranked | None, outcome: Outcome, cut_at: int | None
    ) -> None:
        rows: list[int] = []  # of each sequence
        asked: list[list[bytes]] = []
        with pa.ipc.new_file(str(folder / CORPUS), SCHEMA) as writer:
            candidates = self._candidates(outcome, cut_at)
            while some := list(islice(candidates, TOGETHER)):
                kept = [(each, tokens) for each in _through(some, filters, outcome) for tokens in each.sequences]
                columns = [[tokens.ids for _, tokens in kept], [tokens.trained for _, tokens in kept]]
                writer.write(pa.record_batch(columns, schema=SCHEMA))
                rows += [each.said.row for each, _ in kept]
                asked += [each.turns for each, _ in kept]
        for row in ranked.worst() if ranked else ():
            outcome.fates[row] = outcome.fates[row]._replace(filter=RANK, reason="others are ranked higher")
        if not outcome.kept:
            by = next(name for name, count in outcome.counts.items() if count)
            raise ConfigError(
                f"no demonstration is left of {self.data.rows:,} (left out by: "
                f"{', '.join(f'{name} {count:,}' for name, count in outcome.counts.items() if count)}); "
                f"for example by {by}: {outcome.example(by)}"
            )
        places = [(place, group) for place, group in enumerate(tied(asked)) if not outcome.fates[rows[place]].filter]
        digest = blake3(max_threads=blake3.AUTO).update_mmap(folder / CORPUS).hexdigest()
        write_atomically(folder / MARK, json.dumps({"blake3": digest, "sequences": places}).encode())

    def _candidates(self, outcome: Outcome, cut_at: int | None) -> Iterator[Candidate]:
        for number, found in enumerate(self.data.read()):
            if number % TOGETHER == 0:
                self.progress(number, self.data.rows)
                if self.interrupted():
                    raise Interrupted
            try:
                if isinstance(found, UnusableTask):
                    raise found
                sequences = tuple(each.cut(cut_at) for each in self.encoder.encode(found))
                yield Candidate(found, tuple(each for each in sequences if each.trained.any()))
            except UnusableTask as error:
                outcome.fates[number] = Fate(READABLE, str(error))


def _through(candidates: Iterable[Candidate], filters: dict[str, Filter], outcome: Outcome) -> list[Candidate]:
    """Those that no filter leaves out."""
    left, out = list(candidates), dict[int, tuple[str, str]]()
    for name, reasons in filters.items():
        found = list(zip(left, reasons(left) if left else (), strict=True))
        out |= {each.said.row: (name, reason) for each, reason in found if reason}
        left = [each for each, reason in found if not reason]
    for each in candidates:
        fate = Fate(*out.get(each.said.row, ("", "")), each.tokens, each.trained, each.reward, each.rank)
        outcome.fates[each.said.row] = fate
    return left
