"""Judging the audits of one policy together: cheap checks, one batched prefill, the rest, and the reward.

    jobs ─► before the prefill ─┬─ failed ─────────────────────────────────────────► rejected
                                ├─ a newcomer's: one rollout, replayed, fails for certain ─► rejected
                                ├─ light: as it is claimed ──────────────────────┐
                                └─ full: replay (one prefill for all) ─► after ─┬┴─► reward ─► accepted
                                           │ the engine fails on it             └──► rejected    (all at once)
                                           └► unsure                                 or unsure: after a second look
    shown progress: a few of these checks on the one rollout that has tokens; rejected if that is certain, else no
                    verdict: the finished group will be judged

A group that could not be scored in time has no verdict: it is judged later, or by another validator. Uses only the
engine, the scorer, and the memory of accepted work (`SeenWork`); nothing here talks to the hub.

The second look is in the worker's own number format, whose rounding is smaller and independent of the first look's:

    first look                 second look          verdict
    fails for certain          fails, too           rejected, certain
                               passes or unsure     unsure (`second.passed`)
    fails by statistics        fails, too           rejected, statistical
                               passes or unsure     unsure (`second.passed`)
                               not possible here    unsure (`second.missing`)
    unsure (an accident)       passes               accepted
                               anything else        unsure, as before

If both have the same format, or to confirm a certain failure on a machine without the other format, the group is
prefilled again alone: a fault of one batch or of the memory does not repeat. An accident in the validator's own coarse
format may be the validator's, so it is looked at in float32 if there is enough memory.
"""

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from shoal.engines import PLAIN, Engine, EngineShelf, Fetch, LoadedPolicy, build, release_memory
from shoal.engines.dialogue import dialogue_for
from shoal.environments import Environment, budget_of, identity_of
from shoal.errors import BroadcastError, ConfigError, DeadlineExceeded, ModelError, ResourceError, ScoringFailure
from shoal.models.ending import decoding, texts_of
from shoal.protocol import (
    Lease,
    PolicyRef,
    SignedDocument,
    format_of,
    pack,
    pack_logprobs,
    pack_spans,
    submission_digest,
)
from shoal.protocol.verdict import Audit, Branches, CheckResult, Outcome, Severity, Tally, Verdict
from shoal.rewards import DirectScorer, NotStarted, Scorer
from shoal.rewards.panel import Panel
from shoal.runtime.clock import Clock, SystemClock
from shoal.validator import checks
from shoal.validator.branches import BranchChecker
from shoal.validator.case import Case, Finding, Replay, SeenWork, passed, read_body, replay_all, unsure
from shoal.validator.checks import AFTER_PREFILL, BEFORE_PREFILL, duplicate, reward_steering, run_all, run_checks
from shoal.validator.profiles import Profile, Profiles, limits_for
from shoal.validator.rewards import Group, RewardNotes, Scored, Scoring, shuffled
from shoal.validator.verdicts import NO_BRANCHES, NOTHING_COUNTED, AuditJob

log = logging.getLogger(__name__)

# The message of a failed reward function may contain the answer, and contributors read verdicts.
NOT_SCORED = "the reward of this group could not be computed, so it is unscored; the validator's log says why"
SECOND_WAIT_S = 30.0
# The reason of a failed check of shown progress, by check.
SHOWN_REASONS: Mapping[str, str] = {
    "shape": "progress.shape", "dialogue": "progress.dialogue",
    "proofs": "progress.proofs", "sampling": "progress.seed",
}  # fmt: skip

OtherEngine = Callable[[PolicyRef, str], Engine | None]
"""An engine of this policy that computes in a number format; None if this machine has none."""


class SecondEngines:
    """One more engine, of another number format than the validator's own. It is made when first needed, follows the
    policies, and is dropped when nothing is to be audited (`drop`)."""

    def __init__(self, engine: str, device: str, fetch: Fetch) -> None:
        self._engine, self._device, self._fetch = engine, device, fetch
        self._dtype = ""
        self._shelf: EngineShelf | None = None
        self._failed: tuple[PolicyRef, str] | None = None

    def get(self, policy: PolicyRef, dtype: str) -> Engine | None:
        """Tried once for each policy and format, so a machine without the memory does not retry at every audit."""
        if self._failed == (policy, dtype):
            return None
        if self._shelf is None or self._dtype != dtype:
            self.drop()
            self._shelf = EngineShelf(self._fetch, lambda files: build(self._engine, files, self._device, dtype), 1)
            self._dtype = dtype
        try:
            return self._shelf.get(policy, SECOND_WAIT_S).engine
        except (BroadcastError, ConfigError, DeadlineExceeded, ModelError, ResourceError) as error:
            log.warning("no second look in %s is possible, so what needs one is unsure: %s", dtype, error)
            self._failed = (policy, dtype)
            self.drop()
            return None

    def drop(self) -> None:
        if self._shelf is not None:
            self._shelf = None
            release_memory()


