"""Routes, always the cheapest of those that are open; maps of what is here; what a relay mirrors. All of it pure."""

from collections.abc import Collection
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import VersionNotFound
from shoal.protocol import Chunk, Delta, PolicyManifest, PolicyRef
from shoal.shardcast.lookup import Route, Step, find_route
from shoal.shardcast.manifest import Place, kept_places, select_versions, size_of
from shoal.shardcast.server import Inventory

FULL = 1000


def ref(version: int) -> PolicyRef:
    return PolicyRef(incarnation=0, version=version, digest=f"{version:064x}")


def manifest(version: int, anchor: bool = False, **sizes: int) -> PolicyManifest:
    """`_3=20` is a delta of 20 bytes from version 3."""
    deltas = tuple(
        Delta(base=ref(int(base[1:])), size_bytes=size, chunks=(Chunk(hash="0" * 64, size_bytes=size),))
        for base, size in sizes.items()
    )
    return PolicyManifest(
        run="run", policy=ref(version), entries=(), chunk_size_bytes=FULL, chunks=(), size_bytes=FULL,
        anchor=anchor, deltas=deltas, created_at_ms=0,
    )  # fmt: skip


class Web:
    """Versions and their manifests; counts what is asked for."""

    def __init__(self, *manifests: PolicyManifest) -> None:
        self._known = {found.policy.version: found for found in manifests}
        self.asked: list[int] = []

    def manifest_of(self, wanted: PolicyRef) -> PolicyManifest | None:
        self.asked.append(wanted.version)
        return self._known.get(wanted.version)

    def route(self, target: int, held: Collection[int] = (), closed: Collection[str] = ()) -> Route:
        here = {ref(version).digest for version in held}
        return find_route(self._known[target], here, self.manifest_of, closed)


def versions(route: Route) -> list[int]:
    return [route.begin.version, *(step.manifest.policy.version for step in route.steps)]


WEB = (
    manifest(8, anchor=True), manifest(9, _8=10), manifest(10, _9=10, _8=15), manifest(11, _10=10),
    manifest(12, anchor=True, _11=10, _10=15, _8=30),
)  # fmt: skip


def test_route_begins_at_an_anchor_or_a_held_version_and_avoids_closed_and_missing_steps() -> None:
    web = Web(*WEB)
    route = web.route(12)
    assert (versions(route), route.whole, web.asked) == ([12], WEB[-1], [])
    step = Step(WEB[-1], WEB[-1].deltas[0])
    assert versions(Web(*WEB).route(12, held=[11], closed=[step.name])) == [12]
    assert versions(Web(*WEB).route(12, closed=[ref(12).digest])) in ([8, 12], [8, 10, 12])
    web = Web(manifest(1, anchor=True), manifest(3, anchor=True, _2=10))
    assert versions(web.route(3, held=[1])) == [3]
    with pytest.raises(VersionNotFound, match="no route"):
        Web(manifest(3, _2=10)).route(3, held=[1])


@st.composite
def webs(draw: st.DrawFn) -> tuple[list[PolicyManifest], set[int]]:
    count = draw(st.integers(1, 7))
    found = []
    for version in range(count):
        bases = draw(st.sets(st.integers(0, version - 1), max_size=3)) if version else set()
        sizes = {f"_{base}": draw(st.integers(1, 700)) for base in sorted(bases)}
        found.append(manifest(version, anchor=draw(st.booleans()) or not sizes, **sizes))
    return found, draw(st.sets(st.integers(0, count - 1), max_size=2)) - {count - 1}


def cheapest(found: list[PolicyManifest], held: set[int], version: int) -> int:
    """By trying everything."""
    if version in held:
        return 0
    here = found[version]
    routes = [cheapest(found, held, delta.base.version) + delta.size_bytes for delta in here.deltas]
    return min([*routes, *([FULL] if here.anchor else [])])


@given(webs())
def test_the_route_is_the_cheapest_there_is(web: tuple[list[PolicyManifest], set[int]]) -> None:
    found, held = web
    route = Web(*found).route(len(found) - 1, held)
    assert route.size_bytes == cheapest(found, held, len(found) - 1)
    assert route.steps == () or route.steps[0].delta.base == route.begin
    assert all(step.delta.base == before.manifest.policy for before, step in pairwise(route.steps))


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(1, 10))
def test_every_version_kept_is_reached_from_an_anchor_that_is_kept(flags: list[bool], count: int) -> None:
    anchors = {(0, version): flag or version == 0 for version, flag in enumerate(flags)}
    kept = kept_places(anchors, count)
    places = sorted(anchors)
    assert set(places[-count:]) <= kept
    assert sorted(kept) == places[-len(kept) :]
    assert anchors[min(kept)]


