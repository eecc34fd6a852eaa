"""Publishing: atomic, idempotent, bounded, and retention that never breaks what is kept."""

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit import Patch, TempPaths
from kit.cast import KEY, OTHER_KEY, RUN, Lab, chunk_paths, chunks_in, content, manifest_path
from kit.forged import write
from shoal.errors import ManifestRefused, PolicyMismatch
from shoal.protocol import LedgerHead, PolicyManifest, TensorView
from shoal.runtime.clock import ManualClock
from shoal.shardcast import Content, Origin, OriginSettings, digest_of
from shoal.shardcast.manifest import manifest_hash, read_manifest
from shoal.shardcast.tree import HEAD, Tree


def stamps(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def is_whole(lab: Lab, *manifests: PolicyManifest) -> bool:
    """Whether exactly these versions' chunks are there, of their sizes."""
    sizes = [path.stat().st_size for one in manifests for path in chunk_paths(lab.www, one)]
    assert sizes == [chunk.size_bytes for one in manifests for chunk in one.chunks]
    return chunks_in(lab.www) == {chunk.hash for one in manifests for chunk in one.chunks}


def offers(lab: Lab, *labels: str) -> bool:
    head = lab.origin().head()
    return head is not None and head.kept_versions == labels and head.policy.label == labels[-1]


def test_publication_is_a_tree_of_plain_files(lab: Lab) -> None:
    origin = Origin(lab.www, RUN, KEY, ManualClock(5000), OriginSettings(chunk_size_bytes=1000))
    ledger = LedgerHead(run=RUN, index=7, hash="c" * 64)
    files, tensors = content()
    manifest = origin.publish(3, Content.of(files, tensors), ledger_head=ledger)
    data = (lab.www / "manifests" / "0.3.json").read_bytes()
    assert read_manifest(data, RUN, KEY.public_key) == manifest
    assert (manifest.ledger_head, manifest.created_at_ms) == (ledger, 5000)
    assert manifest.policy.digest == digest_of(files, tensors, 1000)
    whole = b"".join(path.read_bytes() for path in chunk_paths(lab.www, manifest))
    assert whole.startswith(bytes(tensors[0].data))
    assert len(whole) == manifest.size_bytes
    head = origin.head()
    assert (head.policy, head.kept_versions) == (manifest.policy, ("0.3",))
    assert head.manifest_hash == manifest_hash(data)


def test_republishing_is_harmless_and_other_content_is_an_error(lab: Lab) -> None:
    first = lab.publish(1)
    before = stamps(lab.www)
    assert lab.publish(1) == first
    with pytest.raises(PolicyMismatch, match=r"policy 0\.1 is already published .* new incarnation"):
        lab.publish(1, seed=99)
    assert stamps(lab.www) == before
    assert lab.publish(1, seed=99, incarnation=1).policy.label == "1.1"


class Power:
    """It goes out in a call of `Tree`: the so-manyth one whose first argument suits, before or after it is done."""

    def __init__(self, patch: Patch, name: str, key: str | None = None, number: int = 1, after: bool = False) -> None:
        self.left, real = number, getattr(Tree, name)

        def call(tree: Tree, *arguments: Any, **options: Any) -> Any:
            if after:
                real(tree, *arguments, **options)
            self.left -= key is None or arguments[0].startswith(key)
            if self.left == 0:
                raise KeyboardInterrupt
            return None if after else real(tree, *arguments, **options)

        patch.setattr(Tree, name, call)


CRASHES: dict[str, dict[str, Any]] = {
    "third chunk": {"name": "put_chunk", "number": 3}, "sync": {"name": "sync_chunks"},
    "manifest": {"name": "write", "key": "manifests/"}, "head": {"name": "write", "key": HEAD},
}  # fmt: skip


@pytest.mark.parametrize("step", CRASHES)
def test_a_crash_at_any_step_leaves_the_version_before_served(lab: Lab, monkeypatch: Patch, step: str) -> None:
    first = lab.publish(1)
    served = (lab.www / HEAD).read_bytes()
    with monkeypatch.context() as patch:
        Power(patch, **CRASHES[step])
        with pytest.raises(KeyboardInterrupt):
            lab.publish(2)
    assert (lab.www / HEAD).read_bytes() == served
    assert all(path.exists() for path in chunk_paths(lab.www, first))
    second = lab.publish(2)  # a new process continues
    assert offers(lab, "0.1", "0.2")
    assert is_whole(lab, first, second)


@pytest.mark.parametrize("step", ["remove_manifest", "remove_chunks_except"])
def test_crash_while_old_versions_are_removed_keeps_all_offered_ones(lab, monkeypatch: Patch, step: str):
    lab.publish(1, keep_versions=1)
    with monkeypatch.context() as patch:
        Power(patch, step, after=True)
        with pytest.raises(KeyboardInterrupt):
            lab.publish(2, keep_versions=1)
    assert offers(lab, "0.2")
    offered = read_manifest((lab.www / "manifests" / "0.2.json").read_bytes(), RUN, KEY.public_key)
    assert all(path.exists() for path in chunk_paths(lab.www, offered))
    assert is_whole(lab, lab.publish(3, keep_versions=1))


@settings(max_examples=15, deadline=None)
@given(seeds=st.lists(st.integers(0, 3), min_size=1, max_size=8), kept=st.integers(1, 3))
def test_any_history_leaves_exactly_the_kept_versions_complete(tmp_path_factory: TempPaths, seeds, kept):
    lab = Lab(tmp_path_factory.mktemp("origin"))
    manifests = [lab.publish(version, seed, keep_versions=kept) for version, seed in enumerate(seeds)]
    assert is_whole(lab, *manifests[-kept:])
    assert offers(lab, *(one.policy.label for one in manifests[-kept:]))
    assert not any(manifest_path(lab.www, old).exists() for old in manifests[:-kept])


def test_a_damaged_manifest_stops_the_removal_of_chunks_not_the_publication(lab: Lab) -> None:
    first = lab.publish(1, keep_versions=2)
    manifest_path(lab.www, first).write_bytes(b"torn")
    lab.publish(2, keep_versions=2)
    assert all(path.exists() for path in chunk_paths(lab.www, first))
    assert offers(lab, "0.1", "0.2")


def test_a_version_behind_the_head_that_is_not_kept_is_signed_but_not_served(lab: Lab) -> None:
    first, _ = lab.publish(1, keep_versions=1), lab.publish(2, keep_versions=1)
    assert lab.publish(1, keep_versions=1).policy == first.policy
    assert not manifest_path(lab.www, first).exists()
    assert offers(lab, "0.2")


def test_a_new_incarnation_follows_the_old_one(lab: Lab) -> None:
    lab.publish(4)
    assert lab.publish(5).parent_version == 4
    assert lab.publish(3, seed=8, incarnation=1).parent_version is None
    assert offers(lab, "0.4", "0.5", "1.3")


def test_next_publication_sweeps_half_written_files_away_and_another_key_cannot_publish(lab: Lab) -> None:
    lab.publish(1)
    torn = lab.www / "chunks" / "ab" / ".abcd.1234"
    write(torn, b"half")
    lab.publish(2)
    assert not torn.exists()
    with pytest.raises(ManifestRefused, match="not trusted"):
        lab.origin(OTHER_KEY).publish(2, Content.of({"file": b"theirs"}))


def test_publishing_holds_one_chunk_in_memory_not_the_payload(lab: Lab) -> None:
    size = 64 << 20
    data = memoryview(bytes(size))
    views = [TensorView(f"w{index}", "U8", (size // 8 - 3,), data[: size // 8 - 3]) for index in range(8)]
    origin = Origin(lab.www, RUN, KEY, settings=OriginSettings(chunk_size_bytes=256 * 1024))
    tracemalloc.start()
    try:
        origin.publish(0, Content.of({}, views))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20, "32 chunks of 256 KiB; what other threads of this process allocate meanwhile counts too"
