"""A finished group as it is handed in: what an engine drew, framed by the lease that it was drawn for."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.engines.protocol import Completion
from shoal.protocol import SUBMISSION_FORMAT, Lease, Rollout, Submission, pack_logprobs, pack_tokens
from shoal.protocol.submission import pack_spans


def submission_of(lease: Lease, completions: Sequence[Completion], engine: str) -> Submission:
    return Submission(
        format=SUBMISSION_FORMAT,
        run=lease.run,
        node=lease.node,
        lease=lease.lease,
        unit=lease.unit,
        incarnation=lease.policy.incarnation,
        version=lease.policy.version,
        policy_digest=lease.policy.digest,
        prompt=pack_tokens(lease.prompt_ids),
        rollouts=[rollout_of(completion) for completion in completions],
        engine=engine,
    )


def rollout_of(completion: Completion) -> Rollout:
    return Rollout(
        tokens=pack_tokens(completion.token_ids),
        logprobs=pack_logprobs(completion.logprobs),
        finish=completion.finish,
        proofs=completion.proofs,
        given=pack_spans(completion.given),
    )
