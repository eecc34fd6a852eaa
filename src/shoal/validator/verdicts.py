"""From findings to a verdict. Only a failed check rejects; a failure of the machinery is unsure.

`LeaseTemplate` and `audit_job_of` make leases and submissions of no run, for measuring and self-tests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal.engines import Completion, Engine
from shoal.engines.groups import submission_of
from shoal.environments import Identity
from shoal.errors import ConfigError
from shoal.protocol import PolicyRef, SigningKey, pack, sign_document, submission_digest
from shoal.protocol.lease import Lease, ProofParameters, SamplingParameters
from shoal.protocol.verdict import Audit, Branches, CheckResult, Outcome, RolloutReward, Tally, Verdict
from shoal.rewards.pool import LIMIT_PART
from shoal.validator.case import MESSAGE_LIMIT, Finding

MACHINERY = {
    "machinery.policy": "the validator could not fetch the lease's policy",
    "machinery.profile": "the validator has no profile for what the worker generates with",
    "machinery.kind": "work of a kind that no trusted machine has measured is outside the limits of its number format",
    "machinery.environment": "the validator has another environment than the lease was made for",
    "machinery.prefill": "the validator's engine failed",
    "reward.machinery": "the reward could not be computed",
    "sampling.accident": "a few tokens are far off, as happens by itself in the worker's number format (its profile)",
    "sampling.distrusted": "tokens pass only by the tolerance, and by such tokens its owner, or newcomers, gain reward",
    "second.passed": "a check failed, but not in a second look in the worker's own format",
    "second.missing": "a statistical check failed, and this validator has not the worker's own format",
}

NOTHING_COUNTED = Tally()
NO_BRANCHES = Branches()
NO_ENVIRONMENT = Identity(name="", version=0, digest="")


@dataclass(frozen=True)
class AuditJob:
    """One audit and its lease. `environment` scores it and is named in the verdict. `unsure_rate`: how likely honest
    work of this kind and length is to be unsure."""

    audit: Audit
    lease: Lease
    body: bytes
    environment: Identity = NO_ENVIRONMENT
    unsure_rate: float = 0.0
    branches: Branches = NO_BRANCHES
    measured: bool = True

    def accepted(
        self, findings: Sequence[Finding], rewards: tuple[RolloutReward, ...], now_ms: int, tally: Tally, **fields: Any
    ) -> Verdict:
        """Everything held. The message says only how many completions hit a limit, nothing that would tell an
        answer."""
        limited = sum(LIMIT_PART in reward.parts for reward in rewards)
        message = f"{limited} of {len(rewards)} completions exceeded the time or memory for scoring: they are worth 0"
        reward = CheckResult(check="reward", passed=True)
        if limited:
            reward = CheckResult(check="reward", passed=True, evidence={"limited": limited}, message=message)
        return self._verdict(Outcome.ACCEPTED, [*findings, Finding(reward)], now_ms, tally, rewards=rewards, **fields)

    def rejected(self, findings: Sequence[Finding], now_ms: int, tally: Tally = NOTHING_COUNTED) -> Verdict:
        """The last finding failed: its reason, severity and message are the verdict's."""
        last = findings[-1]
        fields = {"reason": last.reason, "severity": last.severity, "message": last.result.message}
        return self._verdict(Outcome.REJECTED, findings, now_ms, tally, **fields)

    def unsure(
        self, findings: Sequence[Finding], reason: str, message: str, now_ms: int, tally: Tally = NOTHING_COUNTED
    ) -> Verdict:
        """The validator could not decide: no credit, no training, no punishment."""
        return self._verdict(Outcome.UNSURE, findings, now_ms, tally, reason=reason, message=message[:MESSAGE_LIMIT])

    def _verdict(
        self, outcome: Outcome, findings: Sequence[Finding], now_ms: int, tally: Tally, **fields: Any
    ) -> Verdict:
        lease, mine = self.lease, self.environment
        return Verdict(
            run=lease.run, submission=self.audit.submission, unit=lease.unit, node=lease.node, depth=self.audit.depth,
            outcome=outcome, checks=tuple(finding.result for finding in findings), decided_at_ms=now_ms, tally=tally,
            branches=self.branches, environment=mine.name,
            environment_version=mine.version, environment_digest=mine.digest, data_digest=mine.data_digest,
            unsure_rate=self.unsure_rate, measured=self.measured, calibration=lease.calibration, **fields,
        )  # fmt: skip


POLICY = PolicyRef(incarnation=0, version=0, digest="0" * 64)


@dataclass(frozen=True)
class Machine:
    device: str = "cpu"
    dtype: str = "float32"

    @classmethod
    def parse(cls, text: str) -> Machine:
        device, separator, dtype = text.partition("/")
        if not separator or not device or not dtype:
            raise ConfigError(f"{text!r} is no machine: write device/format, for example cuda/bfloat16")
        return cls(device, dtype)

    def __str__(self) -> str:
        return f"{self.device}/{self.dtype}"


@dataclass(frozen=True)
class LeaseTemplate:
    label: str
    group_size: int
    sampling: SamplingParameters
    proof: ProofParameters
    profile: str
    environment_digest: str = "0" * 64

    def lease(self, number: int, prompt_ids: Sequence[int], task: str = "none") -> Lease:
        return Lease(
            run="specimen", lease=str(number), node="0" * 16, unit=number, attempt=0, policy=POLICY, task=task,
            prompt_ids=tuple(prompt_ids), seeds=seeds_of(self.label, number, self.group_size), sampling=self.sampling,
            proof=self.proof, profile=self.profile, environment_digest=self.environment_digest, issued_at_ms=0,
            deadline_ms=0,
        )  # fmt: skip


def seeds_of(label: str, number: int, count: int) -> tuple[str, ...]:
    """The seeds of one lease; the same every time, so a measurement can be repeated."""
    names = (f"shoal/specimen/v1/{label}/{number}/{rollout}" for rollout in range(count))
    return tuple(hashlib.sha256(name.encode()).hexdigest()[:16] for name in names)


def audit_job_of(lease: Lease, group: Sequence[Completion], engine: Engine, key: SigningKey) -> AuditJob:
    """As a validator gets it from the hub."""
    body, signed = pack(submission_of(lease, group, engine.name)), sign_document(lease, key)
    name, size = submission_digest(body), len(body)
    return AuditJob(Audit(submission=name, size_bytes=size, lease=signed, received_at_ms=0, deadline_ms=0), lease, body)
