"""The shelf of engines: one fetch per policy, a bounded number of copies, and never other weights than promised."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.engines.scripted import ScriptedEngine
from shoal.engines.shelf import EngineShelf
from shoal.errors import PolicyMismatch, ResourceError, VersionNotFound
from shoal.protocol import PolicyManifest, PolicyRef, TensorView
from shoal.shardcast import Payload


def ref(version: int, digest: str = "a") -> PolicyRef:
    return PolicyRef(incarnation=0, version=version, digest=digest * 64)


class Source:
    """Publishes every version asked for, with `files`; counts fetches and engines built."""

    def __init__(self) -> None:
        self.fetched: list[int] = []
        self.built = 0
        self.files: dict[str, bytes] = {}
        self.publishes: PolicyRef | None = None

    def fetch(self, wanted: PolicyRef, deadline_s: float) -> Payload:
        self.fetched.append(wanted.version)
        if wanted.version > 90:
            raise VersionNotFound("no such version")
        manifest = PolicyManifest(
            run="r", policy=self.publishes or wanted, entries=(), chunk_size_bytes=1, chunks=(), size_bytes=0,
            created_at_ms=0,
        )  # fmt: skip
        data = memoryview(np.full(1, wanted.version, dtype="<f4")).cast("B")
        return Payload(manifest, self.files, [TensorView("w", "F32", (1,), data)])

    def build(self, files: object) -> ScriptedEngine:
        self.built += 1
        return ScriptedEngine()


def test_a_policy_is_fetched_once_and_in_place() -> None:
    source = Source()
    shelf = EngineShelf(source.fetch, source.build, held=2)
    first = shelf.get(ref(1), 1)
    assert shelf.get(ref(1), 1) is first
    assert first.engine.policy == ref(1)
    assert source.fetched == [1]


def test_the_least_lately_used_goes_and_its_engine_is_used_again() -> None:
    source = Source()
    shelf = EngineShelf(source.fetch, source.build, held=2)
    one, two = shelf.get(ref(1), 1), shelf.get(ref(2), 1)
    shelf.get(ref(1), 1)
    three = shelf.get(ref(3), 1)
    assert three.engine is two.engine
    assert three.engine.policy == ref(3)
    assert shelf.get(ref(1), 1) is one
    shelf.get(ref(2), 1)
    assert source.fetched == [1, 2, 3, 2]
    assert source.built == 2


def test_another_model_gets_another_engine() -> None:
    source = Source()
    shelf = EngineShelf(source.fetch, source.build, held=1)
    shelf.get(ref(1), 1)
    source.files = {"config.json": b"{}"}
    assert shelf.get(ref(2), 1).files == {"config.json": b"{}"}
    assert source.built == 2


@pytest.mark.parametrize("published", [ref(1, "b"), ref(2)])
def test_weights_that_were_not_promised_are_never_loaded(published: PolicyRef) -> None:
    source = Source()
    source.publishes = published
    shelf = EngineShelf(source.fetch, source.build, held=1)
    with pytest.raises(PolicyMismatch, match=r"policy 0\.1 was promised"):
        shelf.get(ref(1), 1)
    assert source.built == 0


def test_a_failed_fetch_leaves_the_shelf_as_it_was() -> None:
    source = Source()
    shelf = EngineShelf(source.fetch, source.build, held=1)
    one = shelf.get(ref(1), 1)
    with pytest.raises(VersionNotFound):
        shelf.get(ref(99), 1)
    assert shelf.get(ref(1), 1) is one


def test_where_memory_does_not_suffice_fewer_policies_are_held() -> None:
    source, room = Source(), 2

    def build(files: object) -> ScriptedEngine:
        if source.built == room:
            raise MemoryError
        return source.build(files)

    shelf = EngineShelf(source.fetch, build, held=3)
    first, _second = shelf.get(ref(1), 1), shelf.get(ref(2), 1)
    third = shelf.get(ref(3), 1)
    assert third.engine is first.engine, "the least lately used one made room"
    assert shelf.get(ref(4), 1).engine.policy == ref(4)
    assert source.built == 2


def test_a_policy_that_does_not_fit_alone_is_said_so_and_other_failures_are_passed_on() -> None:
    def full(_files: object) -> ScriptedEngine:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    with pytest.raises(ResourceError, match=r"policy 0\.1 .* does not fit into the memory .* \(--device\)"):
        EngineShelf(Source().fetch, full, held=3).get(ref(1), 1)

    def broken(_files: object) -> ScriptedEngine:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        EngineShelf(Source().fetch, broken, held=3).get(ref(1), 1)
