"""What the published package falls over (one idle connection, a dead relay, a flipped byte, a removed shard, two relays
out of step), done to ours: each ends with the right bytes."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from kit import eventually
from kit.cast import DEAD, WITHIN_S, Lab, ask, dial, flip, from_folder, head_version, is_complete
from shoal.errors import VersionNotFound
from shoal.shardcast.tree import chunk_key, manifest_key

IDLE = 40


@contextmanager
def idle_connections(url: str, words: bytes) -> Iterator[None]:
    """Clients that connect and say nothing, or not enough, or never read."""
    with ExitStack() as stack:
        for _ in range(IDLE):
            stack.enter_context(dial(url, words))
        yield


@pytest.mark.parametrize("words", [b"", b"GET /chunks/", b"GET /head.json?wait_s=60 HTTP/1.1\r\n\r\n", b"never reads"])
def test_idle_connections_block_nobody(lab: Lab, words: bytes) -> None:
    manifest, origin = lab.publish(1), lab.honest()
    relay = lab.relay("relay", origin.url)
    if words == b"never reads":
        words = b"GET /%s HTTP/1.1\r\n\r\n" % chunk_key(manifest.chunks[0].hash).encode() * 50
    with idle_connections(origin.url, words), idle_connections(relay.url, words):
        lab.fetch(manifest, origin.url)
        lab.fetch(manifest, relay.url, name="other")


def test_dead_sources_in_the_list_do_not_matter(lab: Lab) -> None:
    manifest = lab.publish(1)
    client = lab.client(DEAD, "http://does-not-exist.invalid:1", lab.honest().url)
    assert client.newest(WITHIN_S) == manifest.policy
    lab.fetch(manifest, client)
    lab.fetch(manifest, lab.relay("relay", DEAD, lab.honest().url).url, name="other")


def test_a_relay_that_dies_in_the_middle_does_not_matter(lab: Lab) -> None:
    manifest = lab.publish(1)
    honest = from_folder(lab.www)

    def dies(target: str, to: socket.socket) -> None:
        if len(dying.seen) > 3:
            dying.close()
            to.shutdown(socket.SHUT_RDWR)
        else:
            honest(target, to)

    dying = lab.source(dies)
    lab.fetch(manifest, dying.url, lab.honest().url)


@pytest.mark.parametrize("what", ["flipped", "gone", "restarted"])
def test_chunks_damaged_on_a_relays_disk_are_fetched_again(lab: Lab, what: str) -> None:
    """From somebody else by its client, who notices; by the relay itself where it can tell, or is started again."""
    manifest, origin = lab.publish(1), lab.honest()
    relay, folder = lab.relay("relay", origin.url), lab.folder / "relay"
    eventually(lambda: is_complete(relay, "0.1"))
    if what == "restarted":
        lab.stop(relay)
    if what != "gone":
        flip(folder / chunk_key(manifest.chunks[2].hash))
    (folder / chunk_key(manifest.chunks[3].hash)).write_bytes(b"short")
    (folder / chunk_key(manifest.chunks[1].hash)).unlink()
    if what == "restarted":
        relay = lab.relay("relay", origin.url)
    lab.fetch(manifest, relay.url, *([origin.url] if what == "flipped" else []))
    eventually(lambda: is_complete(relay, "0.1"))


def test_a_version_that_retention_removes_in_the_middle_is_said_to_be_gone(lab: Lab) -> None:
    manifest = lab.publish(1)
    honest = from_folder(lab.www)

    def removes(target: str, to: socket.socket) -> None:
        if manifest.chunks[-1].hash in target and (lab.www / manifest_key((0, 1))).exists():
            for version in range(2, 9):
                lab.publish(version)
        honest(target, to)

    with pytest.raises(VersionNotFound, match="no longer offered"):
        lab.client(lab.source(removes).url).fetch(manifest.policy, WITHIN_S)


def test_two_relays_out_of_step_hold_nobody_up(lab: Lab) -> None:
    """One has stopped at version 1, the other goes on; every version that anybody has can be fetched from both."""
    first, upstream = lab.publish(1), lab.honest()
    behind, ahead = lab.relay("behind", upstream.url), lab.relay("ahead", lab.honest().url)
    eventually(lambda: is_complete(behind, "0.1"))
    lab.stop(upstream)
    second, third = lab.publish(2), lab.publish(3)
    eventually(lambda: head_version(ahead) == "0.3")
    for manifest in (second, third, first):
        client = lab.client(behind.url, ahead.url, name=f"client-{manifest.policy.label}")
        assert client.newest(WITHIN_S) == third.policy
        lab.fetch(manifest, client)
    assert head_version(behind) == "0.1"
    assert ask(behind.url, f"/{manifest_key((0, 3))}")[0] == 404
