"""A run's versions as deltas: every one that is kept can be had from any earlier one, or from nothing, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.cast import KEY, RUN, Running, assert_content, make_downloader
from shoal.errors import BroadcastError, ManifestRefused
from shoal.protocol import PolicyManifest, TensorView
from shoal.shardcast import Content, Downloader, Origin, OriginSettings, Payload, Progress, delta, run_origin
from shoal.shardcast.manifest import offered
from shoal.shardcast.tree import chunk_key

Start = Callable[[Path], Running]
FILES = {"config.json": b"{}"}
VALUES = 5000


class Run:
    """Weights that change a little with every step, published."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.folder = folder
        chosen = OriginSettings.model_validate({"chunk_size_bytes": 1000, "delta_from_bytes": 0} | settings)
        self.origin = Origin(folder, RUN, KEY, settings=chosen)
        self._rng = np.random.default_rng(0)
        self._weights = self._rng.integers(0x3C00, 0x3D00, VALUES).astype(np.uint16)
        self.published: dict[int, tuple[PolicyManifest, list[TensorView]]] = {}

    def step(self, version: int, share: float = 0.01) -> PolicyManifest:
        self._weights = self._weights + (self._rng.random(VALUES) < share).astype(np.uint16)
        tensors = self.tensors()
        manifest = self.origin.publish(version, Content.of(FILES, tensors))
        self.published[version] = (manifest, tensors)
        return manifest

    def steps(self, count: int) -> list[PolicyManifest]:
        return [self.step(version) for version in range(1, count + 1)]

    def tensors(self) -> list[TensorView]:
        """Two tensors of bf16 and one of fp32 that never changes."""
        data = self._weights.tobytes()
        cut = 2 * 1200
        return [
            TensorView("first", "BF16", (40, 30), memoryview(data[:cut])),
            TensorView("second", "BF16", (VALUES - 1200,), memoryview(data[cut:])),
            TensorView("scale", "F32", (10,), memoryview(np.arange(10, dtype=np.float32).tobytes())),
        ]

    def check(self, payload: Payload) -> None:
        manifest, tensors = self.published[payload.manifest.policy.version]
        assert payload.manifest.policy == manifest.policy
        assert_content(payload, FILES, tensors)


def bases(manifest: PolicyManifest) -> list[int]:
    return [delta.base.version for delta in manifest.deltas]


def fetched(downloader: Downloader, manifest: PolicyManifest) -> tuple[Payload, Progress]:
    """The payload, and the last thing told about its fetch."""
    told: list[Progress] = []
    payload = downloader.fetch(manifest.policy, 20, told.append)
    return payload, told[-1]


def test_strides_and_anchors_follow_the_settings(tmp_path: Path) -> None:
    manifests = Run(tmp_path, anchor_every=6, kept_versions=3).steps(13)
    assert [manifest.policy.version for manifest in manifests if manifest.anchor] == [1, 7, 13]
    assert [bases(manifest) for manifest in manifests[:8]] == [[], [1], [2], [3, 2], [4], [5, 4], [6], [7]]


def test_the_next_version_costs_a_delta(tmp_path: Path, start_origin: Start) -> None:
    run = Run(tmp_path / "origin")
    first, second = run.steps(2)
    downloader = make_downloader([start_origin(run.folder).url], tmp_path / "client")
    run.check(fetched(downloader, first)[0])
    payload, last = fetched(downloader, second)
    run.check(payload)
    assert last.done_bytes == last.total_bytes == second.deltas[0].size_bytes < second.size_bytes / 20
    assert "policy 0.1, which is here and 1 delta" in last.route