def test_weights_that_come_back_are_not_walked_through_twice() -> None:
    """A B A B C: the route to C begins with the first B, and no delta is taken twice."""

    def named(version: int) -> PolicyRef:
        return PolicyRef(incarnation=0, version=version, digest=" ababc"[version] * 64)

    def at(found: PolicyRef) -> PolicyManifest:
        version = found.version
        chunk = Chunk(hash="0" * 64, size_bytes=10)
        deltas = () if version == 1 else (Delta(base=named(version - 1), size_bytes=10, chunks=(chunk,)),)
        return manifest(version, anchor=version == 1).model_copy(update={"policy": found, "deltas": deltas})

    route = find_route(at(named(5)), set(), at)
    assert len({step.name for step in route.steps}) == len(route.steps)
    assert [step.manifest.policy.digest[0] for step in route.steps] == ["b", "c"]


NAMES = "abcdefghij"


def named(name: str, size: int = 10) -> Chunk:
    return Chunk(hash=name.encode().hex().rjust(64, "0"), size_bytes=size)


def bits(data: bytes) -> list[int]:
    return [byte >> bit & 1 for byte in data for bit in range(8)]


@given(
    chunks=st.lists(st.sampled_from(NAMES), max_size=30), here=st.sets(st.sampled_from(NAMES)),
    arriving=st.lists(st.sampled_from(NAMES)), soon=st.sets(st.sampled_from(NAMES)),
)  # fmt: skip
def test_maps_have_bits_for_present_and_for_coming_chunks(chunks, here, arriving, soon):
    inventory = Inventory([named(name) for name in chunks], {named(name).hash for name in here})
    for name in arriving:
        before = inventory.count
        is_new = name in chunks and name not in here
        assert inventory.add(named(name).hash) is is_new
        assert (inventory.count > before) is is_new
        here = here | {name}
    body = inventory.body({named(name).hash for name in soon})
    width = -(-len(chunks) // 8)
    padding = [0] * (8 * width - len(chunks))
    assert bits(body[:width]) == [int(name in here) for name in chunks] + padding
    assert bits(body[width:]) == [int(name in soon and name not in here) for name in chunks] + padding
    assert inventory.count == sum(name in here for name in chunks)
    assert inventory.complete is all(name in here for name in chunks)


def lettered(version: int, payload: str, deltas: str = "", size: int = 10) -> PolicyManifest:
    """A version of 10-byte chunks named by letters; an anchor unless it has deltas."""
    parts = tuple(named(name, size) for name in deltas)
    found = () if not parts else (Delta(base=ref(version - 1), size_bytes=size * len(parts), chunks=parts),)
    fields = {"chunks": tuple(named(name, size) for name in payload), "size_bytes": size * len(payload)}
    return manifest(version, not deltas).model_copy(update={**fields, "deltas": found})


def by_place(*manifests: PolicyManifest) -> dict[Place, PolicyManifest | None]:
    return {(0, one.policy.version): one for one in manifests}


def numbers(places: frozenset[Place]) -> list[int]:
    return sorted(version for _, version in places)


CHAIN = by_place(
    lettered(1, "abcd"),  # 40 bytes
    lettered(2, "abce", deltas="u"),
    lettered(3, "abcf", deltas="v"),
    lettered(4, "mnop"),  # 40 bytes
    lettered(5, "mnoq", deltas="x"),
)


def test_oldest_versions_are_removed_first_and_the_route_that_does_not_fit_is_reported() -> None:
    assert numbers(select_versions(CHAIN, 3, 110).mirrored) == [1, 2, 3, 4, 5]
    for budget in (109, 60, 50):  # version 3 would fit, but nobody could reach it
        selection = select_versions(CHAIN, 3, budget)
        assert numbers(selection.mirrored) == [4, 5]
        assert numbers(selection.wanted) == [1, 2, 3, 4, 5]
        assert selection.fits
    selection = select_versions(CHAIN, 3, 49)
    assert (selection.fits, selection.route_bytes) == (False, 50)
    assert numbers(selection.mirrored) == [2, 3, 5]  # no anchor fits beside them
    grown = by_place(lettered(1, "abcd"), lettered(2, "efghij"))
    assert numbers(select_versions(grown, 2, 50).mirrored) == [1]  # what was here already stays
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
