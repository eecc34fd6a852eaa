"""Maps of who has what: their bits, what they decide, and asking for one."""

from __future__ import annotations

import random
from contextlib import closing

import pytest
from castsim import chunks_of, manifest_of
from hypothesis import given
from hypothesis import strategies as st

from kit.cast import Lab, ScriptedSource, says
from shoal.errors import BroadcastError
from shoal.protocol import Chunk, Delta, PolicyManifest, PolicyRef
from shoal.runtime.stop import StopToken
from shoal.shardcast.connection import Connection
from shoal.shardcast.manifest import offered
from shoal.shardcast.plan import Plan, Question, SourceScores
from shoal.shardcast.pool import ask_for_map

A, B = "http://a:1", "http://b:1"
CHUNKS = chunks_of(11)
PLACE = (0, 1)


def plan_of(*manifests: PolicyManifest) -> Plan:
    """Of these all is wanted, and none of it is on this disk."""
    scores = SourceScores([])
    plan = Plan(scores, 4, random.Random(0))
    for manifest in manifests:
        plan.want(manifest, offered(manifest), 0.0)
    while (flight := plan.take(0.0)) is not None:
        plan.land(flight, False)
    scores.set_sources([A])
    return plan


def taken(plan: Plan) -> list[Chunk]:
    """What the plan fetches from A, in order."""
    found = []
    while (flight := plan.take(0.5)) is not None:
        assert flight.source == A
        found.append(flight.chunk)
        plan.land(flight, True)
    return found


@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_exactly_those_chunks_are_asked_for_whose_bits_are_set(flags: list[bool]) -> None:
    """The least significant bit first; SOON, the second half, is no offer."""
    chunks = chunks_of(len(flags))
    half = sum(flag << index for index, flag in enumerate(flags)).to_bytes(-(-len(flags) // 8), "little")
    plan = plan_of(manifest_of(chunks))
    plan.see(A, PLACE, half + b"\xff" * len(half), 0.0, 0.0)
    asked = taken(plan)
    assert len(asked) == len(set(asked)) == sum(flags)
    assert set(asked) == {chunk for chunk, flag in zip(chunks, flags, strict=True) if flag}


def test_newer_versions_come_first_and_of_each_the_deltas() -> None:
    base = PolicyRef(incarnation=0, version=0, digest="b" * 64)
    delta = Delta(base=base, size_bytes=2000, chunks=CHUNKS[2:4])
    old = manifest_of(CHUNKS[:2]).model_copy(update={"deltas": (delta,)})
    plan = plan_of(old, manifest_of(CHUNKS[4:8], version=2))
    for version, body in ((1, b"\xff\xff"), (2, b"\xff\xff")):
        plan.see(A, (0, version), body, 0.0, 0.0)
    asked = taken(plan)
    assert [set(asked[:4]), set(asked[4:6]), set(asked[6:])] == [set(CHUNKS[4:8]), set(CHUNKS[2:4]), set(CHUNKS[:2])]


def test_a_chunk_of_two_versions_is_looked_up_in_the_newer() -> None:
    plan = plan_of(manifest_of(CHUNKS), manifest_of(CHUNKS[:3], version=2))
    plan.see(A, PLACE, bytes([255, 7, 0, 0]), 0.0, 0.0)
    plan.see(A, (0, 2), bytes([0, 0]), 0.0, 0.0)
    assert set(taken(plan)) == set(CHUNKS[3:])


def ask(source: ScriptedSource) -> bytes | None:
    with closing(Connection(source.url, StopToken())) as connection:
        return ask_for_map(connection, Question((2, 31), 11, 5, 2.5))


def test_a_map_is_asked_for_by_version_and_count_and_a_wrong_or_huge_one_is_refused_unread(lab: Lab) -> None:
    source = lab.source(says(b"abcd"))
    assert ask(source) == b"abcd"
    assert source.seen == ["/have/2.31?count=5&wait_s=2.5"]
    assert ask(lab.source(says(b"no such thing", 404))) is None
    for body, size in ((b"abc", 3), (b"", 1 << 40)):
        with pytest.raises(BroadcastError, match=f"{size} bytes"):
            ask(lab.source(says(body, size=size)))