@dataclass
class _OpenAudit:
    job: AuditJob
    case: Case
    findings: list[Finding]
    tally: Tally = NOTHING_COUNTED


@dataclass(frozen=True)
class Judge:
    """Turns audits into verdicts. Except for copies, which show only beside their original, batching does not change
    verdicts."""

    environment: Environment
    profiles: Profiles
    shuffle_rewards: bool = False
    clock: Clock = field(default_factory=SystemClock)
    seen: SeenWork = field(default_factory=SeenWork, repr=False)
    scorer: Scorer | None = field(default=None, repr=False)  # None: the environment is called in this process
    panel: Panel = field(default_factory=Panel, repr=False)
    reward_notes: RewardNotes | None = field(default=None, repr=False)
    pick: Callable[[int], int] = field(default=secrets.randbelow, repr=False)
    branch_checker: BranchChecker | None = field(default=None, repr=False)  # None: no branches are looked at
    calibrations: Callable[[str], Profiles | None] = field(default=lambda _digest: None, repr=False)  # by digest
    second_engine: OtherEngine = field(default=lambda _policy, _dtype: None, repr=False)
    traces: dict[str, bytes] | None = field(default=None, repr=False)  # packed, by submission; its reader empties it
    plain_kinds: set[str] = field(default_factory=set, repr=False)  # kinds of dialogues

    def knows(self, lease: Lease) -> bool:
        """Whether the lease was made for this validator's environment."""
        mine = identity_of(self.environment)
        return lease.environment_digest == mine.digest and lease.data_digest in ("", mine.data_digest)

    def limits(self, lease: Lease, engine: Engine) -> tuple[Profile, bool] | None:
        """The limits for a lease, and whether they were measured for the worker's own kind; None if unknown here."""
        measured = self.calibrations(lease.calibration) if lease.calibration else {}
        if measured is None:
            return None
        kind = lease.profile
        if lease.dialogue is not None and kind.startswith("torch/cuda/"):  # dialogues take the plain path
            kind = kind.replace("torch", PLAIN, 1)
            self.plain_kinds.add(kind)
        return limits_for(kind, format_of(engine.kind), measured, self.profiles)

    def named(self, job: AuditJob) -> AuditJob:
        """The audit; its verdict will name this environment."""
        return replace(job, environment=identity_of(self.environment))

    def verdicts(self, jobs: Sequence[AuditJob], loaded: LoadedPolicy) -> list[Verdict]:
        """The verdicts in the order of the audits, without those that could not be scored in time; the first one always
        gets its time. All leases must name the loaded policy."""
        opened = [self._open(self.named(job), loaded) for job in jobs]
        # One random rollout of each newcomer's group. If it fails for certain, twice, the group is rejected and the
        # other rollouts are not computed: garbage costs little.
        first = [
            (entry, entry.case.only(self.pick(len(entry.case.rollouts))))
            for entry in opened
            if isinstance(entry, _OpenAudit) and entry.job.audit.newcomer
            and entry.job.audit.depth == "full" and len(entry.case.rollouts) > 1
        ]  # fmt: skip
        once = self._certain(first, loaded.engine)
        twice = self._certain([(entry, case) for entry, case, _ in once], loaded.engine)  # one prefill may be broken
        failed = {
            id(entry): entry.job.rejected([*entry.findings, *findings], self.clock.now_ms(), case.tally)
            for entry, case, findings in twice
        }
        opened = [failed.get(id(entry), entry) for entry in opened]
        full = [entry for entry in opened if isinstance(entry, _OpenAudit) and entry.job.audit.depth != "light"]
        replays = dict(zip(map(id, full), replay_all(loaded.engine, [entry.case for entry in full]), strict=True))
        judged = [
            entry if isinstance(entry, Verdict) else self._judged(entry, replays.get(id(entry)), loaded)
            for entry in opened
        ]
        held = [entry for entry in judged if isinstance(entry, _OpenAudit)]
        rewarded = self._rewards([Group(entry.case.lease, entry.case.rollouts) for entry in held], loaded)
        branches = [NO_BRANCHES] * len(held)
        if self.branch_checker is not None:
            rewards = [scored.rewards if isinstance(scored, Scored) else None for scored in rewarded]
            looked = [(e.case, own, e.job.audit.look_share) for e, own in zip(held, rewards, strict=True)]
            branches = self.branch_checker.look(looked, loaded.engine, lambda groups: self._rewards(groups, loaded))
        found = iter(zip(rewarded, branches, strict=True))
        decided = [self._rewarded(entry, *next(found)) if isinstance(entry, _OpenAudit) else entry for entry in judged]
        return [each for each in map(_reported, decided) if each is not None]

    def _open(self, job: AuditJob, loaded: LoadedPolicy) -> _OpenAudit | Verdict:
        lease, engine, now_ms = job.lease, loaded.engine, self.clock.now_ms()
        problem = self._environment_problem(lease)
        if problem:
            return job.unsure((), "machinery.environment", problem, now_ms)
        limits = (Profile(key=lease.profile), True) if job.audit.trusted else self.limits(lease, engine)
        if limits is None or not (job.audit.trusted or format_of(engine.kind) in limits[0].validators):
            message = f"this validator has no limits for {lease.profile} as seen by {engine.kind}: it cannot tell"
            return job.unsure((), "machinery.profile", f"{message} rounding from cheating", now_ms)
        try:
            dialogue = dialogue_for(lease, loaded.files)
        except ConfigError as error:
            return job.unsure((), "machinery.environment", str(error), now_ms)
        submission, problem = read_body(job.body)
        case = Case(
            lease, submission, problem, engine.vocabulary_size, engine.hidden_size, limits[0], self.seen,
            job.audit.record, dialogue=dialogue, shown=job.audit.shown, decode=decoding(lease.sampling, loaded.files),
        )  # fmt: skip
        is_shown = job.audit.depth == "progress"
        case = _of_unfinished(case) if is_shown else case
        findings = run_checks(checks.SHOWN_BEFORE_PREFILL if is_shown else BEFORE_PREFILL, case)
        if not findings[-1].passed:
            return job.rejected(findings, now_ms)
        unsure_rate = 0.0 if is_shown else case.unsure_rate
        return _OpenAudit(replace(job, unsure_rate=unsure_rate, measured=limits[1]), case, findings)

    def _environment_problem(self, lease: Lease) -> str:
        """Why the lease cannot be scored with this environment; empty if it can."""
        if not self.knows(lease):
            return f"the validator's environment {self.environment.name} is not the one that the lease was made for"
        budget = budget_of(self.environment)
        target = None if budget is None else budget.target(lease.run, lease.unit)
        if target != lease.length_target:
            return f"the lease says a length target of {lease.length_target}; by its run and unit it is {target}"
        return ""

    def _certain(
        self, cases: Sequence[tuple[_OpenAudit, Case]], engine: Engine
    ) -> list[tuple[_OpenAudit, Case, list[Finding]]]:
        """Those that fail for certain, by one prefill. If the engine fails, the check of the whole group will
        show it."""
        found = []
        for (entry, case), replay in zip(cases, replay_all(engine, [case for _, case in cases]), strict=True):
            if isinstance(replay, Replay) and replay.is_finite:
                is_shown = entry.job.audit.depth == "progress"
                seen = _with_replay(case, replay) if is_shown else replace(case, replay=replay)
                findings = run_all(checks.SHOWN_AFTER_PREFILL if is_shown else AFTER_PREFILL, seen)
                if findings[-1].severity is Severity.CERTAIN:
                    found.append((entry, seen, findings))
        return found

    def _judged(
        self, entry: _OpenAudit, replay: Replay | Exception | None, loaded: LoadedPolicy
    ) -> _OpenAudit | Verdict | None:
        """The checks after the prefill; a verdict unless all pass. Shown progress that passes has none."""
        job, case, findings, now_ms = entry.job, entry.case, entry.findings, self.clock.now_ms()
        if isinstance(replay, Exception):
            return job.unsure(findings, "machinery.prefill", f"the validator's engine failed: {replay}", now_ms)
        if replay is not None and not replay.is_finite:
            message = "the validator's own computation gave NaN or infinity: the policy, or this machine, is broken"
            return job.unsure(findings, "machinery.prefill", message, now_ms)
        if replay is not None and job.audit.depth == "progress":
            findings += run_all(checks.SHOWN_AFTER_PREFILL, _with_replay(case, replay))
            is_bad = not findings[-1].passed and self._certain([(entry, case)], loaded.engine)
            return job.rejected(findings, now_ms) if is_bad else None
        if replay is not None:
            case.replay = replay
            if self.traces is not None:
                self.traces[job.audit.submission] = pack(case.trace, level=1)
            findings += run_all(AFTER_PREFILL, case)
            entry.tally, last = case.tally, findings[-1]
            if not last.passed and (last.unsure or last.severity is not None):
                findings[:], entry.tally = self._second_look(case, findings, loaded)
        last = findings[-1]
        if last.unsure:
            return job.unsure(findings, last.reason, last.result.message, now_ms, entry.tally)
        if not last.passed and last.severity is Severity.STATISTICAL and not job.measured:
            unmeasured = f"no trusted machine has measured {case.lease.profile}: by the limits of its number format"
            message = f"{unmeasured} {last.result.message}"
            return job.unsure(findings, "machinery.kind", message, now_ms, entry.tally)
        return entry if last.passed else job.rejected(findings, now_ms, entry.tally)

    def _second_look(self, case: Case, first: list[Finding], loaded: LoadedPolicy) -> tuple[list[Finding], Tally]:
        dtype, engine = format_of(case.lease.profile), loaded.engine
        seen_in = dtype
        if format_of(engine.kind) != dtype:
            other = self.second_engine(loaded.ref, dtype) if dtype in case.profile.validators else None
            if other is None and first[-1].severity is not Severity.CERTAIN:
                return _combined(case, first, None, (), dtype)
            engine = other or engine
        elif dtype != "float32" and first[-1].severity is not Severity.CERTAIN:
            # The noise may be this validator's own; the same prefill would repeat it, float32 does not.
            exact = self.second_engine(loaded.ref, "float32")
            engine, seen_in = (engine, dtype) if exact is None else (exact, "float32")
        [replay] = replay_all(engine, [case])
        if isinstance(replay, Exception) or not replay.is_finite:
            return _combined(case, first, None, (), dtype)
        again = replace(case, replay=replay)
        return _combined(case, first, again, run_all(AFTER_PREFILL, again), seen_in)

    def _rewards(self, groups: Sequence[Group], loaded: LoadedPolicy) -> list[Scored | ScoringFailure]:
        if not groups:
            return []
        scoring = Scoring(self.environment, self.scorer or DirectScorer(self.environment), self.panel)
        return scoring.score(groups, texts_of(loaded.files).decode_many)

    def _rewarded(self, entry: _OpenAudit, scored: Scored | ScoringFailure, branches: Branches) -> Verdict | None:
        job, case, findings, tally = entry.job, entry.case, entry.findings, entry.tally
        again, now_ms = duplicate(case), self.clock.now_ms()  # of another group in this batch
        if not again.passed:
            return job.rejected([*findings, again], now_ms, tally)
        if isinstance(scored, NotStarted):
            return None
        if isinstance(scored, ScoringFailure):
            log.warning("unit %d could not be scored: %s", case.lease.unit, scored)
            return job.unsure(findings, "reward.machinery", NOT_SCORED, now_ms)
        job = replace(job, branches=branches)
        gain = reward_steering(case, job.audit, branches)
        if gain.unsure:
            return job.unsure([*findings, gain], gain.reason, gain.result.message, now_ms, tally)
        if not gain.passed:
            return job.rejected([*findings, gain], now_ms, tally)
        findings = [*findings, gain] if branches.looked else findings
        if case.replay is not None:  # a light audit does not prove whose work it is
            self.seen.remember(case.proven)
        if self.reward_notes is not None:
            self.reward_notes.write(case.lease.unit, case.lease.task, scored.notes)
        rewards = scored.rewards
        if self.shuffle_rewards:
            rewards = shuffled(rewards, case.lease.run, case.lease.unit)
        fields = {"generated_tokens": case.generated, "unreproducible": self.panel.unreproducible}
        return job.accepted(findings, rewards, now_ms, tally, **fields)


