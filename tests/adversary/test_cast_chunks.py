"""Chunks that are not what they should be. A liar alone ends in a named error; beside somebody honest it costs a retry.

Each attack is tried on a client and on a relay. A relay must in addition never pass on what it was given.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kit import TempPaths
from kit.liar import (
    CHUNK,
    WITHIN_S,
    Handler,
    Lab,
    assert_files,
    endings,
    endless_body,
    endless_headers,
    eventually,
    files_of,
    get,
    health,
    huge_body,
    reply,
    says,
    silent,
)
from shoal.errors import BroadcastError, ChunkCorrupt
from shoal.protocol import PolicyManifest
from shoal.shardcast.manifest import offered
from shoal.shardcast.tree import chunk_key

Attack = tuple[Handler, type[BroadcastError], str]


def true_bytes(folder: Path, target: str) -> bytes:
    return (folder / target.lstrip("/")).read_bytes()


def corrupt(folder: Path) -> Handler:
    def handle(target: str, to: socket.socket) -> None:
        data = bytearray(true_bytes(folder, target))
        data[len(data) // 2] ^= 1
        reply(to, 200, bytes(data))

    return handle


def mislabelled(folder: Path) -> Handler:
    """Another chunk of the same version, of the same size, whole and valid in itself."""

    def handle(target: str, to: socket.socket) -> None:
        mine = true_bytes(folder, target)
        others = (path.read_bytes() for path in sorted((folder / "chunks").glob("??/*")))
        reply(to, 200, next((other for other in others if len(other) == len(mine) and other != mine), b"x" * len(mine)))

    return handle


def truncated(folder: Path) -> Handler:
    def handle(target: str, to: socket.socket) -> None:
        data = true_bytes(folder, target)
        reply(to, 200, data[:-1], size=len(data))
        to.shutdown(socket.SHUT_RDWR)

    return handle


def shorter(folder: Path) -> Handler:
    return lambda target, to: reply(to, 200, true_bytes(folder, target)[:-1])


def dripping(folder: Path) -> Handler:
    def handle(target: str, to: socket.socket) -> None:
        data = true_bytes(folder, target)
        reply(to, 200, b"", size=len(data))
        for byte in data:
            to.sendall(bytes([byte]))
            threading.Event().wait(0.05)  # the drip itself

    return handle


def dripping_headers(_folder: Path) -> Handler:
    def handle(_target: str, to: socket.socket) -> None:
        for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\nX-Padding: " + b"x" * 4000:
            to.sendall(bytes([byte]))
            threading.Event().wait(0.05)

    return handle


def attacks(folder: Path) -> dict[str, Attack]:
    return {
        "corrupt": (corrupt(folder), ChunkCorrupt, "sent bytes that are not chunk"),
        "mislabelled": (mislabelled(folder), ChunkCorrupt, "sent bytes that are not chunk"),
        "shorter": (shorter(folder), ChunkCorrupt, "bytes as chunk"),
        "huge": (huge_body, ChunkCorrupt, "offers 1125899906842624 bytes"),
        "truncated": (truncated(folder), BroadcastError, "closed the connection after"),
        "endless": (endless_body, BroadcastError, "Content-Length"),
        "dripping": (dripping(folder), BroadcastError, "too slow"),
        "dripping headers": (dripping_headers(folder), BroadcastError, "too slow"),
        "endless headers": (endless_headers, BroadcastError, "endless answer head"),
        "silent": (silent, BroadcastError, "has sent nothing for"),
        "absent": (says(b"", 404), BroadcastError, "does not have chunk"),
        "busy": (says(b"", 503), BroadcastError, "does not have chunk|busy|503"),
        "failing": (says(b"", 500), BroadcastError, "answers 500"),
        "elsewhere": (says(b"", 302), BroadcastError, "answers 302"),
    }


NAMES = list(attacks(Path()))
ALONE_S = 3.0  # all liars at once, on a machine that may be busy
IMPATIENT = {"min_rate_bytes_s": CHUNK / 0.1, "stall_s": 0.2}


def fetch_from_a_liar(lab: Lab, name: str) -> None:
    manifest = lab.publish(1)
    liar = lab.liar({"/chunks/": attacks(lab.www)[name][0]})
    lab.client(liar.url, **IMPATIENT).fetch(manifest.policy, ALONE_S)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: TempPaths) -> dict[str, BroadcastError]:
    """How a fetch ends that has nobody but a liar."""
    return endings(tmp_path_factory.mktemp("alone"), NAMES, fetch_from_a_liar)


@pytest.mark.parametrize("name", NAMES)
def test_a_client_with_nobody_but_a_liar_says_what_it_did(alone: dict[str, BroadcastError], name: str) -> None:
    _, error, sentence = attacks(Path())[name]
    with pytest.raises(error, match=sentence):
        raise alone[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_client_gets_the_right_bytes_beside_a_liar(lab: Lab, name: str) -> None:
    manifest = lab.publish(1)
    liar = lab.liar({"/chunks/": attacks(lab.www)[name][0]})
    payload = lab.client(liar.url, lab.honest().url, **IMPATIENT).fetch(manifest.policy, WITHIN_S)
    assert_files(payload, files_of(1))


@pytest.mark.parametrize("name", ["corrupt", "mislabelled", "shorter", "huge"])
def test_a_source_that_lies_once_is_asked_for_no_further_chunk(lab: Lab, name: str) -> None:
    manifest = lab.publish(1)
    liar = lab.liar({"/chunks/": attacks(lab.www)[name][0]})
    lab.client(liar.url, lab.honest().url, connections=1).fetch(manifest.policy, WITHIN_S)
    assert len(liar.asked("/chunks/")) <= 1


@pytest.mark.parametrize("name", ["corrupt", "mislabelled", "shorter", "truncated", "absent", "endless headers"])
def test_a_relay_gets_the_right_bytes_beside_a_liar(lab: Lab, name: str) -> None:
    manifest = lab.publish(1)
    liar = lab.liar({"/chunks/": attacks(lab.www)[name][0]})
    relay = lab.relay("relay", liar.url, lab.honest().url)
    assert_files(lab.client(relay.url).fetch(manifest.policy, WITHIN_S), files_of(1))
    for chunk in offered(manifest):
        assert get(relay.url, "/" + chunk_key(chunk.hash)) == (200, (lab.www / chunk_key(chunk.hash)).read_bytes())


LIES = ("corrupt", "mislabelled", "shorter", "truncated")


def fetch_from_a_relay_that_is_lied_to(lab: Lab, name: str) -> None:
    """Ends as it should only if the relay holds nothing."""
    manifest = lab.publish(1)
    liar = lab.liar({"/chunks/": attacks(lab.www)[name][0]})
    relay = lab.relay("relay", liar.url)
    eventually(lambda: bool(liar.asked("/chunks/")))
    try:
        lab.client(relay.url, stall_s=1).fetch(manifest.policy, 2)
    finally:
        assert health(relay.url)["missing_chunks"] == len({chunk.hash for chunk in offered(manifest)})
        assert [path for path in (lab.folder / "relay" / "chunks").glob("??/*") if path.is_file()] == []


@pytest.fixture(scope="module")
def from_a_relay(tmp_path_factory: TempPaths) -> dict[str, BroadcastError]:
    return endings(tmp_path_factory.mktemp("relays"), LIES, fetch_from_a_relay_that_is_lied_to)


@pytest.mark.parametrize("name", LIES)
def test_a_relay_never_passes_a_lie_on(from_a_relay: dict[str, BroadcastError], name: str) -> None:
    with pytest.raises(BroadcastError, match=r"does not have chunk|did not arrive|no longer|nothing for"):
        raise from_a_relay[name]


def test_a_relay_takes_no_chunk_that_no_signed_manifest_names(lab: Lab) -> None:
    """What a relay holds is decided by signatures: asking it for something else does not make it fetch that."""
    lab.publish(1)
    stray = lab.www / chunk_key("ab" * 32)
    stray.parent.mkdir(exist_ok=True)
    stray.write_bytes(b"not in any manifest")
    upstream = lab.liar({})
    relay = lab.relay("relay", upstream.url)
    eventually(lambda: health(relay.url)["missing_chunks"] == 0)
    assert get(relay.url, "/" + chunk_key("ab" * 32))[0] == 404
    assert upstream.asked("ab" * 32) == []


def test_memory_does_not_grow_with_what_a_liar_offers(lab: Lab) -> None:
    """A manifest, signed, whose one chunk claims a terabyte: refused before anything is reserved for it."""
    manifest = lab.publish(1)
    path = lab.www / "manifests" / "0.1.json"
    signed = json.loads(path.read_bytes())
    signed["document"]["chunks"][0]["size_bytes"] = 1 << 40
    path.write_text(json.dumps(signed))
    with pytest.raises(BroadcastError, match="signature"):
        lab.client(lab.honest().url).fetch(manifest.policy, 5)


# ── a source that lies about what it has ─────────────────────────────────────────────────────────────────────────


def map_of(have: int, soon: int) -> Callable[[PolicyManifest], bytes]:
    """A map that says of every chunk: it is here (1), or will be soon, do not fetch it."""

    def made(manifest: PolicyManifest) -> bytes:
        count = len(offered(manifest))
        return b"".join((flag * ((1 << count) - 1)).to_bytes(-(-count // 8), "little") for flag in (have, soon))

    return made


MAPS = {"has everything": map_of(1, 0), "will have everything": map_of(0, 1)}


@pytest.mark.parametrize("chunks", ["absent", "silent", "truncated"])
@pytest.mark.parametrize("map_name", MAPS)
@pytest.mark.parametrize("who", ["client", "relay"])
def test_nobody_is_held_up_by_a_map_that_lies(lab: Lab, who: str, map_name: str, chunks: str) -> None:
    manifest = lab.publish(1)
    liar = lab.liar({"/have/": says(MAPS[map_name](manifest)), "/chunks/": attacks(lab.www)[chunks][0]})
    if who == "client":
        client = lab.client(liar.url, lab.honest().url, **IMPATIENT)
    else:
        client = lab.client(lab.relay("relay", liar.url, lab.honest().url).url)
    assert_files(client.fetch(manifest.policy, 2 * WITHIN_S), files_of(1))


@pytest.mark.parametrize("chunks", ["absent", "silent", "corrupt"])
@pytest.mark.parametrize("map_name", MAPS)
def test_a_peer_whose_map_lies_starves_nobody(lab: Lab, map_name: str, chunks: str) -> None:
    """Peers fetch different chunks and trade them: one that promises and never delivers must not be waited for."""
    manifest = lab.publish(1)
    honest = lab.honest()
    handler = attacks(lab.www)[chunks][0]
    liar = lab.liar({"/have/": says(MAPS[map_name](manifest)), "/chunks/": handler})
    relay = lab.relay("relay", honest.url, peers=[liar.url])
    assert_files(lab.client(relay.url).fetch(manifest.policy, 2 * WITHIN_S), files_of(1))
    client = lab.client(honest.url, liar.url, name="other", **IMPATIENT)
    assert_files(client.fetch(manifest.policy, 2 * WITHIN_S), files_of(1))


BROKEN_MAPS = {
    "empty": says(b""),
    "too short": says(b"\xff"),
    "huge": huge_body,
    "endless": endless_body,
    "silent": silent,
    "failing": says(b"", 500),
}


@pytest.mark.parametrize("name", BROKEN_MAPS)
def test_a_broken_map_does_not_keep_anybody_from_the_chunks(lab: Lab, name: str) -> None:
    """The chunks of this source are right; only its map is nonsense."""
    manifest = lab.publish(1)
    odd = lab.liar({"/have/": BROKEN_MAPS[name]})
    assert_files(lab.client(odd.url, **IMPATIENT).fetch(manifest.policy, WITHIN_S), files_of(1))
