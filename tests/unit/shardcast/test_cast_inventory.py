"""Maps of what is here, and the choice of what a relay mirrors: pure, so checked against the plainest way to say it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol import Chunk, Delta, PolicyManifest, PolicyRef
from shoal.shardcast.manifest import Place, select_versions, size_of
from shoal.shardcast.server import Inventory

NAMES = "abcdefghij"


def chunk(name: str, size: int = 10) -> Chunk:
    return Chunk(hash=name.encode().hex().rjust(64, "0"), size_bytes=size)


def bits(data: bytes) -> list[int]:
    return [byte >> bit & 1 for byte in data for bit in range(8)]


@given(
    chunks=st.lists(st.sampled_from(NAMES), max_size=30),
    here=st.sets(st.sampled_from(NAMES)),
    arriving=st.lists(st.sampled_from(NAMES)),
    soon=st.sets(st.sampled_from(NAMES)),
)
def test_the_maps_say_of_each_position_whether_its_chunk_is_here_or_coming(chunks, here, arriving, soon):
    inventory = Inventory([chunk(name) for name in chunks], {chunk(name).hash for name in here})
    for name in arriving:
        before = inventory.count
        is_new = name in chunks and name not in here
        assert inventory.add(chunk(name).hash) is is_new
        assert (inventory.count > before) is is_new
        here = here | {name}
    body = inventory.body({chunk(name).hash for name in soon})
    width = -(-len(chunks) // 8)
    padding = [0] * (8 * width - len(chunks))
    assert bits(body[:width]) == [int(name in here) for name in chunks] + padding
    assert bits(body[width:]) == [int(name in soon and name not in here) for name in chunks] + padding
    assert inventory.count == sum(name in here for name in chunks)
    assert inventory.complete is all(name in here for name in chunks)


def manifest(version: int, payload: str, deltas: str = "", size: int = 10) -> PolicyManifest:
    """A version of 10-byte chunks named by letters; an anchor unless it has deltas."""
    digest, parts = f"{version:064x}", tuple(chunk(name, size) for name in deltas)
    base = PolicyRef(incarnation=0, version=version - 1, digest=digest)
    return PolicyManifest(
        run="r", policy=PolicyRef(incarnation=0, version=version, digest=digest), entries=(), chunk_size_bytes=size,
        chunks=tuple(chunk(name, size) for name in payload), size_bytes=size * len(payload), anchor=not deltas,
        deltas=(Delta(base=base, size_bytes=size * len(parts), chunks=parts),) if deltas else (), created_at_ms=0,
    )  # fmt: skip


def versions(*manifests: PolicyManifest) -> dict[Place, PolicyManifest | None]:
    return {(0, one.policy.version): one for one in manifests}


def numbers(places: frozenset[Place]) -> list[int]:
    return sorted(version for _, version in places)


CHAIN = versions(
    manifest(1, "abcd"),  # 40 bytes
    manifest(2, "abce", deltas="u"),
    manifest(3, "abcf", deltas="v"),
    manifest(4, "mnop"),  # 40 bytes
    manifest(5, "mnoq", deltas="x"),
)


def test_the_oldest_go_first_and_nothing_is_kept_without_its_anchor() -> None:
    assert numbers(select_versions(CHAIN, 3, 110).mirrored) == [1, 2, 3, 4, 5]
    for budget in (109, 60, 50):  # version 3 would fit, but nobody could reach it
        selection = select_versions(CHAIN, 3, budget)
        assert numbers(selection.mirrored) == [4, 5]
        assert numbers(selection.wanted) == [1, 2, 3, 4, 5]
        assert selection.fits


def test_a_route_that_does_not_fit_is_told_and_what_fits_is_mirrored_newest_first() -> None:
    selection = select_versions(CHAIN, 3, 49)
    assert (selection.fits, selection.route_bytes) == (False, 50)
    assert numbers(selection.mirrored) == [2, 3, 5]  # no anchor fits beside them
    grown = versions(manifest(1, "abcd"), manifest(2, "efghij"))
    assert numbers(select_versions(grown, 2, 50).mirrored) == [1]  # what was here already stays


def test_a_manifest_not_known_yet_is_wanted_and_ends_the_route_for_now() -> None:
    unknown = {**CHAIN, (0, 4): None}
    selection = select_versions(unknown, 1, 50)
    assert numbers(selection.wanted) == [4, 5]
    assert (selection.fits, selection.route_bytes) == (True, 10)


@given(count=st.integers(1, 6), budget=st.integers(1, 130))
def test_a_selection_never_exceeds_its_budget(count: int, budget: int) -> None:
    selection = select_versions(CHAIN, count, budget)
    assert size_of(CHAIN[place] for place in selection.mirrored) <= budget
    assert selection.mirrored <= selection.wanted
    assert selection.fits is (budget >= 50)