def _combined(
    case: Case, first: list[Finding], again: Case | None, second: Sequence[Finding], dtype: str
) -> tuple[list[Finding], Tally]:
    """All findings, the deciding one last, and what joins the node's record. `again`: the case with the second replay
    in `dtype`, and `second` its findings; None without a second look."""
    last = first[-1]
    if again is None:
        if last.unsure or last.severity is Severity.CERTAIN:
            return first, case.tally
        message = f"this validator cannot compute in {dtype} to confirm it with a second look: {last.result.message}"
        return [*first, unsure("second.missing", message, format=dtype)], case.tally
    found = second[-1]
    if last.unsure:
        return ([*first[:-1], passed("second", format=dtype)] if found.passed else first), case.tally
    if found.passed or found.unsure:
        message = f"seen in {dtype}, by a second look, the group is in order: {last.result.message}"
        return [*first, unsure("second.passed", message, format=dtype, first=last.reason)], again.tally
    evidence = {**found.result.evidence, "format": dtype, "reason": found.reason}
    confirmed = CheckResult(check="second", passed=False, evidence=evidence, message=found.result.message)
    return [*first[:-1], Finding(confirmed, found.reason, found.severity), last], case.tally


def _of_unfinished(case: Case) -> Case:
    """The case of the only rollout that has tokens, under its own seed, for the checks before the prefill."""
    index = next(index for index, rollout in enumerate(case.rollouts) if rollout.tokens)
    rollout = msgspec.structs.replace(case.rollouts[index], logprobs=bytes(len(case.rollouts[index].tokens)))
    if case.dialogue is not None:
        spans = case.dialogue.read(rollout.token_ids.tolist(), whole=False).given
        rollout = msgspec.structs.replace(rollout, given=pack_spans(spans))
    lease = case.lease.model_copy(update={"seeds": (case.lease.seeds[index],)})
    return replace(case, lease=lease, submission=msgspec.structs.replace(case.claim, rollouts=[rollout]))


