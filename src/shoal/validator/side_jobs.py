"""What a validator does besides audits: it evaluates, generates units that nobody could judge, loads policies ahead.

SliceEvaluator   a slice of held-out tasks, answered greedily by a published policy and scored: when nothing is to
                 be audited, or when slices have had less than their `SHARE` of the time. A failure is reported, and
                 another validator tries. Verdicts do not depend on it.
UnitGenerator    units that nobody could judge are generated here and submitted for a light audit, without credit, so no
                 worker whose groups are unsure can block a step. What fails is `left` with the next request.
Preloader        loads the newest policy while nothing is to be audited. With the first policy one group is drawn,
                 checked and scored, to load imports, kernels and scoring processes before there are submissions.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from shoal import errors
from shoal.client import Activity, HubClient
from shoal.engines import EngineShelf, GenerationRequest, LoadedPolicy, build
from shoal.engines.dialogue import Talks, greedy_answers
from shoal.engines.groups import generate, is_finite, submission_of
from shoal.environments import Environment
from shoal.environments.protocol import reads_tokens
from shoal.errors import BroadcastError, DeadlineExceeded, HubRefused, ProtocolError, ResourceError, ScoringFailure
from shoal.models.ending import texts_of
from shoal.protocol import (
    HeartbeatReply,
    Lease,
    PolicyRef,
    RunInfo,
    SamplingParameters,
    Severity,
    SignedDocument,
    pack,
    sign_document,
)
from shoal.protocol.lease import format_of
from shoal.protocol.verdict import (
    MAX_REWARD,
    AuditRequest,
    EvaluationReport,
    EvaluationSlice,
    EvaluationTask,
    Readiness,
)
from shoal.rewards import DirectScorer, Job, Scorer
from shoal.rewards.pool import score_all
from shoal.runtime import Clock, StopToken, SystemClock
from shoal.validator.case import ENGINE_ERRORS, Case, Replay, passed, replay_all
from shoal.validator.checks import AFTER_PREFILL, run_all
from shoal.validator.judge import Judge
from shoal.validator.profiles import Profile
from shoal.validator.verdicts import POLICY, LeaseTemplate

log = logging.getLogger(__name__)

SHARE = 0.2
"""The part of a busy validator's time that slices get."""
MOST_SAVED_S = 120.0
PROBLEM_LIMIT = 200


@dataclass
class SliceEvaluator:
    """Evaluates slices for the hub. Without a `scorer` it scores in this process."""

    client: HubClient
    shelf: EngineShelf
    environment: Environment
    scorer: Scorer | None
    activity: Activity
    stop: StopToken
    clock: Clock = field(default_factory=SystemClock)
    _saved_s: float = 0.0

    @property
    def readiness(self) -> Readiness:
        """What the next request tells the hub."""
        return "now" if self._saved_s >= 0 else "idle"

    @contextmanager
    def auditing(self) -> Iterator[None]:
        """Time spent in this block earns time for slices."""
        began_s = self.clock.monotonic_s()
        yield
        took_s = self.clock.monotonic_s() - began_s
        self._saved_s = min(self._saved_s + took_s * SHARE / (1 - SHARE), MOST_SAVED_S)

    def measure(self, signed: SignedDocument | None) -> None:
        """Answer, score and report a slice, and further ones while there is time for slices."""
        while signed is not None and not self.stop.is_set():
            began_s = self.clock.monotonic_s()
            try:
                report = self._measured(self.client.open_slice(signed))
                if report is not None:
                    self.client.report_evaluation(sign_document(report, self.client.key))
                    self.activity.count("evaluated", len(report.scores))
            except (HubRefused, ProtocolError) as error:
                log.warning("a slice of an evaluation was not taken: %s", error)
            self._saved_s -= self.clock.monotonic_s() - began_s
            more = self._saved_s > 0
            signed = self.client.audits(AuditRequest(max_audits=1, evaluate="only")).evaluation if more else None

    def _measured(self, part: EvaluationSlice) -> EvaluationReport | None:
        try:
            with self.activity.waiting(f"policy {part.policy.label}"):
                loaded = self.shelf.get(part.policy, self.shelf.wait_s)
        except (BroadcastError, DeadlineExceeded) as error:
            if self.stop.is_set():
                return None
            log.warning("policy %s could not be fetched, so it is not evaluated: %s", part.policy.label, error)
            return self._report(part, problem=f"the policy could not be fetched: {error}")
        with self.activity.busy(f"evaluating {len(part.tasks)} held-out tasks by policy {part.policy.label}"):
            return self.report(part, loaded)

    def report(self, part: EvaluationSlice, loaded: LoadedPolicy) -> EvaluationReport:
        """One score per task of the slice, in order; None where the scoring machinery failed."""
        if part.environment_digest != self.environment.digest:
            return self._report(part, problem="the validator has another environment than the run")
        if not part.tasks:
            return self._report(part, problem="the slice has no task that can be used")
        try:
            answers = answers_to(part.tasks, self.environment, loaded, part.sampling)
        except Exception as error:
            log.exception("the engine failed on a slice of an evaluation")
            return self._report(part, problem=f"the validator's engine failed: {error}")
        scorer = self.scorer or DirectScorer(self.environment)
        return self._report(part, scores_of(part.tasks, answers, self.environment, loaded, scorer))

    def _report(
        self, part: EvaluationSlice, scores: tuple[float | None, ...] = (), problem: str = ""
    ) -> EvaluationReport:
        printable = "".join(each if each.isprintable() else " " for each in problem)[:PROBLEM_LIMIT]
        return EvaluationReport(
            run=part.run, policy=part.policy, first=part.first, environment_digest=part.environment_digest,
            scores=scores, problem=printable, decided_at_ms=self.clock.now_ms(),
        )  # fmt: skip


