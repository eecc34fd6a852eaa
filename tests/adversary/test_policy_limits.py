"""A policy that is larger than it may be: it takes neither disk nor memory, whatever it claims."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from liarkit import KEY, RUN, Lab, head_of, lab_in, sign, tree, write

from shoal.errors import ManifestRefused, ResourceError
from shoal.protocol import Entry, PolicyManifest, PolicyRef, content_digest
from shoal.runtime.limits import MachineLimits, folder_bytes
from shoal.runtime.stop import StopToken
from shoal.shardcast import Downloader, DownloadSettings
from shoal.shardcast.content import chunk_of
from shoal.shardcast.tree import HEAD, chunk_key, manifest_key

MIB = 2**20


@pytest.fixture
def lab(tmp_path: Path):
    with lab_in(tmp_path) as made:
        yield made


def repeating(folder: Path, chunk_bytes: int, times: int) -> PolicyManifest:
    """A published version whose payload is one chunk of zeros, again and again."""
    data = bytes(chunk_bytes)
    chunks = (chunk_of(memoryview(data)),) * times
    size = chunk_bytes * times
    entries = (Entry(name="w", type="tensor", offset=0, size_bytes=size, dtype="U8", shape=(size,)),)
    ref = PolicyRef(incarnation=0, version=0, digest=content_digest(entries, chunk_bytes, chunks))
    manifest = PolicyManifest(
        run=RUN, policy=ref, entries=entries, chunk_size_bytes=chunk_bytes, chunks=chunks, size_bytes=size,
        created_at_ms=1,
    )  # fmt: skip
    signed = sign(manifest)
    write(folder / chunk_key(chunks[0].hash), data)
    write(folder / manifest_key((0, 0)), signed)
    write(folder / HEAD, sign(head_of(manifest, signed)))
    return manifest


def client(lab: Lab, url: str, name: str, **settings: object) -> Downloader:
    return Downloader([url], RUN, KEY.public_key, lab.folder / name, StopToken(), DownloadSettings(**settings))


def test_one_chunk_that_repeats_writes_no_more_than_was_announced(lab):
    manifest = repeating(lab.folder / "www", MIB, 64)
    source = lab.source(tree(lab.folder / "www"))
    client(lab, source.url, "unlimited").fetch(manifest.policy, 30)
    assert folder_bytes(lab.folder / "unlimited") >= 64 * MIB  # by 1 MiB of traffic
    with pytest.raises(ManifestRefused, match=r"announces 67108864 bytes, and .* at most 8388608"):
        client(lab, source.url, "announced", max_payload_bytes=8 * MIB).fetch(manifest.policy, 30)
    with pytest.raises(ResourceError, match=r"policy 0\.0 needs 0\.0671 GB of disk, and 0\.02 GB are allowed"):
        client(lab, source.url, "limited", limits=MachineLimits(disk_bytes=20 * 10**6)).fetch(manifest.policy, 30)
    assert folder_bytes(lab.folder / "announced") + folder_bytes(lab.folder / "limited") < MIB
    assert len(source.asked("chunks/")) == 1


def test_four_terabytes_are_refused_by_default(lab, monkeypatch):
    manifest = repeating(lab.folder / "www", 64 * MIB, 65_536)
    source = lab.source(tree(lab.folder / "www"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=10**12))
    with pytest.raises(ResourceError, match="the disk is full"):
        client(lab, source.url, "cache", limits=MachineLimits()).fetch(manifest.policy, 30)
    assert source.asked("chunks/") == []
