"""From findings to a verdict. Only a failed check rejects; a failure of the machinery is unsure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal.environments import Identity
from shoal.protocol import Audit, CheckResult, Lease, Outcome, RolloutReward, Tally, Verdict
from shoal.protocol.verdict import Branches
from shoal.rewards.pool import LIMIT_PART
from shoal.validator.case import MESSAGE_LIMIT, Finding

MACHINERY_POLICY = "machinery.policy"
MACHINERY_PROFILE = "machinery.profile"
MACHINERY_KIND = "machinery.kind"
MACHINERY_ENVIRONMENT = "machinery.environment"
MACHINERY_PREFILL = "machinery.prefill"
MACHINERY_REWARD = "reward.machinery"
MACHINERY_ACCIDENT = "sampling.accident"
MACHINERY_DISTRUSTED = "sampling.distrusted"
MACHINERY_SECOND_PASSED = "second.passed"
MACHINERY_SECOND_MISSING = "second.missing"

MACHINERY = {
    MACHINERY_POLICY: "the validator could not fetch the lease's policy",
    MACHINERY_PROFILE: "the validator has no profile for what the worker generates with",
    MACHINERY_KIND: "work of a kind that no trusted machine has measured is outside the limits of its number format",
    MACHINERY_ENVIRONMENT: "the validator has another environment than the lease was made for",
    MACHINERY_PREFILL: "the validator's engine failed",
    MACHINERY_REWARD: "the reward could not be computed",
    MACHINERY_ACCIDENT: "a few tokens are far off, as happens by itself in the worker's number format (its profile)",
    MACHINERY_DISTRUSTED: "tokens pass only by the tolerance, and by such tokens its owner, or newcomers, gain reward",
    MACHINERY_SECOND_PASSED: "a check failed, but not in a second look in the worker's own format",
    MACHINERY_SECOND_MISSING: "a statistical check failed, and this validator has not the worker's own format",
}

NOTHING_COUNTED = Tally()
NO_BRANCHES = Branches()
NO_ENVIRONMENT = Identity(name="", version=0, digest="")


@dataclass(frozen=True)
class Docket:
    """One audit on the table: what was claimed from the hub, and the lease that it is measured by. `environment` is the
    one that it is scored with; every verdict names it. `unsure_rate` is how likely honest work of this kind and length
    is to be unsure. `branches` is what was seen of the seeds' branches, if any."""

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
        """Everything held: the rewards count, and so do the tokens. Of rewards nothing is said that would tell an
        answer, but how many completions hit a limit."""
        limited = sum(LIMIT_PART in reward.parts for reward in rewards)
        said = f"{limited} of {len(rewards)} completions took more time or memory than scoring allows: they are worth 0"
        reward = CheckResult(check="reward", passed=True)
        if limited:
            reward = CheckResult(check="reward", passed=True, evidence={"limited": limited}, message=said)
        return self._verdict(Outcome.ACCEPTED, [*findings, Finding(reward)], now_ms, tally, rewards=rewards, **fields)

    def rejected(self, findings: Sequence[Finding], now_ms: int, tally: Tally = NOTHING_COUNTED) -> Verdict:
        """The last finding failed: its reason, severity and sentence are the verdict's."""
        last = findings[-1]
        fields = {"reason": last.reason, "severity": last.severity, "message": last.result.message}
        return self._verdict(Outcome.REJECTED, findings, now_ms, tally, **fields)

    def unsure(
        self, findings: Sequence[Finding], reason: str, message: str, now_ms: int, tally: Tally = NOTHING_COUNTED
    ) -> Verdict:
        """The validator could not tell: no credit, no training, no punishment."""
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
