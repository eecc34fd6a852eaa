"""What the published package falls over (one idle connection, a dead relay, a flipped byte, a removed shard, two relays
out of step), done to ours: each ends with the right bytes."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kit.liar import DEAD, WITHIN_S, Lab, assert_files, eventually, files_of, get, head_version, health, tree
from shoal.errors import BroadcastError, VersionNotFound
from shoal.shardcast.tree import chunk_key, manifest_key

IDLE = 40


@contextmanager
def idle_connections(url: str, count: int, first_words: bytes = b"") -> Iterator[None]:
    """Clients that connect and say nothing, or not enough."""
    host, port = url.removeprefix("http://").split(":")
    with ExitStack() as stack:
        for _ in range(count):
            connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=5))
            connection.sendall(first_words)
        yield


@pytest.mark.parametrize("words", [b"", b"GET /chunks/", b"GET /head.json?wait_s=60 HTTP/1.1\r\n\r\n"])
def test_idle_connections_block_nobody(lab: Lab, words: bytes) -> None:
    manifest = lab.publish(1)
    origin = lab.honest()
    relay = lab.relay("relay", origin.url)
    with idle_connections(origin.url, IDLE, words), idle_connections(relay.url, IDLE, words):
        assert_files(lab.client(origin.url).fetch(manifest.policy, WITHIN_S), files_of(1))
        assert_files(lab.client(relay.url, name="other").fetch(manifest.policy, WITHIN_S), files_of(1))


def test_a_client_that_never_reads_blocks_nobody(lab: Lab) -> None:
    manifest = lab.publish(1)
    origin = lab.honest()
    asks = b"GET /%s HTTP/1.1\r\n\r\n" % chunk_key(manifest.chunks[0].hash).encode() * 50
    with idle_connections(origin.url, IDLE, asks):
        assert_files(lab.client(origin.url).fetch(manifest.policy, WITHIN_S), files_of(1))


def test_dead_sources_in_the_list_do_not_matter(lab: Lab) -> None:
    manifest = lab.publish(1)
    client = lab.client(DEAD, "http://does-not-exist.invalid:1", lab.honest().url)
    assert client.newest(WITHIN_S) == manifest.policy
    assert_files(client.fetch(manifest.policy, WITHIN_S), files_of(1))
    relay = lab.relay("relay", DEAD, lab.honest().url)
    assert_files(lab.client(relay.url, name="other").fetch(manifest.policy, WITHIN_S), files_of(1))


def test_a_relay_that_dies_in_the_middle_does_not_matter(lab: Lab) -> None:
    manifest = lab.publish(1)
    honest = tree(lab.www)
    served = []

    def dies(target: str, to: socket.socket) -> None:
        served.append(target)
        if len(served) > 3:
            dying.close()
            to.shutdown(socket.SHUT_RDWR)
        else:
            honest(target, to)

    dying = lab.source(dies)
    assert_files(lab.client(dying.url, lab.honest().url).fetch(manifest.policy, WITHIN_S), files_of(1))


@pytest.mark.parametrize("damage", ["flipped", "removed"])
def test_a_chunk_damaged_on_one_relays_disk_is_fetched_from_somebody_else(lab: Lab, damage: str) -> None:
    manifest, origin, relay = whole_relay(lab)
    path = lab.folder / "relay" / chunk_key(manifest.chunks[2].hash)
    path.unlink() if damage == "removed" else flip(path)
    assert_files(lab.client(relay.url, origin.url).fetch(manifest.policy, WITHIN_S), files_of(1))


def test_a_relay_started_again_mends_what_rotted_on_its_disk(lab: Lab) -> None:
    manifest, origin, relay = whole_relay(lab)
    lab.stop(relay)
    flip(lab.folder / "relay" / chunk_key(manifest.chunks[2].hash))
    (lab.folder / "relay" / chunk_key(manifest.chunks[3].hash)).write_bytes(b"short")
    relay = lab.relay("relay", origin.url)
    assert_files(lab.client(relay.url).fetch(manifest.policy, WITHIN_S), files_of(1))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def whole_relay(lab: Lab) -> tuple[Any, Any, Any]:
    """A version, its origin, and a relay that has all of it."""
    manifest, origin = lab.publish(1), lab.honest()
    relay = lab.relay("relay", origin.url)
    eventually(lambda: head_version(relay.url) == "0.1" and health(relay.url)["missing_chunks"] == 0)
    return manifest, origin, relay


def test_a_chunk_that_everybody_has_removed_ends_in_words_not_in_a_loop(lab: Lab) -> None:
    manifest = lab.publish(1)
    (lab.www / chunk_key(manifest.chunks[2].hash)).unlink()
    with pytest.raises(BroadcastError, match="does not have chunk"):
        lab.client(lab.honest().url).fetch(manifest.policy, 2)


def test_a_version_that_retention_removes_in_the_middle_is_said_to_be_gone(lab: Lab) -> None:
    manifest = lab.publish(1)
    honest = tree(lab.www)

    def removes(target: str, to: socket.socket) -> None:
        if manifest.chunks[-1].hash in target and (lab.www / manifest_key((0, 1))).exists():
            for version in range(2, 9):
                lab.publish(version)
        honest(target, to)

    with pytest.raises(VersionNotFound, match="no longer offered"):
        lab.client(lab.source(removes).url).fetch(manifest.policy, WITHIN_S)


def test_two_relays_out_of_step_hold_nobody_up(lab: Lab) -> None:
    """One has stopped at version 1, the other goes on; every version that anybody has can be fetched from both."""
    first = lab.publish(1)
    switch = [tree(lab.www)]
    cut_off = lab.source(lambda target, to: switch[0](target, to))
    behind, ahead = lab.relay("behind", cut_off.url), lab.relay("ahead", lab.honest().url)
    eventually(lambda: head_version(behind.url) == "0.1" and health(behind.url)["missing_chunks"] == 0)
    switch[0] = lambda target, to: to.close()
    versions = [lab.publish(version) for version in (2, 3)]
    eventually(lambda: head_version(ahead.url) == "0.3")
    for number, manifest in ((2, versions[0]), (3, versions[1]), (1, first)):
        client = lab.client(behind.url, ahead.url, name=f"client-{number}")
        assert client.newest(WITHIN_S) == versions[1].policy
        assert_files(client.fetch(manifest.policy, WITHIN_S), files_of(number))
    assert head_version(behind.url) == "0.1"
    assert get(behind.url, f"/{manifest_key((0, 3))}")[0] == 404