def test_a_finished_run_offers_its_newest_versions_and_can_be_continued(tmp_path: Path, start_origin: Start) -> None:
    run = Run(tmp_path / "origin", anchor_every=4, kept_versions=5)
    manifests = run.steps(7)
    run.origin.keep_newest(2)
    assert run.origin.head().kept_versions == ("0.5", "0.6", "0.7"), "the newest, back to its anchor"
    used = sum(path.stat().st_size for path in (run.folder / "chunks").rglob("*") if path.is_file())
    assert manifests[-1].size_bytes <= used <= 2 * manifests[-1].size_bytes
    downloader = make_downloader([start_origin(run.folder).url], tmp_path / "client")
    run.check(fetched(downloader, manifests[-1])[0])
    assert bases(run.step(8)) == [7, 6], "what is kept can be told differences to"
    run.check(fetched(downloader, run.published[8][0])[0])
    downloader.forget()
    assert not list((tmp_path / "client").glob("*.bin"))
    run.check(fetched(downloader, run.published[8][0])[0])


def test_nothing_is_offered_that_is_not_there_and_nothing_stays_that_is_not_offered(tmp_path: Path) -> None:
    run = Run(tmp_path, anchor_every=4, kept_versions=2)
    manifests = run.steps(11)
    kept = [m for m in manifests if m.policy.label in run.origin.head().kept_versions]
    wanted = {chunk_key(chunk.hash) for manifest in kept for chunk in offered(manifest)}
    there = {path.relative_to(tmp_path).as_posix() for path in (tmp_path / "chunks").glob("??/*")}
    assert there == wanted
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "chunks", "manifests", "head.json"}