def answers_to(
    tasks: Sequence[EvaluationTask], environment: Environment, loaded: LoadedPolicy, sampling: SamplingParameters
) -> list[list[int]]:
    talks = Talks(environment, loaded.files, sampling)
    lines, prompts = [talks.of(task.task) for task in tasks], [task.prompt_ids for task in tasks]
    return greedy_answers(loaded.engine, prompts, lines, sampling, talks.decode)


def scores_of(
    tasks: Sequence[EvaluationTask], answers: Sequence[list[int]], environment: Environment, loaded: LoadedPolicy,
    scorer: Scorer,
) -> tuple[float | None, ...]:  # fmt: skip
    texts = texts_of(loaded.files).decode_many(answers)
    tokens = [tuple(ids) if reads_tokens(environment) else None for ids in answers]
    jobs = [Job(task.task, text, ids) for task, text, ids in zip(tasks, texts, tokens, strict=True)]
    results = score_all(scorer.scores, jobs)
    failures = [result for result in results if isinstance(result, ScoringFailure)]
    if failures:
        log.warning("%d of %d held-out tasks could not be scored: %s", len(failures), len(jobs), failures[0])
    values = [None if isinstance(result, ScoringFailure) else float(result.value) for result in results]
    return tuple(x if x is not None and abs(x) <= MAX_REWARD else None for x in values)


MAX_LEFT = 16


