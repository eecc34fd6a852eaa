"""A client that shares: verified spans of its own files, nothing else, and nothing that it has taken back."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from castkit import (
    KEY,
    RUN,
    Handler,
    Running,
    ScriptedSource,
    assert_content,
    chunk_paths,
    content,
    from_folder,
    instead,
    make_origin,
    manifest_path,
    publish,
    reply,
)

from shoal.protocol import Chunk, PolicyManifest
from shoal.runtime.stop import StopToken
from shoal.shardcast import Downloader
from shoal.shardcast.catalogue import PayloadCatalogue
from shoal.shardcast.connection import Connection, Deadline
from shoal.shardcast.server import run_share
from shoal.shardcast.tree import chunk_key, manifest_key

Scripted = Callable[[Handler], ScriptedSource]


class Sharing:
    """A version in one file, as a client has it on its disk, and the server that shares it."""

    def __init__(self, folder: Path) -> None:
        self.origin = folder / "origin"
        self.manifest = publish(make_origin(self.origin), 1)
        self.document = manifest_path(self.origin, self.manifest)
        self.part = folder / "payload.part"
        self.part.write_bytes(b"".join(path.read_bytes() for path in chunk_paths(self.origin, self.manifest)))
        self.catalogue = PayloadCatalogue()
        self.running = Running(partial(run_share, self.catalogue, "127.0.0.1", 0))

    def arrive(self, *indices: int) -> None:
        for index in indices:
            self.catalogue.arrived(self.manifest.chunks[index], self.part, index * self.manifest.chunk_size_bytes)

    def get(self, key: str) -> tuple[int, bytes]:
        connection = Connection(self.running.url, StopToken())
        answer = connection.get(f"/{key}", Deadline(15))
        body = connection.read(1 << 20, Deadline(15))
        connection.close()
        return answer.status, body

    def has(self, index: int) -> bool:
        """Whether this chunk is served; if it is, then with the right bytes."""
        chunk = self.manifest.chunks[index]
        status, body = self.get(chunk_key(chunk.hash))
        assert status == 404 or body == (self.origin / chunk_key(chunk.hash)).read_bytes()
        return status == 200


@pytest.fixture
def sharing(tmp_path: Path) -> Iterator[Sharing]:
    one = Sharing(tmp_path)
    yield one
    one.running.end()


def test_what_has_arrived_is_served_out_of_the_one_file(sharing: Sharing) -> None:
    assert sharing.get("have/0.1")[0] == 404
    sharing.catalogue.offer(sharing.manifest, sharing.document)
    assert sharing.get("have/0.1") == (200, bytes([0, 0]))
    assert not any(sharing.has(index) for index in range(5))
    sharing.arrive(1, 4)
    sharing.catalogue.fetching = lambda: {sharing.manifest.chunks[2].hash}
    assert sharing.get("have/0.1?count=1&wait_s=20") == (200, bytes([0b10010, 0b00100]))
    assert [sharing.has(index) for index in range(5)] == [False, True, False, False, True]
    assert sharing.get(manifest_key((0, 1))) == (200, sharing.document.read_bytes())


def test_only_what_a_manifest_offers_is_shared(sharing: Sharing) -> None:
    sharing.arrive(0)  # nobody has offered it
    sharing.catalogue.offer(sharing.manifest, sharing.document)
    assert not sharing.has(0)
    foreign = Chunk(hash="ab" * 32, size_bytes=10)
    sharing.catalogue.arrived(foreign, sharing.part, 0)
    for key in (chunk_key(foreign.hash), "head.json", "manifests/0.2.json", "payload.part", "../payload.part"):
        assert sharing.get(key)[0] == 404


def test_a_payload_that_is_no_anchor_is_not_offered(sharing: Sharing) -> None:
    hidden = PolicyManifest.model_construct(**{**dict(sharing.manifest), "anchor": False})
    sharing.catalogue.offer(hidden, sharing.document)
    sharing.arrive(0, 1)
    assert not sharing.has(0)
    assert sharing.get("have/0.1") == (200, b"")


def test_a_renamed_file_is_served_on_and_a_withdrawn_one_is_not(sharing: Sharing) -> None:
    sharing.catalogue.offer(sharing.manifest, sharing.document)
    sharing.arrive(0, 1, 2, 3, 4)
    whole = sharing.part.with_suffix(".bin")
    sharing.part.rename(whole)
    assert not sharing.has(0)  # between the two: not found, and asked for again
    sharing.catalogue.moved(sharing.part, whole)
    assert all(sharing.has(index) for index in range(5))
    sharing.catalogue.withdraw(whole)
    assert not any(sharing.has(index) for index in range(5))
    assert sharing.get("have/0.1") == (200, bytes([0, 0]))
    sharing.catalogue.offer(sharing.manifest, sharing.document)  # again is harmless
    sharing.part = whole
    sharing.arrive(3)
    assert sharing.has(3)


def test_a_version_goes_with_its_manifest(sharing: Sharing) -> None:
    sharing.catalogue.offer(sharing.manifest, sharing.document)
    sharing.arrive(0)
    sharing.catalogue.withdraw(sharing.document)
    assert sharing.get("have/0.1")[0] == 404
    assert sharing.get(manifest_key((0, 1)))[0] == 404
    assert not sharing.has(0)


def test_health_and_metrics_tell_what_is_shared(sharing: Sharing) -> None:
    sharing.catalogue.offer(sharing.manifest, sharing.document)
    sharing.arrive(0, 1)
    health = json.loads(sharing.get("health")[1])
    assert (health["role"], health["versions"], health["chunks"]) == ("client", ["0.1"], 2)
    assert b"shoal_cast_chunks 2" in sharing.get("metrics")[1]


def test_a_peer_fetches_from_a_sharing_client_what_its_relay_does_not_give(
    tmp_path: Path, sharing: Sharing, scripted: Scripted
) -> None:
    sharing.catalogue.offer(sharing.manifest, sharing.document)
    sharing.arrive(0, 1, 2, 3, 4)
    bare = scripted(instead(from_folder(sharing.origin), {"/chunks/": missing}))
    downloader = Downloader(
        [bare.url], RUN, KEY.public_key, tmp_path / "cache", StopToken(), peers=[sharing.running.url]
    )
    assert_content(downloader.fetch(sharing.manifest.policy, 20), *content(1))
    downloader.close()


def missing(target: str, to: socket.socket) -> None:
    reply(to, 404, b"")
