"""What to fetch from whom: decided in simulated time, with sources that are slow, dead, behind or lying."""

import random
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest
from castsim import SIZE, Node, Source, World, chunks_of, manifest_of, swarm
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.cast import Lab, ScriptedSource, says
from shoal.errors import BroadcastError
from shoal.protocol import Chunk, Delta, PolicyManifest, PolicyRef
from shoal.runtime.stop import StopToken
from shoal.shardcast.connection import Connection
from shoal.shardcast.manifest import offered
from shoal.shardcast.pool import fetch_map
from shoal.shardcast.scheduler import FEW_ATTEMPTS, MapRequest, Scheduler, SourceScores

A, B, ORIGIN = "http://a:1", "http://b:1", "http://origin:1"
CHUNKS = chunks_of(40)
ALL = {chunk.hash for chunk in CHUNKS}
MANIFEST = manifest_of(CHUNKS)


def hashes(first: int, last: int) -> set[str]:
    return {chunk.hash for chunk in CHUNKS[first:last]}


def following(
    *sources: Source, seed: int = 0, connections: int = 4, manifest: PolicyManifest = MANIFEST, **named: list[str]
) -> tuple[Any, ...]:
    """A node that wants everything from these sources, all of them upstream unless they are named otherwise."""
    world = World()
    others = [url for urls in named.values() for url in urls]
    upstreams = [url for url in (world.add(source).url for source in sources) if url not in others]
    node = Node(world, seed, connections, upstreams=upstreams, **named)
    node.want(manifest)
    return world, node, *sources


def test_source_without_maps_that_lacks_a_chunk_is_asked_again_later() -> None:
    world, node, source = following(Source(A, hashes(0, 39), maps=False))
    assert not world.run(10)
    assert node.kept == hashes(0, 39)
    assert 4 <= source.asked[CHUNKS[39].hash] <= 20  # with growing pauses
    source.has.add(CHUNKS[39].hash)
    assert world.run(5)


def test_a_requested_chunk_is_not_requested_on_other_connections() -> None:
    """Before its map has come, a relay gets one request: it might be held until the chunk is there."""
    world, node, source = following(Source(A, set(ALL), rate_bytes_s=SIZE / 10, silent=True))
    for _ in range(40):
        world.step()
    assert len(source.sending) == 1
    for _ in range(40):  # a second without a map: it is taken to have everything
        world.step()
    assert len(source.sending) == FEW_ATTEMPTS < node.connections


@pytest.mark.parametrize(("rate", "slow"), [(SIZE / 2, True), (20 * SIZE, False)])
def test_a_link_carries_as_many_chunks_at_a_time_as_it_bears(rate, slow, monkeypatch):
    """Eight at once over a slow link would all be late, be given up together, and begin again for ever."""
    monkeypatch.setattr("shoal.shardcast.scheduler.ATTEMPT_BYTES_S", SIZE)  # what one attempt should get
    world, node, source = following(Source(A, set(ALL), rate_bytes_s=rate), connections=8)
    seen = 0
    while len(node.kept) < 12:
        world.step()
        seen = max(seen, len(source.sending))
    assert seen <= FEW_ATTEMPTS if slow else seen > 2 * FEW_ATTEMPTS


@pytest.mark.parametrize(("count", "most"), [(2, 1.05), (3, 1.12), (4, 1.2)])
def test_relays_that_trade_take_about_one_copy_from_upstream(count: int, most: float) -> None:
    """Without waiting for what peers have and announce, the bounds are missed: 1.1, 1.2 and 1.3 copies."""
    world, chunks = World(), chunks_of(128)
    origin, nodes = swarm(world, chunks, count, origin_rate=20 * SIZE)
    for node in nodes:
        node.want(manifest_of(chunks))
    assert world.run(60)
    copies = origin.sent_bytes / (len(chunks) * SIZE)
    assert 1.0 <= copies <= most
    assert all(node.kept == {chunk.hash for chunk in chunks} for node in nodes)


def test_an_announced_chunk_is_waited_for_but_not_for_ever() -> None:
    world, node, origin, *_ = following(
        Source(ORIGIN, ALL, maps=False), Source(B, set(), announces=hashes(10, 40)), peers=[B]
    )
    while not node.kept >= hashes(0, 10):
        world.step()
    started_s = world.now_s
    assert len(origin.asked) <= 15, "what the peer announces was fetched upstream at once"
    assert world.run(10)
    assert world.now_s - started_s > 0.3


def test_a_peer_much_slower_than_upstream_is_not_waited_for() -> None:
    world, _, origin, *_ = following(
        Source(ORIGIN, ALL, rate_bytes_s=200 * SIZE, maps=False), Source(B, set(ALL), rate_bytes_s=SIZE / 50), peers=[B]
    )
    assert world.run(20)
    assert len(origin.asked) >= 36


