"""Judging the audits of one policy together: cheap checks, one batched prefill, the rest, and the reward.

    dockets ─► before the prefill ─┬─ failed ─────────────────────────────────────────► rejected
                                   ├─ light: as it is claimed ──────────────────────┐
                                   └─ full: replay (one prefill for all) ─► after ─┬┴─► objection, reward ─► accepted
                                              │ the engine fails on it             └──► rejected
                                              └► inconclusive

Pure but for the engine, the environment, and the memory of what was accepted (`Seen`): nothing here talks to the hub.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.engines import Engine
from shoal.engines.shelf import LoadedPolicy
from shoal.environments import Environment
from shoal.errors import ScoringFailure
from shoal.protocol import Tally, Verdict
from shoal.runtime.clock import Clock, SystemClock
from shoal.validator.case import Case, Finding, Replay, read_body
from shoal.validator.checks import AFTER_PREFILL, BEFORE_PREFILL, duplicate, run_all, run_checks
from shoal.validator.profiles import Profiles
from shoal.validator.replay import replay_all
from shoal.validator.rewards import Decode, Decoders, score_group, shuffled
from shoal.validator.seen import Seen
from shoal.validator.verdicts import (
    MACHINERY_ENVIRONMENT,
    MACHINERY_PREFILL,
    MACHINERY_PROFILE,
    MACHINERY_REWARD,
    Docket,
)

log = logging.getLogger(__name__)


@dataclass
class _Open:
    """A docket that no check has failed so far."""

    docket: Docket
    case: Case
    findings: list[Finding]


@dataclass(frozen=True)
class Judge:
    """Turns dockets into verdicts. But for copies, which show only beside what they were copied from, the same docket
    gives the same verdict, however it is batched.
    """

    environment: Environment
    profiles: Profiles
    shuffle_rewards: bool = False
    clock: Clock = field(default_factory=SystemClock)
    decoders: Decoders = field(default_factory=Decoders, repr=False)
    seen: Seen = field(default_factory=Seen, repr=False)

    def verdicts(self, dockets: Sequence[Docket], loaded: LoadedPolicy) -> list[Verdict]:
        """One verdict per docket, in order. All leases must name the loaded policy."""
        opened = [self._open(docket, loaded.engine) for docket in dockets]
        full = [entry for entry in opened if isinstance(entry, _Open) and entry.docket.audit.depth == "full"]
        replays = dict(zip(map(id, full), replay_all(loaded.engine, [entry.case for entry in full]), strict=True))
        return [
            entry if isinstance(entry, Verdict) else self._judged(entry, replays.get(id(entry)), loaded)
            for entry in opened
        ]

    def _open(self, docket: Docket, engine: Engine) -> _Open | Verdict:
        """Everything before the prefill; a verdict if that decides already."""
        lease = docket.lease
        if lease.environment_digest != self.environment.digest:
            message = f"the validator's environment {self.environment.name} is not the one that the lease was made for"
            return docket.inconclusive((), MACHINERY_ENVIRONMENT, message, self.clock.now_ms())
        if lease.profile not in self.profiles:
            message = f"the validator has no profile for {lease.profile}, so it cannot tell rounding from cheating"
            return docket.inconclusive((), MACHINERY_PROFILE, message, self.clock.now_ms())
        profile = self.profiles[lease.profile]
        if engine.kind.rpartition("/")[2] not in profile.validators:
            message = f"the validator computes as {engine.kind}, and the profile of {lease.profile} is not for that"
            return docket.inconclusive((), MACHINERY_PROFILE, message, self.clock.now_ms())
        submission, problem = read_body(docket.body)
        case = Case(
            lease, submission, problem, engine.vocabulary_size, engine.hidden_size, profile, self.seen,
            docket.audit.record,
        )  # fmt: skip
        findings = run_checks(BEFORE_PREFILL, case)
        if not findings[-1].passed:
            return docket.rejected(findings, self.clock.now_ms())
        return _Open(docket, case, findings)

    def _judged(self, entry: _Open, replay: Replay | Exception | None, loaded: LoadedPolicy) -> Verdict:
        docket, case, findings = entry.docket, entry.case, entry.findings
        if isinstance(replay, Exception):
            message = f"the validator's engine failed: {replay}"
            return docket.inconclusive(findings, MACHINERY_PREFILL, message, self.clock.now_ms())
        tally = Tally()
        if replay is not None and not replay.is_finite:
            message = "the validator's own computation gave what is no number: the policy, or this machine, is broken"
            return docket.inconclusive(findings, MACHINERY_PREFILL, message, self.clock.now_ms())
        if replay is not None:
            case.replay = replay
            findings += run_all(AFTER_PREFILL, case)
            tally = case.tally
        if findings[-1].passed:
            again = duplicate(case)  # of a neighbour in the batch, accepted since the first look
            findings += [] if again.passed else [again]
        last = findings[-1]
        if last.unsure:
            return docket.inconclusive(findings, last.reason, last.result.message, self.clock.now_ms(), tally)
        if not last.passed:
            return docket.rejected(findings, self.clock.now_ms(), tally)
        return self._scored(entry, tally, self.decoders.of(loaded.files))

    def _scored(self, entry: _Open, tally: Tally, decode: Decode) -> Verdict:
        docket, case, findings = entry.docket, entry.case, entry.findings
        try:
            scored = score_group(self.environment, case.lease, case.rollouts, decode)
        except ScoringFailure as failure:
            log.warning("unit %d could not be scored: %s", case.lease.unit, failure)
            return docket.inconclusive(findings, MACHINERY_REWARD, str(failure), self.clock.now_ms())
        if scored.objection is not None:
            return docket.rejected([*findings, scored.objection], self.clock.now_ms(), tally)
        if case.replay is not None:  # what a light audit accepts may be anybody's: it must not speak against others
            self.seen.remember(case.marks)
        rewards = scored.rewards
        if self.shuffle_rewards:
            rewards = shuffled(rewards, case.lease.run, case.lease.unit)
        return docket.accepted(findings, rewards, len(case.tokens), self.clock.now_ms(), tally)
