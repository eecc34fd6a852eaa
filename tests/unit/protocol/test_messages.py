"""Messages: round trips, versions, bounds; the codec of bulk bodies refuses before it allocates."""

import inspect
import struct

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import shoal.protocol as protocol
from shoal.errors import CodecError, ProtocolError
from shoal.protocol import MAX_GROUP, MAX_NEW_TOKENS, MAX_PROMPT_TOKENS, Lease, LeaseRequest, SamplingParameters
from shoal.protocol.codec import BodyLimits, TensorView, pack, unpack
from shoal.protocol.node import PROTOCOL_VERSION, Heartbeat, Registration, check_spoken
from shoal.protocol.policy import Chunk, Entry, PolicyRef, content_digest
from shoal.protocol.signing import Document, Message
from shoal.protocol.submission import Rollout, Submission, pack_logprobs, pack_tokens

MESSAGES = [kind for _, kind in inspect.getmembers(protocol, inspect.isclass) if issubclass(kind, Message)]


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_every_message_is_frozen_and_refuses_unknown_fields(kind: type[Message]) -> None:
    assert kind.model_config.get("frozen") is True
    assert kind.model_config.get("extra") == "forbid"


def test_every_document_has_a_kind_of_its_own() -> None:
    kinds = [kind.kind for kind in MESSAGES if issubclass(kind, Document) and kind is not Document]
    assert len(kinds) == len(set(kinds)) >= 7


@pytest.mark.parametrize(("kind", "values"), [
    (SamplingParameters, {"temperature": 0, "max_new_tokens": 1, "eos_token_ids": [0]}),
    (SamplingParameters, {"temperature": float("nan"), "max_new_tokens": 1, "eos_token_ids": [0]}),
    (SamplingParameters, {"temperature": 1, "max_new_tokens": 0, "eos_token_ids": [0]}),
    (LeaseRequest, {"request": "short"}), (LeaseRequest, {"request": "r" * 8, "wait_s": 61}),
    (LeaseRequest, {"request": "r" * 8, "max_units": 257}),
    (PolicyRef, {"incarnation": 0, "version": -1, "digest": "ab" * 32}),
    (PolicyRef, {"incarnation": 0, "version": 0, "digest": "AB" * 32}), (Heartbeat, {"doing": "x" * 201}),
    (Heartbeat, {"counters": {str(i): 0.0 for i in range(33)}}), (Chunk, {"hash": "ab" * 32, "size_bytes": 0}),
])  # fmt: skip
def test_values_out_of_bounds_are_refused(kind: type[Message], values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        kind.model_validate(values)


def test_seeds_are_whole_64_bit_numbers() -> None:
    lease = Lease.model_construct(seeds=("ffffffffffffffff", "0000000000000001"))
    assert lease.seed_numbers == (2**64 - 1, 1)


def test_a_tensor_must_fill_its_shape() -> None:
    view = TensorView("w", "F32", (2, 3), memoryview(bytes(24)))
    assert view.data.nbytes == 24
    assert TensorView("scalar", "BF16", (), memoryview(bytes(2))).shape == ()
    with pytest.raises(ValueError, match=r"w: 23 bytes do not fill F32\[2, 3\]"):
        TensorView("w", "F32", (2, 3), memoryview(bytes(23)))
    with pytest.raises(ValueError, match="unknown type F8"):
        TensorView("w", "F8", (1,), memoryview(bytes(1)))


ENTRIES = (
    Entry(name="config.json", type="file", offset=0, size_bytes=3),
    Entry(name="w", type="tensor", offset=3, size_bytes=8, dtype="F32", shape=(2,)),
)
CHUNKS = (Chunk(hash="ab" * 32, size_bytes=8), Chunk(hash="cd" * 32, size_bytes=3))


@given(
    st.sampled_from(
        [
            ((ENTRIES[1], ENTRIES[0]), 8, CHUNKS), (ENTRIES[:1], 8, CHUNKS),
            ((ENTRIES[0], ENTRIES[1].model_copy(update={"name": "v"})), 8, CHUNKS),
            ((ENTRIES[0], ENTRIES[1].model_copy(update={"dtype": "I32"})), 8, CHUNKS),
            ((ENTRIES[0], ENTRIES[1].model_copy(update={"shape": (2, 1)})), 8, CHUNKS), (ENTRIES, 16, CHUNKS),
            (ENTRIES, 8, CHUNKS[::-1]), (ENTRIES, 8, CHUNKS[:1]),
        ]
    )
)  # fmt: skip
def test_a_digest_covers_entries_and_chunks_in_order(other: tuple[tuple[Entry, ...], int, tuple[Chunk, ...]]) -> None:
    assert content_digest(*other) != content_digest(ENTRIES, 8, CHUNKS)
    assert content_digest(*other) == content_digest(*other)


@pytest.mark.parametrize("text", ["a\x00bcdefgh", "a\nbcdefghi", "\x1b[2Jabcdefgh"])
def test_no_control_character_gets_into_what_is_stored_or_shown(text: str) -> None:
    """PostgreSQL holds no NUL: one in an SQLite run would keep it from ever being moved."""
    release, registration = {"leases": (), "reason": text}, {"public_key": "5f" * 32, "software": text}
    for kind, values in (
        (LeaseRequest, {"request": text}),
        (protocol.LeaseRelease, release),
        (Registration, registration),
    ):
        with pytest.raises(ValidationError):
            kind(**values)


def test_every_time_in_a_message_is_bounded() -> None:
    """A certified hub may name any time; none of them may overflow where it is computed with."""
    fields = [(each.__name__, name, field) for each in MESSAGES for name, field in each.model_fields.items()]
    times = [(of, name, f"{each.metadata} {each.annotation}") for of, name, each in fields if name.endswith("_ms")]
    assert len(times) > 20
    assert [(of, name) for of, name, said in times if f"Le(le={2**53})" not in said] == []


LIMITS = BodyLimits(compressed_bytes=2**20, inflated_bytes=2**22)

token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)
rollouts = st.builds(
    Rollout, tokens=token_lists.map(pack_tokens),
    logprobs=st.lists(st.floats(-50, 0, width=32), max_size=40).map(pack_logprobs),
    finish=st.sampled_from(["eos", "length"]), proofs=st.binary(max_size=64),
)  # fmt: skip
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
def test_packed_body_unpacks_to_the_same(submission: Submission) -> None:
    assert unpack(pack(submission), Submission, LIMITS) == submission


