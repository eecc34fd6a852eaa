"""The codec lets through what it made, within its caps; for everything else it raises CodecError and nothing more."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import CodecError
from shoal.protocol import BodyLimits, Rollout, Submission, TrainingBatch, pack, pack_logprobs, pack_tokens, unpack
from shoal.protocol.lease import MAX_GROUP, MAX_NEW_TOKENS, MAX_PROMPT_TOKENS

LIMITS = BodyLimits(compressed_bytes=2**20, inflated_bytes=2**22)

token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)
rollouts = st.builds(
    Rollout,
    tokens=token_lists.map(pack_tokens),
    logprobs=st.lists(st.floats(-50, 0, width=32), max_size=40).map(pack_logprobs),
    finish=st.sampled_from(["eos", "length"]),
    proofs=st.binary(max_size=64),
)
short = st.text(max_size=64)
numbers = st.integers(0, 2**63 - 1)
submissions = st.builds(
    Submission,
    format=st.just(1), run=short, node=short, lease=short, unit=numbers, incarnation=numbers, version=numbers,
    policy_digest=short, prompt=token_lists.map(pack_tokens), rollouts=st.lists(rollouts, min_size=1, max_size=4),
    engine=short,
)  # fmt: skip


def example(**changes: object) -> Submission:
    rollout = Rollout(pack_tokens([1, 2]), pack_logprobs([-0.5, -1.0]), "eos")
    plain = Submission(1, "run", "node", "lease", 3, 0, 4, "ab" * 32, pack_tokens([7, 8]), [rollout])
    return msgspec.structs.replace(plain, **changes)


def frame(content: object) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=True).compress(msgspec.msgpack.encode(content))


def refused(data: bytes, limits: BodyLimits = LIMITS) -> str:
    with pytest.raises(CodecError) as caught:
        unpack(data, Submission, limits)
    return str(caught.value)


@given(submissions)
def test_what_is_packed_unpacks_to_the_same(submission: Submission) -> None:
    assert unpack(pack(submission), Submission, LIMITS) == submission


@given(st.lists(st.integers(0, 2**32 - 1)), st.lists(st.floats(width=32, allow_nan=False)))
def test_tokens_and_logprobs_travel_exactly(tokens: list[int], logprobs: list[float]) -> None:
    rollout = Rollout(pack_tokens(tokens), pack_logprobs(logprobs), "eos")
    assert rollout.token_ids.tolist() == tokens
    assert rollout.logprob_values.tolist() == logprobs
    assert rollout.logprob_values.dtype == np.float32


@given(st.binary(max_size=300))
def test_random_bytes_raise_only_codec_errors(data: bytes) -> None:
    refused(data)


@given(st.binary(max_size=300))
def test_random_bytes_inside_a_good_frame_raise_only_codec_errors(data: bytes) -> None:
    refused(zstandard.ZstdCompressor(write_content_size=True).compress(data))


@given(st.recursive(st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | short | st.binary(),
                    lambda inner: st.lists(inner) | st.dictionaries(short, inner), max_leaves=12))  # fmt: skip
def test_well_formed_msgpack_of_another_shape_raises_only_codec_errors(content: object) -> None:
    refused(frame(content))


@given(submissions, st.data())
def test_every_truncation_and_every_trailing_byte_is_refused(submission: Submission, data: st.DataObject) -> None:
    body = pack(submission)
    refused(body[: data.draw(st.integers(0, len(body) - 1))])
    assert "after the zstd frame" in refused(body + data.draw(st.binary(min_size=1, max_size=8)))


@given(submissions, st.data())
def test_a_flipped_bit_never_raises_anything_else(submission: Submission, data: st.DataObject) -> None:
    body = bytearray(pack(submission))
    bit = data.draw(st.integers(0, 8 * len(body) - 1))
    body[bit // 8] ^= 1 << bit % 8
    with contextlib.suppress(CodecError):
        unpack(bytes(body), Submission, LIMITS)


def test_a_body_at_the_compressed_cap_passes_and_one_byte_more_does_not() -> None:
    body = pack(example())
    assert unpack(body, Submission, BodyLimits(len(body), 2**20)) == example()
    message = refused(body, BodyLimits(len(body) - 1, 2**20))
    assert message == f"the body has {len(body)} bytes; at most {len(body) - 1} are allowed"


def test_a_body_at_the_inflated_cap_passes_and_one_byte_more_does_not() -> None:
    body, size = pack(example()), len(msgspec.msgpack.encode(example()))
    assert unpack(body, Submission, BodyLimits(2**20, size)) == example()
    assert (
        refused(body, BodyLimits(2**20, size - 1))
        == f"the body inflates to {size} bytes; at most {size - 1} are allowed"
    )


def peak_while_refusing(data: bytes) -> int:
    tracemalloc.start()
    try:
        refused(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


BOMB_BYTES = 64 * 2**20
BOMB = zstandard.ZstdCompressor(level=3, write_content_size=True).compress(bytes(BOMB_BYTES))


def test_a_bomb_is_refused_before_it_is_inflated() -> None:
    assert len(BOMB) < 4096
    assert f"inflates to {BOMB_BYTES} bytes" in refused(BOMB)
    assert peak_while_refusing(BOMB) < 2**20


def test_a_bomb_that_lies_about_its_size_is_stopped_there() -> None:
    lie = BOMB[:6] + struct.pack("<I", 1000) + BOMB[10:]
    assert zstandard.get_frame_parameters(lie).content_size == 1000
    assert "damaged" in refused(lie)
    assert peak_while_refusing(lie) < 2**20
    one_segment = BOMB[:4] + bytes([BOMB[4] | 0x20]) + struct.pack("<I", 5000) + BOMB[10:]
    assert zstandard.get_frame_parameters(one_segment).content_size == 5000
    assert peak_while_refusing(one_segment) < 2**20


def test_a_frame_that_hides_its_size_is_refused_unread() -> None:
    hidden = zstandard.ZstdCompressor(write_content_size=False).compress(msgspec.msgpack.encode(example()))
    assert refused(hidden) == "the zstd frame does not declare its size"


def test_a_frame_that_inflates_past_what_it_declares_uses_no_more_than_that() -> None:
    """Blocks of one repeated byte, 4 bytes for 128 KiB each: the streaming interface would inflate all of them."""
    blocks, declared = 4000, 3 * 2**20  # half a gigabyte, were it believed
    block = [struct.pack("<I", (131072 << 3) | 2 | last)[:3] + b"\0" for last in (0, 1)]
    bomb = struct.pack("<IBBI", 0xFD2FB528, 2 << 6, 7 << 3, declared) + block[0] * (blocks - 1) + block[1]
    assert len(bomb) < 20_000
    tracemalloc.start()
    try:
        assert "damaged" in refused(bomb)
        assert tracemalloc.get_traced_memory()[1] < 2 * declared
    finally:
        tracemalloc.stop()


def test_a_large_honest_body_passes() -> None:
    noise = np.random.default_rng(0).integers(0, 256, 12 * 2**20, dtype=np.uint8).tobytes()
    large = example(rollouts=[Rollout(b"", b"", "eos", proofs=noise)])
    assert unpack(pack(large), Submission, BodyLimits()) == large


def test_a_frame_with_a_dictionary_is_refused() -> None:
    samples = [bytes([i]) * 200 + str(i).encode() * 50 for i in range(200)]
    dictionary = zstandard.train_dictionary(4096, samples)
    body = zstandard.ZstdCompressor(dict_data=dictionary, write_content_size=True).compress(b"x" * 100)
    assert refused(body) == "the zstd frame needs a dictionary"


def test_a_skippable_frame_is_no_body() -> None:
    refused(struct.pack("<II", 0x184D2A50, 4) + b"abcd")
    refused(struct.pack("<II", 0x184D2A50, 2**32 - 1) + b"abcd")


@pytest.mark.parametrize(
    "changes",
    [
        {"run": "x" * 257},
        {"unit": -1},
        {"unit": 2**63},
        {"version": -1},
        {"rollouts": []},
        {"rollouts": [Rollout(b"", b"", "eos")] * (MAX_GROUP + 1)},
        {"prompt": bytes(4 * MAX_PROMPT_TOKENS + 1)},
        {"rollouts": [Rollout(bytes(4 * MAX_NEW_TOKENS + 1), b"", "eos")]},
        {"rollouts": [Rollout(b"", bytes(4 * MAX_NEW_TOKENS + 1), "eos")]},
        {"rollouts": [Rollout(b"", b"", "stop")]},
        {"engine": 5},
    ],
)
def test_every_cap_on_a_field_holds(changes: dict[str, object]) -> None:
    assert refused(pack(example(**changes))).startswith("the body is not a valid Submission: ")


def test_an_unknown_field_and_deep_nesting_are_refused() -> None:
    fields = msgspec.to_builtins(example(), builtin_types=(bytes,))
    assert "unknown field" in refused(frame({**fields, "reward": 1.0}))
    refused(zstandard.ZstdCompressor(write_content_size=True).compress(b"\x91" * 100_000 + b"\xc0"))


def test_a_body_of_one_type_is_not_taken_for_another() -> None:
    with pytest.raises(CodecError, match="not a valid TrainingBatch"):
        unpack(pack(example()), TrainingBatch, LIMITS)
