"""Publishing: atomic, idempotent, bounded, and retention that never breaks what is kept."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.cast import CHUNK, KEY, OTHER_KEY, RUN, chunk_paths, content, make_origin, manifest_path, publish
from shoal.errors import ManifestRefused, PolicyMismatch
from shoal.protocol import LedgerHead, TensorView
from shoal.runtime.clock import ManualClock
from shoal.shardcast import Content, Origin, OriginSettings, digest_of
from shoal.shardcast.manifest import manifest_hash, read_manifest
from shoal.shardcast.tree import HEAD, Tree


def all_chunks(folder: Path) -> set[str]:
    return {path.name for path in (folder / "chunks").glob("??/*")}


def test_what_is_published_is_a_tree_of_plain_files(tmp_path: Path) -> None:
    origin = Origin(tmp_path, RUN, KEY, ManualClock(5000), OriginSettings(chunk_size_bytes=CHUNK))
    ledger = LedgerHead(run=RUN, index=7, hash="c" * 64)
    files, tensors = content()
    manifest = origin.publish(3, Content.of(files, tensors), ledger_head=ledger)
    data = (tmp_path / "manifests" / "0.3.json").read_bytes()
    assert read_manifest(data, RUN, KEY.public_key) == manifest
    assert manifest.ledger_head == ledger
    assert manifest.created_at_ms == 5000
    assert manifest.policy.digest == digest_of(files, tensors, CHUNK)
    whole = b"".join(path.read_bytes() for path in chunk_paths(tmp_path, manifest))
    assert whole.startswith(bytes(tensors[0].data))
    assert len(whole) == manifest.size_bytes
    head = origin.head()
    assert (head.policy, head.kept_versions) == (manifest.policy, ("0.3",))
    assert head.manifest_hash == manifest_hash(data)


def test_the_same_version_again_changes_nothing(tmp_path: Path) -> None:
    origin = make_origin(tmp_path)
    first = publish(origin, 1)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"}
    assert publish(origin, 1) == first
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"}
    assert after == before


def test_the_same_version_with_other_content_is_an_error_and_leaves_no_trace(tmp_path: Path) -> None:
    origin = make_origin(tmp_path)
    first = publish(origin, 1)
    before = all_chunks(tmp_path)
    with pytest.raises(PolicyMismatch, match=r"policy 0\.1 is already published .* new incarnation"):
        publish(origin, 1, seed=99)
    assert all_chunks(tmp_path) == before
    assert publish(origin, 1) == first
    assert publish(origin, 1, seed=99, incarnation=1).policy.label == "1.1"


@pytest.mark.parametrize("step", ["put_chunk", "sync_chunks", "manifest", "head"])
def test_a_crash_at_any_step_leaves_the_version_before_served(tmp_path, monkeypatch, step):
    origin = make_origin(tmp_path)
    first = publish(origin, 1)
    served = (tmp_path / HEAD).read_bytes()
    written = 0

    def crash_in_the_third(self: Tree, chunk_hash: str, data: memoryview, durable: bool) -> None:
        nonlocal written
        written += 1
        if written == 3:
            raise KeyboardInterrupt
        real_put(self, chunk_hash, data, durable)

    def crash_at_key(self: Tree, key: str, data: bytes) -> None:
        if (key == HEAD) == (step == "head"):
            raise KeyboardInterrupt
        real_write(self, key, data)

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    real_put, real_write = Tree.put_chunk, Tree.write
    with monkeypatch.context() as patch:
        if step in ("manifest", "head"):
            patch.setattr(Tree, "write", crash_at_key)
        else:
            patch.setattr(Tree, step, crash_in_the_third if step == "put_chunk" else crash)
        with pytest.raises(KeyboardInterrupt):
            publish(origin, 2)
    assert (tmp_path / HEAD).read_bytes() == served
    assert all(path.exists() for path in chunk_paths(tmp_path, first))
    again = make_origin(tmp_path)  # a new process continues
    second = publish(again, 2)
    head = again.head()
    assert (head.policy, head.kept_versions) == (second.policy, ("0.1", "0.2"))
    assert all(path.exists() for path in chunk_paths(tmp_path, second))


def test_retention_removes_old_versions_and_only_their_own_chunks(tmp_path: Path) -> None:
    origin = make_origin(tmp_path, kept=2)
    manifests = [publish(origin, version, seed=version // 2) for version in range(5)]  # 0=1, 2=3: shared chunks
    assert not any(manifest_path(tmp_path, old).exists() for old in manifests[:3])
    for kept in manifests[3:]:
        assert manifest_path(tmp_path, kept).exists()
        assert all(path.exists() for path in chunk_paths(tmp_path, kept))
    assert all_chunks(tmp_path) == {chunk.hash for kept in manifests[3:] for chunk in kept.chunks}
    assert origin.head().kept_versions == ("0.3", "0.4")


@settings(max_examples=15, deadline=None)
@given(seeds=st.lists(st.integers(0, 3), min_size=1, max_size=8), kept=st.integers(1, 3))
def test_every_kept_version_is_whole_after_any_history(tmp_path_factory, seeds, kept):
    folder = tmp_path_factory.mktemp("origin")
    origin = make_origin(folder, kept=kept)
    manifests = [publish(origin, version, seed) for version, seed in enumerate(seeds)]
    for manifest in manifests[-kept:]:
        sizes = [path.stat().st_size for path in chunk_paths(folder, manifest)]
        assert sizes == [chunk.size_bytes for chunk in manifest.chunks]
    assert all_chunks(folder) == {chunk.hash for manifest in manifests[-kept:] for chunk in manifest.chunks}


@pytest.mark.parametrize("step", ["remove_manifest", "remove_chunks_except"])
def test_a_crash_while_old_versions_are_removed_breaks_nothing_that_the_head_offers(tmp_path, monkeypatch, step):
    origin = make_origin(tmp_path, kept=1)
    publish(origin, 1)
    real = getattr(Tree, step)

    def crash_after(self: Tree, argument: object) -> None:
        real(self, argument)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Tree, step, crash_after)
        with pytest.raises(KeyboardInterrupt):
            publish(origin, 2)
    assert origin.head().kept_versions == ("0.2",)
    offered = read_manifest((tmp_path / "manifests" / "0.2.json").read_bytes(), RUN, KEY.public_key)
    assert all(path.exists() for path in chunk_paths(tmp_path, offered))
    third = publish(origin, 3)
    assert all_chunks(tmp_path) == {chunk.hash for chunk in third.chunks}


def test_a_damaged_manifest_stops_the_removal_of_chunks_not_the_publication(tmp_path: Path) -> None:
    origin = make_origin(tmp_path, kept=2)
    first = publish(origin, 1)
    manifest_path(tmp_path, first).write_bytes(b"torn")
    second = publish(origin, 2)
    assert all(path.exists() for path in chunk_paths(tmp_path, first))
    assert origin.head().policy == second.policy


def test_a_version_behind_the_head_that_is_not_kept_is_signed_but_not_served(tmp_path: Path) -> None:
    origin = make_origin(tmp_path, kept=1)
    first, second = publish(origin, 1), publish(origin, 2)
    assert publish(origin, 1).policy == first.policy
    assert not manifest_path(tmp_path, first).exists()
    assert origin.head().policy == second.policy


def test_a_new_incarnation_follows_the_old_one(tmp_path: Path) -> None:
    origin = make_origin(tmp_path)
    publish(origin, 4)
    assert publish(origin, 5).parent_version == 4
    renewed = publish(origin, 3, seed=8, incarnation=1)
    assert renewed.parent_version is None
    head = origin.head()
    assert (head.policy, head.kept_versions) == (renewed.policy, ("0.4", "0.5", "1.3"))


def test_half_written_files_of_a_crash_are_swept_away(tmp_path: Path) -> None:
    origin = make_origin(tmp_path)
    publish(origin, 1)
    torn = tmp_path / "chunks" / "ab" / ".abcd.1234"
    torn.parent.mkdir(exist_ok=True)
    torn.write_bytes(b"half")
    publish(origin, 2)
    assert not torn.exists()


def test_publishing_holds_one_chunk_in_memory_not_the_payload(tmp_path: Path) -> None:
    size = 64 << 20
    data = memoryview(bytes(size))
    views = [TensorView(f"w{index}", "U8", (size // 8 - 3,), data[: size // 8 - 3]) for index in range(8)]
    origin = Origin(tmp_path, RUN, KEY, settings=OriginSettings(chunk_size_bytes=256 * 1024))
    tracemalloc.start()
    try:
        origin.publish(0, Content.of({}, views))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20, "32 chunks of 256 KiB; what other threads of this process allocate meanwhile counts too"


def test_another_key_cannot_continue_a_tree(tmp_path: Path) -> None:
    publish(make_origin(tmp_path), 1)
    with pytest.raises(ManifestRefused, match="not trusted"):
        publish(make_origin(tmp_path, key=OTHER_KEY), 2)