@dataclass
class UnitGenerator:
    """Generates units for the hub. `left`: leases that failed here; the hub gives them to another validator."""

    client: HubClient
    shelf: EngineShelf
    activity: Activity
    stop: StopToken
    left: tuple[str, ...] = ()

    def generate(self, signed: Sequence[SignedDocument]) -> None:
        leases = [self.client.open_own_lease(each) for each in signed]
        for policy in dict.fromkeys(lease.policy for lease in leases):
            if self.stop.is_set():
                return
            together = [lease for lease in leases if lease.policy == policy]
            try:
                self._generate(policy, together)
            except (BroadcastError, DeadlineExceeded, ResourceError, ProtocolError) as error:
                if self.stop.is_set():
                    return
                log.warning("%d units that nobody could judge were not generated: %s", len(together), error)
                self._leave(together)

    def _generate(self, policy: PolicyRef, leases: Sequence[Lease]) -> None:
        with self.activity.waiting(f"policy {policy.label}"):
            loaded = self.shelf.get(policy, self.shelf.wait_s)
        with self.activity.busy(f"generating {len(leases)} units that nobody could judge, by policy {policy.label}"):
            groups = generate(loaded, leases, self.activity.generated)
        for lease, completions in zip(leases, groups, strict=True):
            if not is_finite(completions):
                log.error("unit %d: this machine computed log-probabilities that are NaN or infinite", lease.unit)
                self._leave([lease])
                continue
            try:
                self.client.submit(lease.lease, pack(submission_of(lease, completions, loaded.engine.name)))
                self.activity.count("generated")
            except HubRefused as refusal:  # too late
                log.warning("unit %d, which this validator generated, was not taken: %s", lease.unit, refusal)
            finally:
                self.activity.ended(lease.lease)

    def _leave(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            self.activity.ended(lease.lease)
        self.left = (*self.left, *(lease.lease for lease in leases))[-MAX_LEFT:]


WAIT_S = 5.0  # for a later policy; audits of the earlier one may arrive
CHUNKS = 2  # of each rehearsed rollout
PROMPT_TOKENS = 32


@dataclass
class Preloader:
    """The newest policy, and whether it is loaded. `hear` is called by another thread. `keeps_others`: a newer policy
    is loaded beside those in use; otherwise only the first one is loaded ahead. `rehearsed`: an audit was computed
    already. `has_measured`: limits were measured in this process."""

    client: HubClient
    shelf: EngineShelf
    judge: Judge
    keeps_others: bool
    clock: Clock
    newest: PolicyRef | None = None
    rehearsed: bool = False
    has_measured: bool = False
    _loaded: PolicyRef | None = None

    @property
    def is_due(self) -> bool:
        wanted = self.newest is not None and self.newest != self._loaded
        return wanted and (self.keeps_others or not self.is_ready)

    @property
    def is_ready(self) -> bool:
        """Whether a first policy is loaded, by this or by an audit."""
        return self._loaded is not None or self.rehearsed

    def hear(self, reply: HeartbeatReply) -> None:
        self.newest = reply.policy or self.newest

    def prepare(self) -> None:
        """Load the newest policy, if it is not loaded. A failure is retried later."""
        newest, began_s = self.newest, self.clock.monotonic_s()
        if newest is None or not self.is_due:
            return
        try:
            loaded = self.shelf.get(newest, WAIT_S if self.is_ready else self.shelf.wait_s)
        except (BroadcastError, DeadlineExceeded) as error:
            log.info("policy %s could not be loaded ahead: %s", newest.label, error)
            return
        loaded_s = self.clock.monotonic_s()
        log.info("policy %s was loaded ahead of audits in %.2f s", newest.label, loaded_s - began_s)
        if not self.rehearsed:
            self.rehearsed = True
            rehearse(self.judge, loaded, self.client.run_info(), self.has_measured)
            log.info("an audit was rehearsed in %.2f s", self.clock.monotonic_s() - loaded_s)
        self._loaded = newest


def rehearse_with_tiny(judge: Judge, run: RunInfo, device: str) -> None:
    """Load GPU kernels with a tiny model, which takes seconds, before the first policy arrives."""
    from shoal.models.load import load_model  # torch
    from shoal.models.state import policy_views

    began_s, tiny = time.monotonic(), load_model("tiny", "bfloat16")
    made = build("torch", tiny.files, device, "bfloat16")
    made.load_policy(None, policy_views(tiny.model))
    rehearse(judge, LoadedPolicy(POLICY, made, tiny.files), run)
    log.info("kernels were loaded with a tiny model in %.2f s", time.monotonic() - began_s)


def rehearse(judge: Judge, loaded: LoadedPolicy, run: RunInfo, has_measured: bool = False) -> None:
    """Draw a group like those of the run, and compute what an audit computes (not needed after measuring limits). A
    validator that rejects a group of its own for certain, in float32, must not judge."""
    engine, tokens = loaded.engine, min(run.sampling.max_new_tokens, CHUNKS * run.proof.rows)
    sampling = run.sampling.model_copy(update={"max_new_tokens": tokens, "stop": ()})
    prompt = tuple(token % engine.vocabulary_size for token in range(PROMPT_TOKENS))
    lease = LeaseTemplate("rehearsal", run.group_size, sampling, run.proof, engine.kind).lease(0, prompt)
    found = passed("rehearsal")
    try:
        if not has_measured:
            [group] = engine.generate([GenerationRequest(lease.prompt_ids, lease.seed_numbers, sampling)], run.proof)
            submission, profile = submission_of(lease, group, engine.name), Profile(key=engine.kind)
            case = Case(lease, submission, "", engine.vocabulary_size, engine.hidden_size, profile)
            [replay] = replay_all(engine, [case])
            if isinstance(replay, Replay):
                case.replay = replay
                *_, last = run_all(AFTER_PREFILL, case)
                found = last if replay.is_finite else found
        texts_of(loaded.files)
        if judge.scorer is not None:
            judge.scorer.scores([Job(judge.environment.tasks("train")[0].id, "", ())])
    except ENGINE_ERRORS as error:
        log.warning("the rehearsal of an audit failed; audits will show whether that matters: %s", error)
    if found.severity is Severity.CERTAIN and format_of(engine.kind) == "float32":
        raise errors.CanaryMissed(
            f"this validator rejects a group that it has drawn itself ({found.result.message}): it must not judge; "
            f"look at this machine and its engine, {engine.kind}"
        )