@given(st.lists(st.integers(0, 2**32 - 1)), st.lists(st.floats(width=32, allow_nan=False)))
def test_tokens_and_logprobs_travel_exactly(tokens: list[int], logprobs: list[float]) -> None:
    rollout = Rollout(pack_tokens(tokens), pack_logprobs(logprobs), "eos")
    assert (rollout.token_ids.tolist(), rollout.logprob_values.tolist()) == (tokens, logprobs)
    assert rollout.logprob_values.dtype == np.float32


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


def test_a_body_at_a_cap_and_a_large_honest_one_pass_and_one_byte_more_does_not() -> None:
    body, size = pack(example()), len(msgspec.msgpack.encode(example()))
    assert unpack(body, Submission, BodyLimits(len(body), size)) == example()
    message = refused(body, BodyLimits(len(body) - 1, size))
    assert message == f"the body has {len(body)} bytes; at most {len(body) - 1} are allowed"
    message = refused(body, BodyLimits(len(body), size - 1))
    assert message == f"the body inflates to {size} bytes; at most {size - 1} are allowed"
    noise = np.random.default_rng(0).integers(0, 256, 12 * 2**20, dtype=np.uint8).tobytes()
    large = example(rollouts=[Rollout(b"", b"", "eos", proofs=noise)])
    assert unpack(pack(large), Submission, BodyLimits()) == large


def test_a_frame_with_a_dictionary_and_a_skippable_frame_are_refused() -> None:
    samples = [bytes([i]) * 200 + str(i).encode() * 50 for i in range(200)]
    dictionary = zstandard.train_dictionary(4096, samples)
    body = zstandard.ZstdCompressor(dict_data=dictionary, write_content_size=True).compress(b"x" * 100)
    assert refused(body) == "the zstd frame needs a dictionary"
    refused(struct.pack("<II", 0x184D2A50, 4) + b"abcd")
    refused(struct.pack("<II", 0x184D2A50, 2**32 - 1) + b"abcd")


@pytest.mark.parametrize("changes", [
    {"run": "x" * 257}, {"unit": -1}, {"unit": 2**63}, {"version": -1}, {"rollouts": []},
    {"rollouts": [Rollout(b"", b"", "eos")] * (MAX_GROUP + 1)}, {"prompt": bytes(4 * MAX_PROMPT_TOKENS + 1)},
    {"rollouts": [Rollout(bytes(4 * MAX_NEW_TOKENS + 1), b"", "eos")]},
    {"rollouts": [Rollout(b"", bytes(4 * MAX_NEW_TOKENS + 1), "eos")]}, {"rollouts": [Rollout(b"", b"", "stop")]},
    {"engine": 5},
])  # fmt: skip
def test_every_cap_on_a_field_holds(changes: dict[str, object]) -> None:
    assert refused(pack(example(**changes))).startswith("the body is not a valid Submission: ")


def test_an_unknown_field_and_deep_nesting_are_refused() -> None:
    fields = msgspec.to_builtins(example(), builtin_types=(bytes,))
    assert "unknown field" in refused(frame({**fields, "reward": 1.0}))
    refused(zstandard.ZstdCompressor(write_content_size=True).compress(b"\x91" * 100_000 + b"\xc0"))


NEWER, OLDER = PROTOCOL_VERSION + 1, PROTOCOL_VERSION - 1


@pytest.mark.parametrize(("who", "version", "remedy"), [
    ("hub", NEWER, "shoal on the node's machine is too old: upgrade it there with: pip install -U shoal-rl"),
    ("hub", OLDER, "the hub is too old: ask the run's owner to upgrade it"),
    ("node", NEWER, "the hub is too old: ask the run's owner to upgrade it"),
    ("node", OLDER, "shoal on the node's machine is too old: upgrade it there with: pip install -U shoal-rl"),
])  # fmt: skip
def test_another_version_is_refused_with_what_to_do(who: str, version: int, remedy: str) -> None:
    with pytest.raises(ProtocolError, match=f"speaks (protocol )?{version}.*: {remedy}"):
        check_spoken(who, version)
