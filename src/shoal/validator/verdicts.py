"""From findings to a verdict. Only a failed check rejects; a failure of the machinery is inconclusive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal.protocol import Audit, CheckResult, Lease, Outcome, RolloutReward, Verdict
from shoal.validator.case import MESSAGE_LIMIT, Finding

MACHINERY_POLICY = "machinery.policy"
MACHINERY_PREFILL = "machinery.prefill"
MACHINERY_REWARD = "reward.machinery"


@dataclass(frozen=True)
class Docket:
    """One audit on the table: what was claimed from the hub, and the lease that it is measured by."""

    audit: Audit
    lease: Lease
    body: bytes

    def accepted(
        self, findings: Sequence[Finding], rewards: tuple[RolloutReward, ...], generated_tokens: int, now_ms: int
    ) -> Verdict:
        """Everything held: the rewards count, and so do the tokens."""
        checks = (*_results(findings), CheckResult(check="reward", passed=True))
        return self._verdict(
            now_ms, outcome=Outcome.ACCEPTED, checks=checks, rewards=rewards, generated_tokens=generated_tokens
        )

    def rejected(self, findings: Sequence[Finding], now_ms: int) -> Verdict:
        """The last finding failed: its reason, severity and sentence are the verdict's."""
        failure = findings[-1]
        return self._verdict(
            now_ms,
            outcome=Outcome.REJECTED,
            reason=failure.reason,
            severity=failure.severity,
            message=failure.result.message,
            checks=_results(findings),
        )

    def inconclusive(self, findings: Sequence[Finding], reason: str, message: str, now_ms: int) -> Verdict:
        """The validator could not tell: no credit, no training, no punishment."""
        return self._verdict(
            now_ms,
            outcome=Outcome.INCONCLUSIVE,
            reason=reason,
            message=message[:MESSAGE_LIMIT],
            checks=_results(findings),
        )

    def _verdict(self, now_ms: int, **fields: Any) -> Verdict:
        return Verdict(
            run=self.lease.run,
            submission=self.audit.submission,
            unit=self.lease.unit,
            node=self.lease.node,
            decided_at_ms=now_ms,
            **fields,
        )


def _results(findings: Sequence[Finding]) -> tuple[CheckResult, ...]:
    return tuple(finding.result for finding in findings)
