"""Relays beside each other and within a budget: trading, telling each other of heads, knowing themselves, disk."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kit.cast import (
    CHUNK,
    KEY,
    RUN,
    Handler,
    Running,
    ScriptedSource,
    ask,
    assert_content,
    chunk_paths,
    content,
    dial,
    eventually,
    from_folder,
    health,
    instead,
    is_complete,
    make_downloader,
    make_origin,
    publish,
    reply,
)
from shoal.protocol import PolicyManifest, TensorView
from shoal.shardcast import Content, Origin, OriginSettings, RelayConfig, RelaySettings, run_relay
from shoal.shardcast.manifest import offered
from shoal.shardcast.tree import chunk_key

Scripted = Callable[[Handler], ScriptedSource]
StartOrigin = Callable[[Path], Running]
StartPeer = Callable[..., Running]

NOWHERE = "http://127.0.0.1:9"  # the discard port: nobody listens there


def free_ports(count: int) -> list[int]:
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in listening]
    for one in listening:
        one.close()
    return ports


@pytest.fixture
def start_peer(started: list[Running]) -> StartPeer:
    def start(
        folder: Path, upstreams: list[str], peers: list[str] | None = None, port: int = 0, **settings: float
    ) -> Running:
        chosen = RelaySettings.model_validate(settings)
        config = RelayConfig(
            folder, tuple(upstreams), RUN, KEY.public_key, "127.0.0.1", port, chosen, tuple(peers or ()), poll_s=0.05
        )
        started.append(Running(partial(run_relay, config)))
        return started[-1]

    return start


class Chain:
    """An origin whose versions differ a little, so that most are offered as deltas alone."""

    def __init__(self, folder: Path, kept: int = 3, anchor_every: int = 4) -> None:
        settings = OriginSettings(
            chunk_size_bytes=CHUNK, kept_versions=kept, anchor_every=anchor_every, delta_from_bytes=0
        )
        self.origin = Origin(folder, RUN, KEY, settings=settings)
        self._weights = np.random.default_rng(5).integers(0, 2**15, 8000, dtype=np.uint16)

    def publish(self, version: int) -> PolicyManifest:
        self._weights[version * 10] ^= 1
        view = TensorView("w", "BF16", self._weights.shape, memoryview(self._weights.tobytes()))
        return self.origin.publish(version, Content.of({}, [view]))


def test_a_relay_whose_upstream_is_dead_learns_from_its_peer(tmp_path, start_origin, start_peer):
    origin = make_origin(tmp_path / "origin")
    publish(origin, 1)
    first = start_peer(tmp_path / "first", [start_origin(tmp_path / "origin").url])
    second = start_peer(tmp_path / "second", [NOWHERE], [first.url])
    eventually(lambda: is_complete(second, "0.1"))
    manifest = publish(origin, 2)
    assert_content(make_downloader([second.url], tmp_path / "cache").fetch(manifest.policy, 20), *content(2))


def test_a_peer_that_starts_later_is_waited_for(tmp_path, start_origin, start_peer):
    publish(make_origin(tmp_path / "origin"), 1)
    (port,) = free_ports(1)
    second = start_peer(tmp_path / "second", [NOWHERE], [f"http://127.0.0.1:{port}"])
    assert health(second)["head"] is None
    start_peer(tmp_path / "first", [start_origin(tmp_path / "origin").url], port=port)
    eventually(lambda: is_complete(second, "0.1"), 20)


def test_relays_given_the_same_list_leave_themselves_out(tmp_path, start_origin, start_peer, caplog):
    caplog.set_level("INFO")
    publish(make_origin(tmp_path / "origin"), 1)
    upstream = start_origin(tmp_path / "origin").url
    ports = free_ports(3)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    relays = [start_peer(tmp_path / str(port), [upstream], urls, port=port) for port in ports]
    for relay in relays:
        eventually(lambda one=relay: is_complete(one, "0.1"))

    for relay, url in zip(relays, urls, strict=True):
        eventually(lambda one=relay, own=url: set(health(one)["sources"]) == {upstream, *urls} - {own})
        assert f"{url} is this relay itself: left out of its peers" in caplog.text


def test_a_peer_that_is_no_relay_tells_of_heads_and_is_said_to_be_none(tmp_path, start_peer, scripted, caplog):
    folder = tmp_path / "origin"
    publish(make_origin(folder), 1)
    for name, answer in {"404": (404, b""), "list": (200, b"[]"), "page": (200, b"<html>")}.items():
        strange = instead(from_folder(folder), {"/health": partial(answer_with, *answer)})
        peer = scripted(strange)
        relay = start_peer(tmp_path / name, [NOWHERE], [peer.url])
        eventually(lambda one=relay: health(one)["head"] == "0.1")
        assert f"{peer.url} is no relay" in caplog.text


def answer_with(status: int, body: bytes, target: str, to: socket.socket) -> None:
    reply(to, status, body)


def test_two_peers_take_each_chunk_from_upstream_about_once(tmp_path, start_peer, scripted):
    folder = tmp_path / "origin"
    origin = make_origin(folder)
    publish(origin, 1)
    honest = from_folder(folder)

    def slowly(target: str, to: socket.socket) -> None:
        data = (folder / target.lstrip("/")).read_bytes()
        reply(to, 200, data[:1], size=len(data))
        threading.Event().wait(0.1)  # as long as a chunk takes on a line
        to.sendall(data[1:])

    upstream = scripted(instead(honest, {"/chunks/": slowly}))
    ports = free_ports(2)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    relays = [start_peer(tmp_path / str(port), [upstream.url], urls, port=port, connections=2) for port in ports]
    for relay, other in zip(relays, reversed(urls), strict=True):
        eventually(lambda one=relay, url=other: url in health(one)["sources"])
        eventually(lambda one=relay: is_complete(one, "0.1"))
    before = len(upstream.seen)
    manifest = origin.publish(2, Content.of(*content(2, sizes=(25_000,))))
    for relay in relays:
        eventually(lambda one=relay: is_complete(one, "0.2"), 30)
    asked = sum(target.startswith("/chunks/") for target in upstream.seen[before:])
    assert asked <= 1.5 * len({chunk.hash for chunk in manifest.chunks})


def test_the_map_of_a_relay_follows_what_arrives(tmp_path: Path, start_peer: StartPeer, scripted: Scripted) -> None:
    folder = tmp_path / "origin"
    manifest = publish(make_origin(folder), 1)
    late = manifest.chunks[2].hash
    release = threading.Event()
    honest = from_folder(folder)

    def hold(target: str, to: socket.socket) -> None:
        release.wait(20)
        honest(target, to)

    relay = start_peer(tmp_path / "relay", [scripted(instead(honest, {late: hold})).url])
    count = len(manifest.chunks)
    assert count == 5
    eventually(lambda: ask(relay.url, "/have/0.1") == (200, bytes([0b11011, 0b00100])))
    answers: list[tuple[int, bytes]] = []
    asking = threading.Thread(target=lambda: answers.append(ask(relay.url, "/have/0.1?count=4&wait_s=20")))
    asking.start()
    release.set()
    asking.join(10)
    assert answers == [(200, bytes([0b11111, 0]))]
    assert ask(relay.url, "/have/0.2?wait_s=20")[0] == 404


def test_only_what_a_version_offers_is_mirrored_and_every_version_kept_can_be_reached(
    tmp_path: Path, start_origin: StartOrigin, start_peer: StartPeer
) -> None:
    chain = Chain(tmp_path / "origin", kept=6)
    manifests = [chain.publish(version) for version in range(6)]  # anchors: 0 and 4
    assert [one.anchor for one in manifests] == [True, False, False, False, True, False]
    relay = start_peer(tmp_path / "relay", [start_origin(tmp_path / "origin").url], kept_versions=1)
    eventually(lambda: is_complete(relay, "0.5"))
    assert health(relay)["versions"] == ["0.4", "0.5"]
    deeper = start_peer(tmp_path / "deeper", [start_origin(tmp_path / "origin").url], kept_versions=3)
    eventually(lambda: is_complete(deeper, "0.5") and len(health(deeper)["versions"]) == 6)
    here = {path.name for path in (tmp_path / "deeper" / "chunks").glob("??/*")}
    assert here == {chunk.hash for one in manifests for chunk in offered(one)}
    hidden = next(chunk for chunk in manifests[3].chunks if chunk.hash not in here)
    assert ask(deeper.url, f"/{chunk_key(hidden.hash)}")[0] == 404  # proves the payload, is not offered
    payload = make_downloader([deeper.url], tmp_path / "cache").fetch(manifests[3].policy, 20)
    assert len(payload.tensors[0].data.tobytes()) == manifests[3].size_bytes


def test_what_was_never_in_a_signed_manifest_is_refused_although_it_lies_on_the_disk(
    tmp_path: Path, start_origin: StartOrigin, start_peer: StartPeer
) -> None:
    publish(make_origin(tmp_path / "origin"), 1)
    relay = start_peer(tmp_path / "relay", [start_origin(tmp_path / "origin").url])
    eventually(lambda: is_complete(relay, "0.1"))
    foreign = chunk_key("ab" * 32)
    for key in (foreign, "manifests/0.7.json"):
        path = tmp_path / "relay" / key
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"{}")
        assert ask(relay.url, f"/{key}")[0] == 404
    (tmp_path / "relay" / "secret").write_bytes(b"{}")
    assert ask(relay.url, "/secret")[0] == 404


def budget_of(*manifests: PolicyManifest) -> float:
    """In GB, what these offer together."""
    return sum({chunk.hash: chunk.size_bytes for one in manifests for chunk in offered(one)}.values()) / 1e9


def test_a_budget_lets_the_oldest_go_and_whole_versions_are_logged(tmp_path, start_origin, start_peer, caplog):
    caplog.set_level("INFO")
    origin = make_origin(tmp_path / "origin")
    manifests = [publish(origin, version) for version in range(3)]
    budget = budget_of(*manifests[1:])
    upstream = start_origin(tmp_path / "origin").url
    relay = start_peer(tmp_path / "relay", [upstream], kept_versions=3, disk_budget_gb=budget)
    eventually(lambda: is_complete(relay, "0.2") and health(relay)["versions"] == ["0.1", "0.2"])
    state = health(relay)
    assert state["ok"] is True
    assert state["disk_bytes"] == round(budget * 1e9)
    publish(origin, 3)
    eventually(lambda: is_complete(relay, "0.3") and health(relay)["versions"] == ["0.2", "0.3"])
    lines = [record.getMessage() for record in caplog.records if "is whole" in record.getMessage()]
    assert {line.split(" is whole")[0] for line in lines} >= {"policy 0.2", "policy 0.3"}
    assert all(upstream in line for line in lines)
    here = sum(path.stat().st_size for path in (tmp_path / "relay" / "chunks").glob("??/*"))
    assert here <= budget * 1e9


def test_a_version_that_does_not_fit_is_told_with_numbers_and_what_is_there_is_served(
    tmp_path: Path, start_origin: StartOrigin, start_peer: StartPeer, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "origin"
    origin = make_origin(folder)
    small = publish(origin, 1)
    relay = start_peer(tmp_path / "relay", [start_origin(folder).url], disk_budget_gb=budget_of(small))
    eventually(lambda: is_complete(relay, "0.1"))
    files, tensors = content(2, sizes=(5000,))
    large = origin.publish(2, Content.of(files, tensors))
    eventually(lambda: health(relay)["ok"] is False)
    state = health(relay)
    needed = f"{sum(chunk.size_bytes for chunk in large.chunks) / 1e9:.6g} GB"
    assert needed in str(state["problem"])
    assert f"disk_budget_gb is {budget_of(small):g}" in str(state["problem"])
    assert str(state["problem"]) in caplog.text
    assert state["versions"] == ["0.1"]
    for path in chunk_paths(folder, small):
        assert ask(relay.url, f"/{path.relative_to(folder)}") == (200, path.read_bytes())
    assert ask(relay.url, f"/{chunk_key(large.chunks[0].hash)}")[0] == 404
    assert ask(relay.url, "/have/0.2") == (200, bytes(2 * -(-len(large.chunks) // 8)))
    publish(origin, 3)  # small again
    eventually(lambda: health(relay)["ok"] is True and is_complete(relay, "0.3"))


def test_limits_of_the_recipe_hold_for_clients(tmp_path, start_origin, start_peer):
    relay = start_peer(tmp_path / "relay", [start_origin(tmp_path / "origin").url], connections_per_client=2)
    with dial(relay.url), dial(relay.url):
        eventually(lambda: ask(relay.url, "/health")[0] == 429)