def test_source_alone_is_never_left_and_equal_sources_are_asked_once_for_each_chunk() -> None:
    world, node, source = following(Source(A, set(ALL), rate_bytes_s=SIZE))
    assert world.run(60)
    assert source.sent_bytes == len(CHUNKS) * SIZE
    assert node.scores.describe() == "no source has failed"
    world, _, *sources = following(Source(A, set(ALL)), Source(B, set(ALL)))
    assert world.run(30)
    assert sum(sum(source.asked.values()) for source in sources) == len(CHUNKS)


def test_a_chunk_at_a_source_that_stalls_is_fetched_from_the_other() -> None:
    """One chunk flies at a source that has stalled: an idle thread fetches it from the other."""
    world, node, stalled, other = following(*(Source(url, set(ALL), rate_bytes_s=10 * SIZE) for url in (A, B)))
    while not stalled.sending:
        world.step()
    stalled.rate_bytes_s = 0.0
    slow = {attempt.chunk.hash for attempt in stalled.sending}
    assert world.run(20)
    assert slow <= set(other.asked)
    world.step()  # what lost the race is called off at the next look
    assert not stalled.sending
    assert node.scheduler.progress()[0] == len(CHUNKS) * SIZE


@pytest.mark.parametrize("seed", range(8))
def test_the_only_chunk_at_a_source_that_stalls_is_fetched_from_an_unknown_one(seed: int) -> None:
    """As with a small delta: there is one chunk, and whoever was asked for it stalls."""
    stalls, other = Source(A, set(ALL), rate_bytes_s=0.0), Source(B, set(ALL))
    world, *_ = following(stalls, other, seed=seed, manifest=manifest_of(CHUNKS[:1]))
    assert world.run(5), "it waits for the source that stalls"


def test_the_last_resort_is_left_alone_while_relays_can_serve() -> None:
    world, _, relay, origin = following(Source(A, set()), Source(ORIGIN, set(ALL), maps=False), last_resort=[ORIGIN])
    for chunk in CHUNKS:  # the relay is filled while the client follows it
        relay.has.add(chunk.hash)
        for _ in range(5):
            world.step()
    assert world.run(10)
    assert not origin.asked


@pytest.mark.parametrize("trouble", ["dead", "corrupt", "lacking", "busy"])
def test_the_last_resort_helps_when_nobody_else_can(trouble: str) -> None:
    relay = Source(A, hashes(0, 10)) if trouble == "lacking" else Source(A, set(ALL), **{trouble: True})
    world, _, _, origin = following(relay, Source(ORIGIN, set(ALL), maps=False), last_resort=[ORIGIN])
    assert world.run(30)
    assert len(origin.asked) == (30 if trouble == "lacking" else 40)


def test_announced_chunk_is_waited_for_before_the_last_resort_is_asked() -> None:
    world, _, relay, origin = following(
        Source(A, set(), announces=set(ALL)), Source(ORIGIN, set(ALL), maps=False), last_resort=[ORIGIN]
    )
    assert not world.run(10)
    assert not origin.asked
    relay.has |= hashes(0, 20)
    assert world.run(30)
    assert set(origin.asked) == hashes(20, 40)


def test_a_relay_that_claims_what_it_does_not_have_is_dropped_with_a_reason() -> None:
    world, node, liar, honest = following(Source(A, set(), claims=set(ALL)), Source(B, set(ALL)))
    assert world.run(60)
    assert set(node.scores.usable()) == {B}
    assert f"{A} claims chunks that it does not deliver" in node.scores.describe()
    assert sum(liar.asked.values()) < 20
    assert set(honest.asked) == ALL


def test_a_relay_that_has_just_removed_a_version_is_not_a_liar() -> None:
    world, node, relay = following(Source(A, set(ALL), rate_bytes_s=10 * SIZE))
    while not relay.sending:
        world.step()
    relay.has.clear()
    assert not world.run(10)
    assert set(node.scores.usable()) == {A}


def test_a_source_that_is_always_busy_is_asked_ever_more_rarely() -> None:
    world, node, busy, *_ = following(Source(A, set(ALL), busy=True), Source(B, hashes(0, 39)))
    assert not world.run(60)
    assert set(node.scores.usable()) == {A, B}
    assert "busy" in node.scores.describe()
    assert sum(busy.asked.values()) < 60


TROUBLES: dict[str, dict[str, Any]] = {
    "none": {}, "dead": {"dead": True}, "corrupt": {"corrupt": True}, "busy": {"busy": True},
    "mapless": {"maps": False}, "slow": {"rate_bytes_s": SIZE / 100}, "claims": {"claims": hashes(0, 24)},
    "announces": {"announces": hashes(0, 24)},
}  # fmt: skip
KINDS = ["upstreams", "peers", "last_resort"]
OTHERS = st.tuples(st.sampled_from(KINDS), st.sampled_from(sorted(TROUBLES)), st.integers(0, 2**24 - 1))