def _with_replay(case: Case, replay: Replay) -> Case:
    """Shown progress with its replay; its log-probabilities are those of the replay, because none are claimed."""
    rollout = msgspec.structs.replace(case.rollouts[0], logprobs=pack_logprobs(replay.logprobs))
    return replace(case, submission=msgspec.structs.replace(case.claim, rollouts=[rollout]), replay=replay)


def _reported(verdict: Verdict | None) -> Verdict | None:
    """Of shown progress only a certain failure is reported, with a reason of its own."""
    if verdict is None or verdict.depth != "progress":
        return verdict
    reason = SHOWN_REASONS.get(verdict.reason.partition(".")[0])
    if verdict.outcome is not Outcome.REJECTED or verdict.severity is not Severity.CERTAIN or reason is None:
        return None
    return verdict.model_copy(update={"reason": reason})


REWARD_TOLERANCE = 1e-6


@dataclass(frozen=True)
class KeptSubmission:
    """An accepted submission: its verdict, its signed lease, and its bytes."""

    verdict: Verdict
    lease: SignedDocument
    body: bytes


@dataclass(frozen=True)
class Rechecked:
    state: Literal["same", "different", "unknown"]
    sentence: str


def recheck(judge: Judge, kept: KeptSubmission, loaded: LoadedPolicy) -> Rechecked:
    """Judge it fully, whatever the depth of its audit, and compare outcome, tokens and rewards. A difference means that
    the validator was wrong then, or this machine is now; what this machine cannot decide proves nothing."""
    then, lease = kept.verdict, Lease.model_validate(kept.lease.document, extra="ignore")
    if submission_digest(kept.body) != then.submission:
        return Rechecked("different", "the kept bytes are not those that the verdict names")
    if (lease.run, lease.unit, lease.node) != (then.run, then.unit, then.node):
        return Rechecked("different", "the lease is of another unit or node than the verdict")
    audit = Audit(
        submission=then.submission, size_bytes=len(kept.body), lease=kept.lease, received_at_ms=0, deadline_ms=0
    )
    verdicts = judge.verdicts([AuditJob(audit, lease, kept.body)], loaded)
    if not verdicts or verdicts[0].outcome is Outcome.UNSURE:
        why = f"{verdicts[0].reason}: {verdicts[0].message}" if verdicts else "its reward could not be computed"
        return Rechecked("unknown", f"this machine cannot decide about it ({why})")
    now = verdicts[0]
    if (now.outcome, now.generated_tokens) != (then.outcome, then.generated_tokens):
        reason = f" ({now.reason}: {now.message})" if now.reason else ""
        was, is_now = (f"{each.outcome.value} with {each.generated_tokens} tokens" for each in (then, now))
        return Rechecked("different", f"it was {was}, and is {is_now}{reason}")
    if then.unreproducible != now.unreproducible:
        named, found = (", ".join(each.unreproducible) or "none" for each in (then, now))
        return Rechecked("different", f"rewards that nobody can compute again: it named {named}, and there are {found}")
    if now.unreproducible:
        why = f"its rewards cannot be computed again: {now.unreproducible[0]}; the rest is the same"
        return Rechecked("unknown", why)
    rewards = [(one.value, other.value) for one, other in zip(then.rewards, now.rewards, strict=False)]
    if len(then.rewards) != len(now.rewards) or any(abs(one - other) > REWARD_TOLERANCE for one, other in rewards):
        return Rechecked("different", "its rewards are others now")
    return Rechecked("same", f"{then.outcome.value}, {then.generated_tokens} tokens, the same rewards")