def test_a_delta_that_does_not_pay_is_not_offered(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.step(1)
    assert run.step(2, share=0.9).anchor is False  # one bit each: that pays
    rng = np.random.default_rng(1)
    noise = TensorView("first", "BF16", (VALUES,), memoryview(rng.bytes(2 * VALUES)))
    run.origin.publish(3, Content.of({}, [noise]))
    other = run.origin.publish(
        4, Content.of({}, [TensorView("first", "BF16", (VALUES,), memoryview(rng.bytes(2 * VALUES)))])
    )
    assert other.anchor
    assert other.deltas == ()


def test_no_version_costs_more_than_twice_its_payload_however_large_the_deltas_are(tmp_path, start_origin, monkeypatch):
    """Deltas of a tenth of the payload pay one by one; fifteen of them and the anchor cost more than two payloads."""
    monkeypatch.setattr("shoal.shardcast.origin.DELTA_STRIDES", ())
    run = Run(tmp_path / "origin")
    manifests = [run.step(version, share=0.5) for version in range(1, 17)]
    assert 0.05 < manifests[1].deltas[0].size_bytes / manifests[1].size_bytes < 0.6
    url = start_origin(run.folder).url
    for manifest in manifests[-5:]:
        _, last = fetched(make_downloader([url], tmp_path / manifest.policy.label), manifest)
        assert last.total_bytes <= 2 * manifest.size_bytes


def test_what_has_no_delta_is_an_anchor(tmp_path: Path) -> None:
    small = Run(tmp_path / "small", delta_from_bytes=1 << 20)  # an adapter
    assert all(manifest.anchor and not manifest.deltas for manifest in small.steps(3))
    run = Run(tmp_path / "run")
    run.steps(2)
    assert run.origin.publish(2, Content.of(FILES, run.tensors()), incarnation=1).anchor
    renamed = run.origin.publish(3, Content.of({"other.json": b"{}"}, run.tensors()), incarnation=1)
    assert renamed.anchor
    assert renamed.deltas == ()


@pytest.mark.parametrize("part", ["anchor", "delta"])
def test_a_base_damaged_on_the_origins_disk_is_not_used(tmp_path: Path, start_origin: Start, part: str) -> None:
    """After a crash: the new process hashes what the old one left."""
    run = Run(tmp_path / "origin")
    second = run.steps(2)[1]
    chunks = second.deltas[0].chunks if part == "delta" else run.published[1][0].chunks
    path = run.folder / chunk_key(chunks[0].hash)
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    run.origin = Origin(run.folder, RUN, KEY, settings=run.origin._settings)
    third = run.step(3)
    assert third.anchor
    assert third.deltas == ()
    if part == "delta":  # the anchor's damaged chunk would be offered again: it is the same
        run.check(make_downloader([start_origin(run.folder).url], tmp_path / "client").fetch(third.policy, 20))


def test_without_a_base_in_reach_a_version_is_an_anchor(tmp_path: Path, start_origin: Start) -> None:
    run = Run(tmp_path / "origin", anchor_every=8, kept_versions=1)
    third = run.steps(4)[2]
    (run.folder / chunk_key(third.deltas[0].chunks[0].hash)).unlink()
    fourth = run.published[4][0]
    (run.folder / chunk_key(fourth.deltas[0].chunks[0].hash)).unlink()
    (run.folder / chunk_key(fourth.deltas[1].chunks[0].hash)).unlink()
    fifth = run.step(5)
    assert fifth.anchor
    run.check(make_downloader([start_origin(run.folder).url], tmp_path / "client").fetch(fifth.policy, 20))


def test_a_fetch_of_deltas_goes_on_where_it_was_interrupted(tmp_path: Path, start_origin: Start) -> None:
    run = Run(tmp_path / "origin", chunk_size_bytes=64)
    first, second = run.steps(2)
    url = start_origin(run.folder).url
    make_downloader([url], tmp_path / "client").fetch(first.policy, 20)
    missing = run.folder / chunk_key(second.deltas[0].chunks[0].hash)
    hidden = missing.rename(tmp_path / "hidden")
    with pytest.raises(BroadcastError, match="1 chunks are missing"):
        make_downloader([url], tmp_path / "client").fetch(second.policy, 1)
    hidden.rename(missing)
    payload, last = fetched(make_downloader([url], tmp_path / "client"), second)
    run.check(payload)
    assert sum(last.by_source.values()) == second.deltas[0].chunks[0].size_bytes


def test_what_changed_is_told_tensor_by_tensor(tmp_path: Path, start_origin: Start) -> None:
    """Applied to the tensors of the version before, it gives the new ones: an engine needs no second copy."""
    run = Run(tmp_path / "origin")
    first, *_, fourth = run.steps(4)
    downloader = make_downloader([start_origin(run.folder).url], tmp_path / "client")
    before = downloader.fetch(first.policy, 20)
    bits = {t.name: np.frombuffer(bytearray(t.data), np.uint16) for t in before.tensors}
    payload = downloader.fetch(fourth.policy, 20)
    changes = payload.changes_from(first.policy)
    assert changes is not None
    for change in changes:
        assert change.width == 2
        assert change.where.size < VALUES / 10
        bits[change.name][change.where] = change.values
    assert {name: data.tobytes() for name, data in bits.items()} == {t.name: bytes(t.data) for t in payload.tensors}
    assert payload.changes_from(fourth.policy) is None
    assert before.changes_from(first.policy) is None


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_whatever_is_published_and_lost_between_a_client_ends_with_the_right_bytes(data, tmp_path_factory):
    """Any settings, any gaps in the numbers, any versions skipped by a client: bit for bit, or not offered."""
    folder = tmp_path_factory.mktemp("versions")
    run = Run(folder / "origin", anchor_every=data.draw(st.integers(1, 6)), kept_versions=data.draw(st.integers(1, 4)))
    running = Running(lambda stop, ready: run_origin(run.folder, "127.0.0.1", 0, stop, ready))
    downloader = make_downloader([running.url], folder / "client")
    version = 0
    try:
        for _ in range(data.draw(st.integers(1, 8))):
            version += data.draw(st.integers(1, 3))
            manifest = run.step(version, share=data.draw(st.sampled_from([0.0, 0.01, 0.7])))
            if data.draw(st.booleans()):
                run.check(downloader.fetch(manifest.policy, 20))
        run.check(downloader.fetch(manifest.policy, 20))
        run.check(make_downloader([running.url], folder / "newcomer").fetch(manifest.policy, 20))
    finally:
        running.end()


def test_a_large_payload_of_mixed_widths_goes_through_the_compiled_loops(tmp_path, start_origin, monkeypatch):
    monkeypatch.setattr(delta, "COMPILED_FROM_BYTES", 0)
    run = Run(tmp_path / "origin")
    odd = TensorView("odd", "U8", (3,), memoryview(bytes(range(3))))  # what follows lies at no multiple of two
    for version in range(1, 5):
        weights = np.arange(VALUES, dtype=np.int16) + (np.arange(VALUES) % 7 < version - 1)
        manifest = run.origin.publish(
            version, [odd, TensorView("w", "I16", (VALUES,), memoryview(weights.astype(np.int16).tobytes()))]
        )
    assert bases(manifest) == [3, 2]
    payload = make_downloader([start_origin(run.folder).url], tmp_path / "client").fetch(manifest.policy, 20)
    assert bytes(payload.tensors[1].data) == weights.astype(np.int16).tobytes()


# Files and folders


def publish_path(tmp_path: Path, path: Path) -> PolicyManifest:
    return Origin(tmp_path / "www", RUN, KEY).publish(1, path)


def test_a_file_that_changes_while_it_is_published_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1_000_000))
    content = Content.at(path)
    path.write_bytes(bytes(10))
    with pytest.raises(BroadcastError, match="was changed while"):
        Origin(tmp_path / "www", RUN, KEY).publish(1, content)
    assert Origin(tmp_path / "www", RUN, KEY).head() is None


