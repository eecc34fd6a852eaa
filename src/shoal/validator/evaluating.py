"""Evaluation between audits: a slice of held-out tasks, answered greedily by a published policy and scored.

    audits come first ─► nothing to check ─► a slice
          └─ slices have had less than their `SHARE` of the time ─► slices all the same: a busy validator measures too

What goes wrong is reported, too, and somebody tries again: a score is never made up. Nothing here touches a verdict.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from shoal.client import Activity, HubClient
from shoal.engines.dialogue import Talks, greedy_answers
from shoal.engines.shelf import EngineShelf, LoadedPolicy
from shoal.environments import Environment
from shoal.errors import BroadcastError, DeadlineExceeded, HubRefused, ProtocolError, ScoringFailure
from shoal.protocol import AuditRequest, EvaluationReport, EvaluationSlice, SignedDocument, sign_document
from shoal.protocol.verdict import MAX_REWARD, Readiness
from shoal.rewards import DirectScorer, Job, Scorer
from shoal.rewards.protocol import settled
from shoal.runtime.clock import Clock, SystemClock
from shoal.runtime.stop import StopToken
from shoal.validator.rewards import Decoders

log = logging.getLogger(__name__)

SHARE = 0.2
"""The part of a busy validator's time that slices get: the time that audits take saves up for them."""
MOST_SAVED_S = 120.0
PROBLEM_LIMIT = 200


class Evaluating:
    """A validator's part in evaluations: when it is ready for a slice, and one slice from the hub to the hub."""

    def __init__(
        self,
        client: HubClient,
        shelf: EngineShelf,
        evaluator: SliceEvaluator,
        activity: Activity,
        stop: StopToken,
        clock: Clock = SystemClock(),
    ) -> None:
        self._client = client
        self._shelf = shelf
        self._evaluator = evaluator
        self._activity = activity
        self._stop = stop
        self._clock = clock
        self._saved_s = 0.0

    @property
    def readiness(self) -> Readiness:
        """What the hub is told with the next request."""
        return "now" if self._saved_s >= 0 else "idle"

    @contextmanager
    def auditing(self) -> Iterator[None]:
        """Whatever is done meanwhile saves up time for slices."""
        began_s = self._clock.monotonic_s()
        yield
        took_s = self._clock.monotonic_s() - began_s
        self._saved_s = min(self._saved_s + took_s * SHARE / (1 - SHARE), MOST_SAVED_S)

    def measure(self, signed: SignedDocument | None) -> None:
        """Answer and score a slice, and say so; and more of them, while there are any and time is saved up."""
        while signed is not None and not self._stop.is_set():
            began_s = self._clock.monotonic_s()
            self._measure(signed)
            self._saved_s -= self._clock.monotonic_s() - began_s
            more = self._saved_s > 0
            signed = self._client.audits(AuditRequest(max_audits=1, evaluate="only")).evaluation if more else None

    def _measure(self, signed: SignedDocument) -> None:
        """One slice. A hub that does not want it any more is no failure."""
        try:
            part = self._client.open_slice(signed)
            report = self._measured(part)
            if report is not None:
                self._client.report_evaluation(sign_document(report, self._client.key))
                self._activity.count("evaluated", len(report.scores))
        except (HubRefused, ProtocolError) as error:
            log.warning("a slice of an evaluation was not taken: %s", error)

    def _measured(self, part: EvaluationSlice) -> EvaluationReport | None:
        try:
            with self._activity.waiting(f"policy {part.policy.label}"):
                loaded = self._shelf.get(part.policy, self._shelf.wait_s)
        except (BroadcastError, DeadlineExceeded) as error:
            if self._stop.is_set():
                return None
            log.warning("policy %s could not be fetched, so it is not evaluated: %s", part.policy.label, error)
            return problem(part, f"the policy could not be fetched: {error}", self._clock.now_ms())
        what = f"evaluating {len(part.tasks)} held-out tasks by policy {part.policy.label}"
        with self._activity.busy(what):
            return self._evaluator.report(part, loaded, self._clock.now_ms())


@dataclass(frozen=True)
class SliceEvaluator:
    """Answers and scores slices of this environment's tasks; without a `scorer`, in this process."""

    environment: Environment
    decoders: Decoders
    scorer: Scorer | None = None

    def report(self, part: EvaluationSlice, loaded: LoadedPolicy, now_ms: int) -> EvaluationReport:
        """One score per task of the slice, in order; None where the scoring machinery failed."""
        if part.environment_digest != self.environment.digest:
            return problem(part, "the validator has another environment than the run", now_ms)
        if not part.tasks:
            return problem(part, "the slice has no task that can be used", now_ms)
        sampling = part.sampling
        prompts = [task.prompt_ids for task in part.tasks]
        try:
            talks = Talks(self.environment, loaded.files, sampling)
            answers = greedy_answers(loaded.engine, prompts, [talks.of(task.task) for task in part.tasks], sampling)
        except Exception as error:
            log.exception("the engine failed on a slice of an evaluation")
            return problem(part, f"the validator's engine failed: {error}", now_ms)
        texts = self.decoders.of(loaded.files)(answers)
        jobs = [Job(task.task, text) for task, text in zip(part.tasks, texts, strict=True)]
        return _report(part, now_ms, scores=tuple(self._scores(jobs)))

    def _scores(self, jobs: Sequence[Job]) -> list[float | None]:
        results = settled((self.scorer or DirectScorer(self.environment)).scores, jobs)
        failures = [result for result in results if isinstance(result, ScoringFailure)]
        if failures:
            log.warning("%d of %d held-out tasks could not be scored: %s", len(failures), len(jobs), failures[0])
        return [
            None if isinstance(result, ScoringFailure) or not abs(result.value) <= MAX_REWARD else float(result.value)
            for result in results
        ]


def problem(part: EvaluationSlice, sentence: str, now_ms: int) -> EvaluationReport:
    """The slice could not be done."""
    printable = "".join(character if character.isprintable() else " " for character in sentence)
    return _report(part, now_ms, problem=printable[:PROBLEM_LIMIT])


def _report(
    part: EvaluationSlice, now_ms: int, scores: tuple[float | None, ...] = (), problem: str = ""
) -> EvaluationReport:
    return EvaluationReport(
        run=part.run,
        policy=part.policy,
        first=part.first,
        environment_digest=part.environment_digest,
        scores=scores,
        problem=problem,
        decided_at_ms=now_ms,
    )
