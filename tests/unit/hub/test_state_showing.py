"""Shown progress in the decision core: which chunks are taken, whose lease is looked at, which rollout of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.state import rules
from shoal.hub.state import submissions
from shoal.hub.state.commands import Refusal
from shoal.hub.state.rows import ShownRow
from shoal.protocol import BodyLimits, ProofParameters, pack, pack_tokens, unpack
from shoal.protocol.submission import ShownChunks, ShownProgress, shown_digest

PROOF = ProofParameters(topk=8, rows=4)
RULES = rules(group_size=2, max_new_tokens=16)


def chunks(rollout: int, start: int, tokens: Sequence[int], proofs: bytes | None = None) -> ShownChunks:
    made = bytes(4 * -(-len(tokens) // 4)) if proofs is None else proofs
    return ShownChunks(rollout, start, pack_tokens(tokens), made)


def take(last: ShownRow | None, *said: ShownChunks) -> tuple[tuple[int, ...], ShownRow | None, list[ShownChunks]]:
    return submissions.take_shown(RULES, PROOF, "u0a0", last, said)


def test_chunks_are_taken_where_the_copy_ends_and_others_are_left_out():
    tokens, first, new = take(None, chunks(0, 0, range(4)), chunks(1, 4, range(4)))
    assert (tokens, len(new)) == ((4, 0), 1)
    assert first == ShownRow("u0a0", 0, (4, 0))
    assert take(first, chunks(0, 0, range(8))) == ((4, 0), None, [])
    tokens, second, _ = take(first, chunks(0, 4, range(8)), chunks(1, 0, range(3)))
    assert second == ShownRow("u0a0", 1, (12, 3))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (chunks(2, 0, range(4)), "groups have 2 rollouts"),
        (chunks(0, 0, range(17)), "17 tokens; at most 16"),
        (chunks(0, 0, range(4), proofs=bytes(19)), "19 bytes of proofs do not fit 1 chunks"),
        (chunks(0, 0, range(8), proofs=bytes(7)), "7 bytes of proofs do not fit 2 chunks"),
        (chunks(0, 0, ()), "0 bytes of tokens"),
        (ShownChunks(0, 0, b"\0" * 5, bytes(4)), "5 bytes of tokens"),
    ],
)
def test_what_cannot_be_meant_is_refused(said, why):
    with pytest.raises(Refusal, match=why) as caught:
        take(None, said)
    assert (caught.value.status, caught.value.code) == (422, "progress.malformed")


def test_nothing_follows_a_short_chunk():
    _, last, _ = take(None, chunks(0, 0, range(3)))
    with pytest.raises(Refusal, match="ended with a short chunk, at token 3"):
        take(last, chunks(0, 3, range(4)))


@given(data=st.data())
def test_however_messages_are_cut_lost_and_repeated_the_copy_becomes_the_group(data: st.DataObject):
    lengths = data.draw(st.tuples(st.integers(1, 16), st.integers(1, 16)))
    whole = [list(range(100 * row, 100 * row + length)) for row, length in enumerate(lengths)]
    proofs = [[bytes([row, at, 1, 2]) for at in range(-(-length // 4))] for row, length in enumerate(lengths)]
    last, bodies = None, list[bytes]()
    have = (0, 0)
    for _ in range(200):
        if have == lengths:
            break
        believed = tuple(data.draw(st.sampled_from([0, have[row]])) for row in range(2))  # an answer may be lost
        said = []
        for row, start in enumerate(believed):
            left = -(-(lengths[row] - start) // 4)
            count = data.draw(st.integers(0, min(left, 2)))
            if count:
                part = proofs[row][start // 4 : start // 4 + count]
                said.append(chunks(row, start, whole[row][start : start + 4 * count], b"".join(part)))
        have, row_, new = take(last, *said)
        if row_ is not None:
            body = pack(ShownProgress(new))
            last, bodies = replace(row_, body=body), [*bodies, body]
        if data.draw(st.booleans()):
            have = (0, 0) if last is None else last.tokens  # what the next answer says
    found = submissions.joined_parts([unpack(body, ShownProgress, BodyLimits()).chunks for body in bodies])
    for row, (tokens, proof) in found.items():
        assert pack_tokens(whole[row]).startswith(tokens)
        assert b"".join(proofs[row]).startswith(proof)
        assert len(tokens) // 4 == (last.tokens[row] if last else 0)
    for prefix in submissions.prefixes(found):
        begins = pack_tokens(whole[prefix.rollout][: prefix.tokens])
        assert prefix.digest == shown_digest(begins, b"".join(proofs[prefix.rollout])[: prefix.proof_bytes])


def test_a_lease_is_looked_at_when_it_shows_something_and_again_after_each_doubling():
    assert [submissions.is_shown_due(tokens, 0) for tokens in (0, 1, 64)] == [False, True, True]
    assert [submissions.is_shown_due(64, looked_at) for looked_at in (32, 33, 64)] == [True, False, False]


@given(
    tokens=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), fraction=st.floats(0, 1, exclude_max=True)
)
def test_a_rollout_is_picked_in_proportion_to_what_was_shown_of_it(tokens, fraction):
    picked = submissions.next_shown_rollout(tokens, fraction)
    assert tokens[picked] > 0
    assert sum(tokens[:picked]) <= fraction * sum(tokens) <= sum(tokens[: picked + 1])
