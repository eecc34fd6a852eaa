"""Chunks that are not what they should be. A liar alone ends in a named error; beside somebody honest it costs a retry.

Each attack is tried on a client and on a relay. A relay must in addition never pass on what it was given.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kit import TempPaths, cast, eventually
from kit.forged import ENDLESS, endings, hanging_up
from shoal.errors import BroadcastError, ChunkCorrupt, VersionNotFound
from shoal.protocol import PolicyManifest
from shoal.shardcast.manifest import offered
from shoal.shardcast.tree import chunk_key, manifest_key


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def mislabelled(data: bytes, folder: Path) -> bytes:
    """Another chunk of the same version, of the same size, whole and valid in itself."""
    others = (path.read_bytes() for path in sorted((folder / "chunks").glob("??/*")))
    return next((other for other in others if len(other) == len(data) and other != data), b"x" * len(data))


def drip(to: socket.socket, data: bytes) -> None:
    for byte in data:
        to.sendall(bytes([byte]))
        threading.Event().wait(0.05)  # the drip itself


def head_of(size: int) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n" % size


Lie = Callable[[socket.socket, bytes, Path], object]  # given the true bytes, and the tree
ATTACKS: dict[str, tuple[Lie, type[BroadcastError], str]] = {
    "corrupt": (lambda to, data, _: cast.reply(to, 200, flipped(data)), ChunkCorrupt, "sent bytes that are not chunk"),
    "mislabelled": (lambda to, data, folder: cast.reply(to, 200, mislabelled(data, folder)), ChunkCorrupt,
        "sent bytes that are not chunk"),
    "shorter": (lambda to, data, _: cast.reply(to, 200, data[:-1]), ChunkCorrupt, "bytes as chunk"),
    "huge": (lambda to, *_: ENDLESS["huge body"]("", to), ChunkCorrupt, "offers 1125899906842624 bytes"),
    "truncated": (lambda to, data, _: hanging_up(data[:-1], len(data))("", to), BroadcastError,
        "closed the connection after"),
    "endless": (lambda to, *_: ENDLESS["endless body"]("", to), BroadcastError, "Content-Length"),
    "dripping": (lambda to, data, _: drip(to, head_of(len(data)) + b"\r\n" + data), BroadcastError, "too slow"),
    "dripping headers": (lambda to, data, _: drip(to, head_of(len(data)) + b"X-Padding: " + b"x" * 4000),
        BroadcastError, "too slow"),
    "endless headers": (lambda to, *_: ENDLESS["endless headers"]("", to), BroadcastError, "endless answer head"),
    "silent": (lambda to, *_: to.recv(1), BroadcastError, "has sent nothing for"),
    "absent": (lambda to, *_: cast.reply(to, 404), BroadcastError, "does not have chunk"),
    "busy": (lambda to, *_: cast.reply(to, 503), BroadcastError, "does not have chunk|busy|503"),
    "failing": (lambda to, *_: cast.reply(to, 500), BroadcastError, "answers 500"),
    "elsewhere": (lambda to, *_: cast.reply(to, 302), BroadcastError, "answers 302"),
}  # fmt: skip
ALONE_S = 3.0  # all liars at once, on a machine that may be busy
IMPATIENT = {"min_rate_bytes_s": cast.CHUNK / 0.1, "stall_s": 0.2}


def attack(lab: cast.Lab, name: str) -> cast.Handler:
    lie, _, _ = ATTACKS[name]
    return lambda target, to: lie(to, (lab.www / target.lstrip("/")).read_bytes(), lab.www)


def liar_of(lab: cast.Lab, name: str) -> tuple[PolicyManifest, cast.ScriptedSource]:
    """A version, and a source that lies so about its chunks."""
    return lab.publish(1), lab.liar({"/chunks/": attack(lab, name)})


@pytest.fixture(scope="module")
def alone(tmp_path_factory: TempPaths) -> dict[str, BroadcastError]:
    """How a fetch ends that has nobody but a liar."""

    def fetch_from_a_liar(lab: cast.Lab, name: str) -> None:
        manifest, liar = liar_of(lab, name)
        lab.client(liar.url, **IMPATIENT).fetch(manifest.policy, ALONE_S)

    return endings(tmp_path_factory.mktemp("alone"), ATTACKS, fetch_from_a_liar)


@pytest.mark.parametrize("name", ATTACKS)
def test_a_client_with_nobody_but_a_liar_says_what_it_did(alone: dict[str, BroadcastError], name: str) -> None:
    _, error, sentence = ATTACKS[name]
    with pytest.raises(error, match=sentence):
        raise alone[name]


@pytest.mark.parametrize("name", ATTACKS)
def test_a_client_gets_the_right_bytes_beside_a_liar(lab: cast.Lab, name: str) -> None:
    manifest, liar = liar_of(lab, name)
    lab.fetch(manifest, liar.url, lab.honest().url, **IMPATIENT)


@pytest.mark.parametrize("name", ["corrupt", "mislabelled", "shorter", "huge"])
def test_a_source_that_lies_once_is_asked_for_no_further_chunk(lab: cast.Lab, name: str) -> None:
    manifest, liar = liar_of(lab, name)
    lab.fetch(manifest, liar.url, lab.honest().url, connections=1)
    assert len(liar.asked("/chunks/")) <= 1


@pytest.mark.parametrize("name", ["corrupt", "mislabelled", "shorter", "truncated", "absent", "endless headers"])
def test_a_relay_gets_the_right_bytes_beside_a_liar(lab: cast.Lab, name: str) -> None:
    manifest, liar = liar_of(lab, name)
    relay = lab.relay("relay", liar.url, lab.honest().url)
    lab.fetch(manifest, relay.url)
    for path in cast.chunk_paths(lab.www, manifest):
        assert cast.ask(relay.url, f"/{path.relative_to(lab.www)}") == (200, path.read_bytes())


LIES = ("corrupt", "mislabelled", "shorter", "truncated")


def fetch_from_a_relay_that_is_lied_to(lab: cast.Lab, name: str) -> None:
    """Ends as it should only if the relay holds nothing."""
    manifest, liar = liar_of(lab, name)
    relay = lab.relay("relay", liar.url)
    eventually(lambda: liar.asked("/chunks/"))
    try:
        lab.client(relay.url, stall_s=1).fetch(manifest.policy, 2)
    finally:
        assert cast.health(relay)["missing_chunks"] == len({chunk.hash for chunk in offered(manifest)})
        assert cast.chunks_in(lab.folder / "relay") == set()


@pytest.fixture(scope="module")
def from_a_relay(tmp_path_factory: TempPaths) -> dict[str, BroadcastError]:
    return endings(tmp_path_factory.mktemp("relays"), LIES, fetch_from_a_relay_that_is_lied_to)


@pytest.mark.parametrize("name", LIES)
def test_a_relay_never_passes_a_lie_on(from_a_relay: dict[str, BroadcastError], name: str) -> None:
    with pytest.raises(BroadcastError, match=r"does not have chunk|did not arrive|no longer|nothing for"):
        raise from_a_relay[name]


# ── a source that lies about what it has ─────────────────────────────────────────────────────────────────────────


def map_of(manifest: PolicyManifest, have: int, soon: int) -> cast.Handler:
    """A map that says of every chunk: it is here, or will be soon, do not fetch it."""
    count = len(offered(manifest))
    return cast.says(b"".join((flag * ((1 << count) - 1)).to_bytes(-(-count // 8), "little") for flag in (have, soon)))


@pytest.mark.parametrize("chunks", ["absent", "silent", "truncated", "corrupt"])
@pytest.mark.parametrize("flags", [(1, 0), (0, 1)], ids=["has everything", "will have everything"])
@pytest.mark.parametrize("who", ["client", "relay", "peer"])
def test_wrong_map_delays_no_client(lab: cast.Lab, who: str, flags: tuple[int, int], chunks: str) -> None:
    """Peers fetch different chunks and trade them: one that promises and never delivers must not be waited for."""
    manifest, honest = lab.publish(1), lab.honest()
    liar = lab.liar({"/have/": map_of(manifest, *flags), "/chunks/": attack(lab, chunks)})
    if who == "client":
        lab.fetch(manifest, liar.url, honest.url, **IMPATIENT)
    else:
        upstreams, peers = ([liar.url, honest.url], []) if who == "relay" else ([honest.url], [liar.url])
        lab.fetch(manifest, lab.relay("relay", *upstreams, peers=peers).url)


BROKEN_MAPS = {"empty": cast.says(b""), "too short": cast.says(b"\xff"), "failing": cast.says(b"", 500), **ENDLESS}


@pytest.mark.parametrize("name", BROKEN_MAPS)
def test_a_broken_map_does_not_keep_anybody_from_the_chunks(lab: cast.Lab, name: str) -> None:
    """The chunks of this source are right; only its map is nonsense."""
    manifest = lab.publish(1)
    lab.fetch(manifest, lab.liar({"/have/": BROKEN_MAPS[name]}).url, **IMPATIENT)


# ── what the published package falls over, done to ours: each ends with the right bytes ───────────────────────────────

IDLE = 40


@contextmanager
def idle_connections(url: str, words: bytes) -> Iterator[None]:
    """Clients that connect and say nothing, or not enough, or never read."""
    with ExitStack() as stack:
        for _ in range(IDLE):
            stack.enter_context(cast.dial(url, words))
        yield


@pytest.mark.parametrize("words", [b"", b"GET /chunks/", b"GET /head.json?wait_s=60 HTTP/1.0\r\n\r\n", b"never reads"])
def test_idle_connections_block_nobody(lab: cast.Lab, words: bytes) -> None:
    manifest, origin = lab.publish(1), lab.honest()
    relay = lab.relay("relay", origin.url)
    if words == b"never reads":
        words = b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n" % chunk_key(manifest.chunks[0].hash).encode() * 50
    with idle_connections(origin.url, words), idle_connections(relay.url, words):
        lab.fetch(manifest, origin.url)
        lab.fetch(manifest, relay.url, name="other")


def test_dead_sources_in_the_list_do_not_matter(lab: cast.Lab) -> None:
    manifest = lab.publish(1)
    client = lab.client(cast.DEAD, "http://does-not-exist.invalid:1", lab.honest().url)
    assert client.newest(cast.WITHIN_S) == manifest.policy
    lab.fetch(manifest, client)
    lab.fetch(manifest, lab.relay("relay", cast.DEAD, lab.honest().url).url, name="other")


@pytest.mark.parametrize("what", ["flipped", "gone"])
def test_chunks_damaged_on_a_relays_disk_are_fetched_again(lab: cast.Lab, what: str) -> None:
    """By a client, from another source; by the relay, if its file is missing or too short."""
    manifest, origin = lab.publish(1), lab.honest()
    relay, folder = lab.relay("relay", origin.url), lab.folder / "relay"
    eventually(lambda: cast.is_complete(relay, "0.1"))
    if what == "flipped":
        cast.flip(folder / chunk_key(manifest.chunks[2].hash))
    (folder / chunk_key(manifest.chunks[3].hash)).write_bytes(b"short")
    (folder / chunk_key(manifest.chunks[1].hash)).unlink()
    lab.fetch(manifest, relay.url, *([origin.url] if what == "flipped" else []))
    eventually(lambda: cast.is_complete(relay, "0.1"))


def test_version_removed_during_a_fetch_is_reported_as_gone(lab: cast.Lab) -> None:
    manifest = lab.publish(1)
    honest = cast.from_folder(lab.www)

    def removes(target: str, to: socket.socket) -> None:
        if manifest.chunks[-1].hash in target and (lab.www / manifest_key((0, 1))).exists():
            for version in range(2, 9):
                lab.publish(version)
        honest(target, to)

    with pytest.raises(VersionNotFound, match="no longer offered"):
        lab.client(lab.source(removes).url).fetch(manifest.policy, cast.WITHIN_S)
