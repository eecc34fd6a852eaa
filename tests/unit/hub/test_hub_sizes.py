"""How large a submission may be: as large as an honest one of this run can be, and no larger."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
from hubkit import make_config
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.protocol import Rollout, Submission
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
    run = {"group_size": group, "max_new_tokens": tokens, "proof_topk": topk, "proof_rows": rows}
    config = make_config(Path("unused"), run)
    proofs = noise.randbytes(-(-tokens // rows) * (2 + 2 * topk))
    rollout = Rollout(noise.randbytes(4 * tokens), noise.randbytes(4 * tokens), "length", proofs)
    submission = Submission(
        format=1,
        run="r" * 256,
        node="n" * 256,
        lease="l" * 256,
        unit=2**62,
        incarnation=2**62,
        version=2**62,
        policy_digest="d" * 256,
        prompt=noise.randbytes(4 * MAX_PROMPT_TOKENS),
        rollouts=[rollout] * group,
        engine="e" * 256,
    )
    inflated = len(msgspec.msgpack.encode(submission))
    compressed = inflated + inflated // 256 + 64  # the most that zstd makes of it
    limits, roof = config.submission_limits, config.settings
    assert inflated <= limits.inflated_bytes or limits.inflated_bytes == roof.max_inflated_bytes
    assert compressed <= limits.compressed_bytes or limits.compressed_bytes == roof.max_submission_bytes


def test_it_is_not_much_larger_either() -> None:
    """16 tokens at 128 points: one proof of 258 bytes for each rollout, which eight bytes a token would not hold."""
    config = make_config(Path("unused"), {"group_size": 16, "max_new_tokens": 16})
    assert config.submission_limits.inflated_bytes == 1024 * 1024 + 16 * (256 + 8 * 16 + 258)


def test_the_settings_have_the_last_word() -> None:
    config = make_config(Path("unused"), {}, {"max_submission_bytes": 4096, "max_inflated_bytes": 8192})
    limits = config.submission_limits
    assert (limits.compressed_bytes, limits.inflated_bytes) == (4096, 8192)
