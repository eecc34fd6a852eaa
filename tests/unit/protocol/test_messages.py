"""Messages: frozen, closed to unknown fields, bounded; tensors and digests."""

from __future__ import annotations

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import shoal.protocol as protocol
from shoal.protocol import (
    Batch,
    Chunk,
    Document,
    Entry,
    Heartbeat,
    Lease,
    LeaseRelease,
    LeaseRequest,
    Message,
    PolicyRef,
    Registration,
    SamplingParameters,
    TensorView,
    content_digest,
)

MESSAGES = [kind for _, kind in inspect.getmembers(protocol, inspect.isclass) if issubclass(kind, Message)]


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_every_message_is_frozen_and_refuses_unknown_fields(kind: type[Message]) -> None:
    assert kind.model_config.get("frozen") is True
    assert kind.model_config.get("extra") == "forbid"


def test_every_document_has_a_kind_of_its_own() -> None:
    kinds = [kind.kind for kind in MESSAGES if issubclass(kind, Document) and kind is not Document]
    assert len(kinds) == len(set(kinds)) >= 7


def test_the_public_surface_is_complete() -> None:
    assert sorted(protocol.__all__) == sorted(set(protocol.__all__))
    for name in protocol.__all__:
        assert hasattr(protocol, name)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (SamplingParameters, {"temperature": 0, "max_new_tokens": 1, "eos_token_id": 0}),
        (SamplingParameters, {"temperature": float("nan"), "max_new_tokens": 1, "eos_token_id": 0}),
        (SamplingParameters, {"temperature": 1, "max_new_tokens": 0, "eos_token_id": 0}),
        (LeaseRequest, {"request": "short"}),
        (LeaseRequest, {"request": "r" * 8, "wait_s": 61}),
        (LeaseRequest, {"request": "r" * 8, "max_units": 257}),
        (PolicyRef, {"incarnation": 0, "version": -1, "digest": "ab" * 32}),
        (PolicyRef, {"incarnation": 0, "version": 0, "digest": "AB" * 32}),
        (Heartbeat, {"doing": "x" * 201}),
        (Heartbeat, {"counters": {str(i): 0.0 for i in range(33)}}),
        (Chunk, {"hash": "ab" * 32, "size_bytes": 0}),
    ],
)
def test_values_out_of_bounds_are_refused(kind: type[Message], values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        kind.model_validate(values)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/..", "a//b", "/a", "a/", "a\\b", "x" * 256, "a\n", "a\x00", "a/" * 512 + "a"]
)
def test_no_entry_can_leave_its_folder(name: str) -> None:
    with pytest.raises(ValidationError):
        Entry(name=name, type="file", offset=0, size_bytes=1)


def test_a_batch_written_down_before_it_had_a_sampled_reward_still_opens() -> None:
    old = Batch.model_validate_json('{"step": 3, "groups": [], "dropped_groups": 2, "written_at_ms": 7}')
    assert old.sampled_reward is None
    new = old.model_copy(update={"sampled_reward": 0.625})
    assert Batch.model_validate_json(new.model_dump_json()) == new
    with pytest.raises(ValidationError):
        Batch(step=3, groups=(), sampled_reward=float("nan"), written_at_ms=7)


def test_a_lease_request_that_does_not_say_what_it_holds_still_opens() -> None:
    assert LeaseRequest.model_validate_json('{"request": "request-1"}').held is None
    new = LeaseRequest(request="request-1", held=("u3a0",))
    assert LeaseRequest.model_validate_json(new.model_dump_json()) == new


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
            ((ENTRIES[1], ENTRIES[0]), 8, CHUNKS),
            (ENTRIES[:1], 8, CHUNKS),
            ((ENTRIES[0], ENTRIES[1].model_copy(update={"name": "v"})), 8, CHUNKS),
            ((ENTRIES[0], ENTRIES[1].model_copy(update={"dtype": "I32"})), 8, CHUNKS),
            ((ENTRIES[0], ENTRIES[1].model_copy(update={"shape": (2, 1)})), 8, CHUNKS),
            (ENTRIES, 16, CHUNKS),
            (ENTRIES, 8, CHUNKS[::-1]),
            (ENTRIES, 8, CHUNKS[:1]),
        ]
    )
)
def test_a_digest_covers_entries_and_chunks_in_order(other: tuple[tuple[Entry, ...], int, tuple[Chunk, ...]]) -> None:
    assert content_digest(*other) != content_digest(ENTRIES, 8, CHUNKS)
    assert content_digest(*other) == content_digest(*other)


@pytest.mark.parametrize("text", ["a\x00bcdefgh", "a\nbcdefghi", "\x1b[2Jabcdefgh"])
def test_no_control_character_gets_into_what_is_stored_or_shown(text: str) -> None:
    """PostgreSQL holds no NUL: one in an SQLite run would keep it from ever being moved."""
    with pytest.raises(ValidationError):
        LeaseRequest(request=text)
    with pytest.raises(ValidationError):
        LeaseRelease(leases=(), reason=text)
    with pytest.raises(ValidationError):
        Registration(public_key="5f" * 32, software=text)


def test_every_time_in_a_message_is_bounded() -> None:
    """A certified hub may name any time; none of them may overflow where it is computed with."""
    times = [
        (f"{each.__name__}.{name}", f"{field.metadata} {field.annotation}")
        for each in MESSAGES
        for name, field in each.model_fields.items()
        if name.endswith("_ms")
    ]
    assert len(times) > 20
    assert [name for name, said in times if f"Le(le={2**53})" not in said] == []
