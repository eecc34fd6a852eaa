"""A run's versions as deltas: every one that is kept can be had from any earlier one, or from nothing, bit for bit."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit import Patch, TempPaths
from kit.cast import Lab, chunks_in, flip, lab_in
from shoal.errors import BroadcastError, ManifestRefused
from shoal.protocol import PolicyManifest, TensorView
from shoal.shardcast import Content, Origin, Progress, delta
from shoal.shardcast.manifest import offered
from shoal.shardcast.tree import Tree, chunk_key

FILES = {"config.json": b"{}"}
VALUES = 5000


class Run:
    """Weights that change a little with every step, published: two tensors of bf16, one of fp32 that never changes."""

    def __init__(self, lab: Lab, **settings: Any) -> None:
        self.lab, self.www = lab, lab.www
        self._settings = {"chunk_size_bytes": 1000, "delta_from_bytes": 0} | settings
        self._rng = np.random.default_rng(0)
        self._weights = self._rng.integers(0x3C00, 0x3D00, VALUES).astype(np.uint16)

    def step(self, version: int, share: float = 0.01, **others: Any) -> PolicyManifest:
        self._weights = self._weights + (self._rng.random(VALUES) < share).astype(np.uint16)
        data, cut = self._weights.tobytes(), 2 * 1200
        tensors = [
            TensorView("first", "BF16", (40, 30), memoryview(data[:cut])),
            TensorView("second", "BF16", (VALUES - 1200,), memoryview(data[cut:])),
            TensorView("scale", "F32", (10,), memoryview(np.arange(10, dtype=np.float32).tobytes())),
        ]
        return self.lab.publish(version, **{"files": FILES, "tensors": tensors, **self._settings, **others})

    def steps(self, count: int, share: float = 0.01) -> list[PolicyManifest]:
        return [self.step(version, share) for version in range(1, count + 1)]

    def told(self, manifest: PolicyManifest, url: str, name: str = "cache") -> Progress:
        """Fetch it; the last thing told about that."""
        told: list[Progress] = []
        client = self.lab.client(url, name=name)
        client.fetch(manifest.policy, 20, told.append)
        self.lab.fetch(manifest, client)
        return told[-1]

    def head(self) -> Any:
        return self.lab.origin().head()

    def chunk(self, manifest: PolicyManifest) -> Path:
        """The first chunk of its delta."""
        return self.www / chunk_key(manifest.deltas[0].chunks[0].hash)


@pytest.fixture
def run(lab: Lab) -> Run:
    return Run(lab)


def bases(manifest: PolicyManifest) -> list[int]:
    return [delta.base.version for delta in manifest.deltas]


def noise(seed: int, name: str = "first") -> TensorView:
    return TensorView(name, "BF16", (VALUES,), memoryview(np.random.default_rng(seed).bytes(2 * VALUES)))


def test_strides_and_anchors_follow_the_settings(lab: Lab) -> None:
    manifests = Run(lab, anchor_every=6, keep_versions=3).steps(13)
    assert [manifest.policy.version for manifest in manifests if manifest.anchor] == [1, 7, 13]
    assert [bases(manifest) for manifest in manifests[:8]] == [[], [1], [2], [3, 2], [4], [5, 4], [6], [7]]


def test_the_next_version_costs_a_delta(run: Run, lab: Lab) -> None:
    first, second = run.steps(2)
    url = lab.honest().url
    lab.fetch(first, url)
    last = run.told(second, url)
    assert last.done_bytes == last.total_bytes == second.deltas[0].size_bytes < second.size_bytes / 20
    assert "the local policy 0.1 and 1 delta" in last.route


def test_a_finished_run_offers_its_newest_versions_and_can_be_continued(lab: Lab) -> None:
    run = Run(lab, anchor_every=4, keep_versions=5)
    newest = run.steps(7)[-1]
    lab.origin().keep_newest(2)
    assert run.head().versions == ("0.5", "0.6", "0.7"), "the newest, back to its anchor"
    used = sum(path.stat().st_size for path in (run.www / "chunks").rglob("*") if path.is_file())
    assert newest.size_bytes <= used <= 2 * newest.size_bytes
    client = lab.client(lab.honest().url)
    lab.fetch(newest, client)
    following = run.step(8)
    assert bases(following) == [7, 6], "what is kept can be told differences to"
    lab.fetch(following, client)
    client.forget()
    assert not list((lab.folder / "cache").glob("*.bin"))
    lab.fetch(following, client)


def test_version_without_a_small_delta_is_an_anchor(run: Run, lab: Lab) -> None:
    run.step(1)
    assert run.step(2, share=0.9).anchor is False  # one bit each: that pays
    alone = [
        lab.publish(3, tensors=[noise(1)], delta_from_bytes=0),  # of another shape
        lab.publish(4, tensors=[noise(2)], delta_from_bytes=0),  # all of it has changed
        run.step(5, delta_from_bytes=1 << 20),  # an adapter
        run.step(6, files={"other.json": b"{}"}),
    ]
    assert [(one.anchor, one.deltas) for one in alone] == [(True, ())] * 4
    assert run.step(6, incarnation=1, files={"other.json": b"{}"}).anchor


def test_route_of_large_deltas_costs_at_most_twice_the_payload(run: Run, lab: Lab, monkeypatch):
    """Deltas of a tenth of the payload pay one by one; fifteen of them and the anchor cost more than two payloads."""
    monkeypatch.setattr("shoal.shardcast.origin.DELTA_STRIDES", ())
    manifests = run.steps(16, share=0.5)
    assert 0.05 < manifests[1].deltas[0].size_bytes / manifests[1].size_bytes < 0.6
    url = lab.honest().url
    for manifest in manifests[-5:]:
        assert run.told(manifest, url, manifest.policy.label).total_bytes <= 2 * manifest.size_bytes


@pytest.mark.parametrize("part", ["anchor", "delta", "missing"])
def test_a_base_damaged_on_the_origins_disk_is_not_used(run: Run, lab: Lab, part: str) -> None:
    """After a crash: the new process hashes what the old one left."""
    first, second = run.steps(2)
    if part == "missing":
        run.chunk(second).unlink()
    else:
        flip(run.chunk(second) if part == "delta" else run.www / chunk_key(first.chunks[0].hash), 40)
    third = run.step(3)
    assert (third.anchor, third.deltas) == (True, ())
    if part != "anchor":  # its damaged chunk would be offered again: it is the same
        lab.fetch(third, lab.honest().url)


def test_damaged_payload_of_a_version_that_is_no_anchor_is_made_again(run: Run, lab: Lab) -> None:
    second, url = run.steps(2)[1], lab.honest().url
    lab.fetch(second, url, download={"kept_payloads": 1})
    flip(lab.folder / "cache" / f"{second.policy.digest}.bin")
    lab.fetch(second, url, download={"kept_payloads": 1})


def test_changes_are_listed_by_tensor(run: Run, lab: Lab) -> None:
    """Applied to the tensors of the version before, it gives the new ones: an engine needs no second copy."""
    first, *_, fourth = run.steps(4)
    client = lab.client(lab.honest().url)
    before, payload = lab.fetch(first, client), lab.fetch(fourth, client)
    bits = {t.name: np.frombuffer(bytearray(t.data), np.uint16) for t in before.tensors}
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
def test_client_ends_with_the_right_bytes_for_any_versions_and_losses(data, tmp_path_factory: TempPaths):
    """Any settings, any gaps in the numbers, any versions skipped by a client: bit for bit, or not offered."""
    with lab_in(tmp_path_factory.mktemp("versions")) as lab:
        run = Run(lab, anchor_every=data.draw(st.integers(1, 6)), keep_versions=data.draw(st.integers(1, 4)))
        url, version, offers = lab.honest().url, 0, dict[str, set[str]]()
        client = lab.client(url)
        for _ in range(data.draw(st.integers(1, 8))):
            version += data.draw(st.integers(1, 3))
            manifest = run.step(version, share=data.draw(st.sampled_from([0.0, 0.01, 0.7])))
            offers[manifest.policy.label] = {chunk.hash for chunk in offered(manifest)}
            assert chunks_in(run.www) == set().union(*(offers[label] for label in run.head().versions))
            if data.draw(st.booleans()):
                lab.fetch(manifest, client)
        lab.fetch(manifest, client)
        lab.fetch(manifest, url, name="newcomer")


def test_a_large_payload_of_mixed_widths_goes_through_the_compiled_loops(lab: Lab, monkeypatch: Patch) -> None:
    monkeypatch.setattr(delta, "COMPILED_FROM_BYTES", 0)
    odd = TensorView("odd", "U8", (3,), memoryview(bytes(range(3))))  # what follows lies at no multiple of two
    for version in range(1, 5):
        weights = (np.arange(VALUES) + (np.arange(VALUES) % 7 < version - 1)).astype(np.int16)
        view = TensorView("w", "I16", (VALUES,), memoryview(weights.tobytes()))
        manifest = lab.publish(version, tensors=[odd, view], delta_from_bytes=0)
    assert bases(manifest) == [3, 2]
    lab.fetch(manifest, lab.honest().url)


def test_a_small_file_that_comes_or_goes_moves_no_large_one(lab: Lab) -> None:
    folder = lab.folder / "folder"
    folder.mkdir()
    (folder / "large").write_bytes(np.random.default_rng(0).bytes(600_000))
    before = lab.origin().publish(1, folder)
    (folder / "a first small one").write_bytes(b"!")
    assert lab.origin().publish(2, folder).chunks[:600] == before.chunks


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_file_that_changes_while_it_is_published_is_noticed(lab: Lab, monkeypatch: Patch, when: str) -> None:
    """Of the same size: it would be half old and half new, and every later delta would build on that."""
    path, honest = lab.folder / "file", Content.part
    path.write_bytes(bytes(600_000))
    lab.origin().publish(1, path)
    content = Content.at(path)

    def part(self: Content, offset: int, size: int, scratch: memoryview) -> memoryview:
        path.write_bytes(b"!" * 600_000)
        return honest(self, offset, size, scratch)

    if when == "before":
        path.write_bytes(bytes(10))
    else:
        monkeypatch.setattr(Content, "part", part)
    with pytest.raises(BroadcastError, match="was changed while"):
        lab.origin().publish(2, content)
    assert lab.origin().head().policy.version == 1


def step_fails(run: Run, monkeypatch: Patch, where: Any, what: str, error: BaseException) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(where, what, Mock(side_effect=error))
        with pytest.raises(type(error)):
            run.step(2)


def test_a_version_that_was_never_announced_is_no_version(run: Run, lab: Lab, monkeypatch: Patch) -> None:
    run.step(1)
    step_fails(run, monkeypatch, Origin, "_advance", KeyboardInterrupt())
    lab.fetch(run.step(2), lab.honest().url)  # other weights under the same number


def test_a_publication_that_fails_leaves_nothing_on_the_disk(run: Run, monkeypatch: Patch) -> None:
    run.step(1)
    before = sorted(path for path in run.www.rglob("*") if path.is_file())
    step_fails(run, monkeypatch, Tree, "sync_chunks", OSError(28, "No space left on device"))
    assert sorted(path for path in run.www.rglob("*") if path.is_file()) == before
    run.step(2)


def test_unreadable_manifest_is_not_announced(run: Run, lab: Lab, monkeypatch: Patch) -> None:
    run.step(1)
    with monkeypatch.context() as patch:
        patch.setattr("shoal.shardcast.manifest.MAX_MANIFEST_BYTES", 500)
        with pytest.raises(ManifestRefused, match="at most 500"):
            lab.publish(2, files={f"file-{number}": b"x" for number in range(30)})
    assert run.head().policy.version == 1