@settings(max_examples=60, deadline=None)
@given(
    others=st.lists(OTHERS, max_size=5),
    honest=st.sampled_from([["upstreams"], ["upstreams", "upstreams"], ["upstreams", "peers"], ["last_resort"]]),
    seed=st.integers(0, 1000),
)
def test_whatever_others_do_the_honest_ones_suffice(others, honest, seed):
    """The honest sources together have every chunk; of the rest each is dead, slow, lying, lacking, or any of it."""
    world, chunks = World(), CHUNKS[:24]
    named: dict[str, list[str]] = {kind: [] for kind in KINDS}

    def add(kind: str, has: Sequence[Chunk], **trouble: Any) -> None:
        url = f"http://{kind}-{len(world.sources)}:1"
        world.add(Source(url, {chunk.hash for chunk in has}, **trouble))
        named[kind].append(url)

    for index, kind in enumerate(honest):
        add(kind, chunks[index :: len(honest)])
    for kind, trouble, mask in others:
        add(kind, [chunk for at, chunk in enumerate(chunks) if mask >> at & 1], **TROUBLES[trouble])
    node = Node(world, seed, **named)
    node.want(manifest_of(chunks))
    assert world.run(300), node.scores.describe()
    assert node.kept == {chunk.hash for chunk in chunks}
    assert all(attempt.cancelled for attempt in node.attempts if attempt.source)


ELEVEN = CHUNKS[:11]
PLACE = (0, 1)


def scheduler_of(*manifests: PolicyManifest) -> Scheduler:
    """Of these all is wanted, and none of it is on this disk."""
    scores = SourceScores([])
    scheduler = Scheduler(scores, 4, random.Random(0))
    for manifest in manifests:
        scheduler.want(manifest, offered(manifest), 0.0)
    while (attempt := scheduler.next_attempt(0.0)) is not None:
        scheduler.finish(attempt, False)
    scores.set_sources([A])
    return scheduler


def taken(scheduler: Scheduler) -> list[Chunk]:
    """What the scheduler fetches from A, in order."""
    found = []
    while (attempt := scheduler.next_attempt(0.5)) is not None:
        assert attempt.source == A
        found.append(attempt.chunk)
        scheduler.finish(attempt, True)
    return found


@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_exactly_those_chunks_are_asked_for_whose_bits_are_set(flags: list[bool]) -> None:
    """The least significant bit first; SOON, the second half, is no offer."""
    chunks = chunks_of(len(flags))
    half = sum(flag << index for index, flag in enumerate(flags)).to_bytes(-(-len(flags) // 8), "little")
    scheduler = scheduler_of(manifest_of(chunks))
    scheduler.update_map(A, PLACE, half + b"\xff" * len(half), 0.0, 0.0)
    asked = taken(scheduler)
    assert len(asked) == len(set(asked)) == sum(flags)
    assert set(asked) == {chunk for chunk, flag in zip(chunks, flags, strict=True) if flag}


def test_newer_versions_come_first_of_each_the_deltas_and_shared_chunks_are_looked_up_in_the_newer() -> None:
    base = PolicyRef(incarnation=0, version=0, digest="b" * 64)
    delta = Delta(base=base, size_bytes=2000, chunks=ELEVEN[2:4])
    old = manifest_of(ELEVEN[:2]).model_copy(update={"deltas": (delta,)})
    scheduler = scheduler_of(old, manifest_of(ELEVEN[4:8], version=2))
    for version, body in ((1, b"\xff\xff"), (2, b"\xff\xff")):
        scheduler.update_map(A, (0, version), body, 0.0, 0.0)
    asked = taken(scheduler)
    assert [set(asked[:4]), set(asked[4:6]), set(asked[6:])] == [set(ELEVEN[4:8]), set(ELEVEN[2:4]), set(ELEVEN[:2])]
    scheduler = scheduler_of(manifest_of(ELEVEN), manifest_of(ELEVEN[:3], version=2))
    scheduler.update_map(A, PLACE, bytes([255, 7, 0, 0]), 0.0, 0.0)
    scheduler.update_map(A, (0, 2), bytes([0, 0]), 0.0, 0.0)
    assert set(taken(scheduler)) == set(ELEVEN[3:])


def ask(source: ScriptedSource) -> bytes | None:
    with closing(Connection(source.url, StopToken())) as connection:
        return fetch_map(connection, MapRequest((2, 31), 11, 5, 2.5))


def test_map_request_names_version_and_count_and_a_map_of_wrong_size_is_refused_unread(lab: Lab) -> None:
    source = lab.source(says(b"abcd"))
    assert ask(source) == b"abcd"
    assert source.seen == ["/have/2.31?count=5&wait_s=2.5"]
    assert ask(lab.source(says(b"no such thing", 404))) is None
    for body, size in ((b"abc", 3), (b"", 1 << 40)):
        with pytest.raises(BroadcastError, match=f"{size} bytes"):
            ask(lab.source(says(body, size=size)))