def test_a_small_file_that_comes_or_goes_moves_no_large_one(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "large").write_bytes(np.random.default_rng(0).bytes(600_000))
    before = publish_path(tmp_path, folder)
    (folder / "a first small one").write_bytes(b"!")
    after = Origin(tmp_path / "www", RUN, KEY).publish(2, folder)
    assert after.chunks[:2] == before.chunks[:2]


def test_weights_that_come_back_can_be_fetched_from_nothing(tmp_path: Path, start_origin: Start) -> None:
    rng = np.random.default_rng(0)
    first = rng.integers(0x3C00, 0x3D00, VALUES).astype(np.uint16)
    second, third = first + (rng.random(VALUES) < 0.01), first + (rng.random(VALUES) < 0.02)
    origin = Origin(tmp_path / "www", RUN, KEY, settings=OriginSettings(delta_from_bytes=0))
    for version, bits in enumerate((first, second, first, second, third), 1):
        manifest = origin.publish(version, Content.of({"w": bits.astype(np.int16).tobytes()}))
    payload = make_downloader([start_origin(tmp_path / "www").url], tmp_path / "client").fetch(manifest.policy, 20)
    assert payload.files["w"] == third.astype(np.int16).tobytes()


def test_a_file_overwritten_while_it_is_published_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same size: it would be half old and half new, and every later delta would build on that."""
    path = tmp_path / "file"
    path.write_bytes(bytes(600_000))
    origin = Origin(tmp_path / "www", RUN, KEY)
    origin.publish(1, path)
    honest = Content.part

    def part(self: Content, offset: int, size: int, scratch: memoryview) -> memoryview:
        path.write_bytes(b"!" * 600_000)
        return honest(self, offset, size, scratch)

    monkeypatch.setattr(Content, "part", part)
    content = Content.at(path)
    with pytest.raises(BroadcastError, match="was changed while"):
        origin.publish(2, content)
    assert origin.head().policy.version == 1


def test_a_version_that_was_never_announced_is_no_version(tmp_path, start_origin, monkeypatch):
    run = Run(tmp_path / "origin")
    run.step(1)

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Origin, "_advance", crash)
    with pytest.raises(KeyboardInterrupt):
        run.step(2)
    monkeypatch.undo()
    second = run.step(2)  # other weights under the same number
    run.check(make_downloader([start_origin(run.folder).url], tmp_path / "client").fetch(second.policy, 20))


def test_a_publication_that_fails_leaves_nothing_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    run.step(1)
    before = sorted(path for path in tmp_path.rglob("*") if path.is_file())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shoal.shardcast.origin.Tree.sync_chunks", full)
    with pytest.raises(OSError, match="No space"):
        run.step(2)
    monkeypatch.undo()
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == before
    run.step(2)


def test_what_nobody_could_read_is_not_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    run.step(1)
    monkeypatch.setattr("shoal.shardcast.manifest.MAX_MANIFEST_BYTES", 500)
    with pytest.raises(ManifestRefused, match="at most 500"):
        run.origin.publish(2, Content.of({f"file-{number}": b"x" for number in range(30)}))
    monkeypatch.undo()
    assert run.origin.head().policy.version == 1
