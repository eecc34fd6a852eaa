"""The reward, computed here and nowhere else: tokens to text by the policy's own tokenizer, text to score.

    group ─► texts ─► scores ─► length budget ─► judges ─► rewards with their parts

A failure of the scoring machinery is `ScoringFailure`: the group is unscored, never rewarded with 0. Groups for which
there was no time are `NotStarted` and are scored later.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from shoal.environments import Environment, Score, Task, budget_of, prompt_settings_of
from shoal.environments.protocol import reads_tokens
from shoal.errors import EnvironmentSetupError, ScoringFailure
from shoal.protocol import MAX_REWARD, Lease, Rollout, RolloutReward, unpack_spans
from shoal.rewards import Job, NotStarted, Scorer
from shoal.rewards.panel import JudgedText, Panel, ScoredText
from shoal.rewards.pool import score_all

log = logging.getLogger(__name__)

Decode = Callable[[Sequence[list[int]]], list[str]]

MAX_PARTS = 64
MAX_NOTE = 200


def completion_ids(rollout: Rollout, eos_token_ids: Collection[int]) -> list[int]:
    """The tokens to score, without one end-of-sequence token at the end; of a dialogue only the last turn of the
    model."""
    ids: list[int] = rollout.token_ids.tolist()
    for start, length in unpack_spans(rollout.given, len(ids))[-1:]:
        ids = ids[start + length :]
    return ids[:-1] if ids and ids[-1] in eos_token_ids else ids


def sampled_tokens(rollout: Rollout, eos_token_ids: Collection[int]) -> int:
    """The length for a budget: drawn tokens, without one of these end-of-sequence tokens at the end."""
    ids = rollout.token_ids
    given = sum(length for _start, length in unpack_spans(rollout.given, len(ids)))
    return len(ids) - given - int(len(ids) > 0 and int(ids[-1]) in eos_token_ids)


@dataclass(frozen=True)
class Group:
    lease: Lease
    rollouts: Sequence[Rollout]


@dataclass(frozen=True)
class Scored:
    """The rewards of a group, and notes (rollout, note) for the owner (`RewardNotes`)."""

    rewards: tuple[RolloutReward, ...] = ()
    notes: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class _Text:
    """A group as text: its task, its target length, and one job per rollout."""

    task: Task
    target: int | None
    jobs: tuple[Job, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Scoring:
    """How groups get their rewards: the environment's score, the length budget, and the judges. All groups are scored
    at once, to use all processes; each is scored completely or not at all."""

    environment: Environment
    scorer: Scorer
    panel: Panel = field(default_factory=Panel)

    def score(self, groups: Sequence[Group], decode: Decode) -> list[Scored | ScoringFailure]:
        """One result per group, in order. At least one that can be scored is not `NotStarted`."""
        results: dict[int, Scored | ScoringFailure] = {}
        texts, pieces = dict[int, _Text](), dict[int, list[ScoredText]]()
        for index, group in enumerate(groups):
            try:
                texts[index] = self._read(group, decode)
            except EnvironmentSetupError as error:
                results[index] = ScoringFailure(f"the environment does not know the lease's task: {error}")
        for index, scores in self._scores(texts).items():
            if isinstance(scores, ScoringFailure):
                results[index] = scores
            else:
                pieces[index] = self._pieces(texts[index], scores)
        for index, judged in zip(pieces, self.panel.add(list(pieces.values())), strict=True):
            results[index] = judged if isinstance(judged, ScoringFailure) else self._final(texts[index].task, judged)
        return [results[index] for index in range(len(groups))]

    def _read(self, group: Group, decode: Decode) -> _Text:
        lease, eos, budget = group.lease, group.lease.sampling.eos_token_ids, budget_of(self.environment)
        task = self.environment.task(lease.task)
        said = [completion_ids(rollout, eos) for rollout in group.rollouts]
        tokens = [tuple(ids) if reads_tokens(self.environment) else None for ids in said]
        jobs = tuple(Job(lease.task, *each) for each in zip(decode(said), tokens, strict=True))
        left_out = () if budget is not None and budget.count_eos else eos
        lengths = tuple(sampled_tokens(rollout, left_out) for rollout in group.rollouts)
        return _Text(task, lease.length_target, jobs, lengths)

    def _scores(self, texts: Mapping[int, _Text]) -> dict[int, list[Score] | ScoringFailure]:
        """The scores of each group. If there is no time for any, the first group gets all its time, or a group that is
        always too slow would never be decided."""
        jobs = [job for text in texts.values() for job in text.jobs]
        found = dict(zip(jobs, self.scorer.scores(jobs), strict=True))
        groups = {index: _whole([found[job] for job in text.jobs]) for index, text in texts.items()}
        if groups and all(isinstance(group, NotStarted) for group in groups.values()):
            first = next(iter(texts))
            open_ = [job for job in texts[first].jobs if isinstance(found[job], NotStarted)]
            found |= zip(open_, score_all(self.scorer.scores, open_), strict=True)
            groups[first] = _whole([found[job] for job in texts[first].jobs])
        return groups

    def _pieces(self, text: _Text, scores: Sequence[Score]) -> list[ScoredText]:
        budget, begun = budget_of(self.environment), prompt_settings_of(self.environment).thinking
        pieces = []
        for job, tokens, score in zip(text.jobs, text.lengths, scores, strict=True):
            if budget is not None and text.target is not None:
                score = budget.worth(score, text.target, tokens)
            pieces.append(ScoredText(JudgedText.of(text.task, begun + job.completion), score))
        return pieces

    def _final(self, task: Task, scores: Sequence[Score]) -> Scored | ScoringFailure:
        rewards, notes = [], []
        for index, score in enumerate(scores):
            numbers = [score.value, *score.parts.values()]
            if not all(abs(number) <= MAX_REWARD for number in numbers) or len(score.parts) > MAX_PARTS:
                return ScoringFailure(
                    f"environment {self.environment.name} gave the score {score.value!r} with {len(score.parts)} parts "
                    f"for task {task.id}; scores and at most {MAX_PARTS} parts must be numbers within ±{MAX_REWARD:g}"
                )
            parts = {key: float(part) for key, part in score.parts.items()}
            rewards.append(RolloutReward(value=float(score.value), parts=parts))
            if score.notes:
                notes.append((index, "".join(each if each.isprintable() else " " for each in score.notes[:MAX_NOTE])))
        return Scored(tuple(rewards), tuple(notes))


def _whole(results: Sequence[Score | ScoringFailure]) -> list[Score] | ScoringFailure:
    """All scores; or the first failure, `NotStarted` only if there is no other failure."""
    failures = [result for result in results if isinstance(result, ScoringFailure)]
    if failures:
        return next((failure for failure in failures if not isinstance(failure, NotStarted)), failures[0])
    return [result for result in results if not isinstance(result, ScoringFailure)]


def shuffled(rewards: Sequence[RolloutReward], run: str, unit: int) -> tuple[RolloutReward, ...]:
    """The control experiment: the same rewards on other rollouts of the group, the same way at every try. Mean and
    spread stay; only the connection to what was generated is lost. The part `shuffled_from` names the original rollout.
    """
    digest = hashlib.sha256(f"shoal/shuffle/v1\n{run}\n{unit}".encode()).digest()
    order = np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "big"))).permutation(len(rewards))
    return tuple(
        RolloutReward(value=rewards[i].value, parts={**rewards[i].parts, "shuffled_from": float(i)})
        for i in order.tolist()
    )


MOST_BYTES = 16 * 1024 * 1024


class RewardNotes:
    """Notes of the reward as JSON lines in the validator's folder only: they may name the answer, and contributors read
    verdicts. About the newest `most_bytes` are kept, in two files."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self._file, self._most_bytes, self._failed = folder / "notes.jsonl", most_bytes, False

    def write(self, unit: int, task: str, notes: Sequence[tuple[int, str]]) -> None:
        """Add the notes of a group. A write error is logged once and does not stop judging."""
        lines = [{"unit": unit, "task": task, "rollout": rollout, "note": note} for rollout, note in notes]
        try:
            if lines and self._file.exists() and self._file.stat().st_size >= self._most_bytes // 2:
                self._file.replace(self._file.with_suffix(".1.jsonl"))
            if lines:
                with self._file.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        except OSError as error:
            if not self._failed:
                log.warning("notes of the reward cannot be written to %s: %s", self._file, error.strerror)
            self._failed = True
