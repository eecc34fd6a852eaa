"""How large a submission may be: as large as an honest one of this run can be, and no larger."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.hub import make_config
from shoal.hub.settings import MAX_INFLATED_BYTES, MAX_SUBMISSION_BYTES
from shoal.protocol import ProofParameters, Rollout, Submission
from shoal.protocol.lease import MAX_PROMPT_TOKENS


@settings(max_examples=30, deadline=None)
@given(
    group=st.integers(2, 32),
    tokens=st.integers(1, 100),
    topk=st.integers(8, 512),
    rows=st.integers(1, 64),
    seed=st.integers(0, 2**32),
)
def test_an_honest_submission_is_never_too_big(group: int, tokens: int, topk: int, rows: int, seed: int) -> None:
    """Nothing in it can be compressed, every completion has its full length and every proof all its points."""
    noise = random.Random(seed)
    run = {"group_size": group, "max_new_tokens": tokens}
    config = replace(make_config(Path("unused"), run), proof=ProofParameters(topk=topk, rows=rows))
    proofs = noise.randbytes(-(-tokens // rows) * (2 + 2 * topk))
    rollout = Rollout(noise.randbytes(4 * tokens), noise.randbytes(4 * tokens), "length", proofs)
    submission = Submission(
        format=1, run="r" * 256, node="n" * 256, lease="l" * 256, unit=2**62, incarnation=2**62, version=2**62,
        policy_digest="d" * 256, prompt=noise.randbytes(4 * MAX_PROMPT_TOKENS), rollouts=[rollout] * group,
        engine="e" * 256,
    )  # fmt: skip
    inflated = len(msgspec.msgpack.encode(submission))
    compressed = inflated + inflated // 256 + 64  # the most that zstd makes of it
    limits = config.submission_limits
    assert inflated <= limits.inflated_bytes or limits.inflated_bytes == MAX_INFLATED_BYTES
    assert compressed <= limits.compressed_bytes or limits.compressed_bytes == MAX_SUBMISSION_BYTES


def test_it_is_not_much_larger_either() -> None:
    """16 tokens at 128 points: one proof of 258 bytes for each rollout, which eight bytes a token would not hold."""
    config = make_config(Path("unused"), {"group_size": 16, "max_new_tokens": 16})
    assert config.submission_limits.inflated_bytes == 1024 * 1024 + 16 * (256 + 8 * 16 + 258)


def test_nobody_may_send_more_than_the_limits() -> None:
    limits = make_config(Path("unused"), {"group_size": 256, "max_new_tokens": 131_072}).submission_limits
    assert (limits.compressed_bytes, limits.inflated_bytes) == (MAX_SUBMISSION_BYTES, MAX_INFLATED_BYTES)
