"""Relays: mirror, verify, hold, resume, never go back; beside each other they trade, within a budget they choose."""

import socket
import threading
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from kit import Logs, Patch, cast, eventually
from kit.forged import write
from shoal.errors import ConfigError, ResourceError
from shoal.protocol import PolicyManifest, TensorView
from shoal.runtime import StopToken, show_bytes
from shoal.shardcast import RelayConfig, run_relay
from shoal.shardcast.manifest import offered, size_of
from shoal.shardcast.relay import Mirror
from shoal.shardcast.tree import chunk_key


def mirrored(lab: cast.Lab, name: str = "relay", **settings: float) -> tuple[cast.Running, Path]:
    """A relay of the lab's origin, and its folder."""
    return lab.relay(name, lab.honest().url, **settings), lab.folder / name


def until(label: str, *relays: cast.Running) -> None:
    """Whole, everywhere."""
    for relay in relays:
        eventually(lambda one=relay: cast.is_complete(one, label))


def held_back(lab: cast.Lab, chunk_hash: str, release: threading.Event) -> cast.Handler:
    """The tree, but this chunk comes only after the release."""
    honest = cast.from_folder(lab.www)
    return cast.instead(honest, {chunk_hash: lambda target, to: release.wait(20) and honest(target, to)})  # type: ignore[dict-item, func-returns-value]


def test_origin_to_relay_to_relay_to_client(lab: cast.Lab) -> None:
    first, _ = mirrored(lab, "first")
    client = lab.client(lab.relay("second", first.url).url)
    manifests = [lab.fetch(lab.publish(version), client).manifest for version in (1, 2)]
    until("0.2", first)
    state, fetched = cast.health(first), size_of(manifests)
    assert (state["role"], state["versions"], state["bytes_in"]) == ("relay", ["0.1", "0.2"], fetched)
    assert int(state["bytes_out"]) >= fetched


@pytest.mark.parametrize("allowed", [2, 3])
def test_a_client_that_may_have_few_connections_does_with_few(lab: cast.Lab, allowed: int) -> None:
    """Idle ones are closed, or they would keep the busy one out until the relay tires of them, after half a minute."""
    manifest = lab.publish(1, files={"file": bytes(range(256)) * 400})
    relay, _ = mirrored(lab, connections_per_client=allowed + 1)  # one for what this test asks
    until("0.1", relay)
    lab.fetch(manifest, relay.url)


def test_limits_of_the_recipe_hold_for_clients(lab: cast.Lab) -> None:
    relay, _ = mirrored(lab, connections_per_client=2)
    with cast.dial(relay.url), cast.dial(relay.url):
        eventually(lambda: cast.ask(relay.url, "/health")[0] == 429)


def test_a_relay_keeps_the_last_versions_whole_and_removes_the_rest(lab: cast.Lab) -> None:
    relay, folder = mirrored(lab, keep_versions=2)
    manifests = []
    for version in range(5):
        manifests.append(lab.publish(version, seed=version // 2))
        until(manifests[-1].policy.label, relay)
    assert not any(cast.manifest_path(folder, old).exists() for old in manifests[:3])
    assert cast.chunks_in(folder) == {chunk.hash for kept in manifests[3:] for chunk in kept.chunks}


def test_request_for_a_coming_chunk_is_held_and_the_map_grows(lab: cast.Lab) -> None:
    manifest, release = lab.publish(1), threading.Event()
    late = manifest.chunks[2].hash
    relay = lab.relay("relay", lab.source(held_back(lab, late, release)).url)
    assert len(manifest.chunks) == 5
    eventually(lambda: cast.ask(relay.url, "/have/0.1") == (200, bytes([0b11011, 0b00100])))
    chunk, grown = cast.asking(relay.url, f"/{chunk_key(late)}"), cast.asking(relay.url, "/have/0.1?count=4&wait_s=20")
    assert cast.ask(relay.url, "/chunks/00/" + "0" * 64)[0] == 404, "an unknown one is not held"
    assert cast.ask(relay.url, "/have/0.2?wait_s=20")[0] == 404
    assert not chunk.done()
    release.set()
    assert chunk.result(10) == (200, cast.chunk_paths(lab.www, manifest)[2].read_bytes())
    assert grown.result(10) == (200, bytes([0b11111, 0]))


def test_interrupted_relay_resumes_without_fetching_twice(lab: cast.Lab) -> None:
    folder = lab.folder / "relay"
    files, tensors = cast.content(1, sizes=(5000,))
    manifest = lab.publish(1, files=files, tensors=tensors)
    last = manifest.chunks[-1].hash
    relay = lab.relay("relay", lab.source(held_back(lab, last, threading.Event())).url)
    eventually(lambda: cast.health(relay)["missing_chunks"] == 1)
    lab.stop(relay)
    rotten = cast.chunk_paths(folder, manifest)[0]  # and the disk was not kind either
    rotten.write_bytes(b"x" * cast.CHUNK)
    upstream = lab.source()
    lab.fetch(manifest, lab.relay("relay", upstream.url).url)
    assert set(upstream.asked("/chunks/")) == {f"/{chunk_key(last)}", f"/{chunk_key(rotten.name)}"}


def test_a_full_disk_ends_the_relay_with_the_reason(lab: cast.Lab, monkeypatch: Patch) -> None:
    lab.publish(1)
    monkeypatch.setattr(Mirror, "keep", Mock(side_effect=ResourceError("the disk is full")))
    config = RelayConfig(lab.folder / "relay", (lab.honest().url,), cast.RUN, cast.KEY.public_key, port=0)
    with pytest.raises(ResourceError, match="disk is full"):
        run_relay(config, StopToken(), lambda url: None)


def test_setup_mistakes_are_one_clear_line(lab: cast.Lab, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    port = int(lab.honest().url.rsplit(":", 1)[1])
    key, up, folder = cast.KEY.public_key, (cast.DEAD,), tmp_path / "r"
    cases = [
        (RelayConfig(folder, (), cast.RUN, key), ConfigError, "at least one upstream"),
        (RelayConfig(folder, ("nonsense",), cast.RUN, key), ConfigError, "not a URL"),
        (RelayConfig(folder, up, cast.RUN, key, peers=("nonsense",)), ConfigError, "not a URL"),
        (RelayConfig(tmp_path / "file" / "r", up, cast.RUN, key), ResourceError, "file"),
        (RelayConfig(folder, up, cast.RUN, key, port=port), ResourceError, "is taken"),
    ]
    for config, error, sentence in cases:
        with pytest.raises(error, match=sentence):
            run_relay(config, StopToken(), lambda url: None)


def free_ports(count: int) -> list[int]:
    listening = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in listening]
    for one in listening:
        one.close()
    return ports


def level(lab: cast.Lab, upstream: str, count: int, **settings: float) -> dict[str, cast.Running]:
    """Relays that are all given the same list, by URL."""
    urls = {f"http://127.0.0.1:{port}": port for port in free_ports(count)}
    return {url: lab.relay(str(port), upstream, peers=list(urls), port=port, **settings) for url, port in urls.items()}


def test_relay_with_dead_upstream_gets_versions_from_its_peer_even_if_that_starts_later(lab: cast.Lab) -> None:
    lab.publish(1)
    (port,) = free_ports(1)
    second = lab.relay("second", cast.DEAD, peers=[f"http://127.0.0.1:{port}"])
    assert cast.health(second)["head"] is None
    lab.relay("first", lab.honest().url, port=port)
    until("0.1", second)
    lab.fetch(lab.publish(2), second.url)


def test_relays_given_the_same_list_leave_themselves_out(lab: cast.Lab, caplog: Logs) -> None:
    caplog.set_level("INFO")
    lab.publish(1)
    upstream = lab.honest().url
    relays = level(lab, upstream, 3)
    until("0.1", *relays.values())
    for url, relay in relays.items():
        eventually(lambda one=relay, own=url: set(cast.health(one)["sources"]) == {upstream, *relays} - {own})
        assert f"{url} is this relay itself: it is left out" in caplog.text


@pytest.mark.parametrize(
    "answer", [cast.says(b"", 404), cast.says(b"[]"), cast.says(b"<html>")], ids=["404", "list", "page"]
)
def test_peer_that_is_not_a_relay_gives_heads_only(lab: cast.Lab, caplog: Logs, answer: cast.Handler) -> None:
    lab.publish(1)
    peer = lab.liar({"/health": answer})
    relay = lab.relay("relay", cast.DEAD, peers=[peer.url])
    eventually(lambda: cast.health(relay)["head"] == "0.1")
    assert f"{peer.url} is not a relay" in caplog.text


def test_two_peers_take_each_chunk_from_upstream_about_once(lab: cast.Lab) -> None:
    lab.publish(1)

    def slowly(target: str, to: socket.socket) -> None:
        data = (lab.www / target.lstrip("/")).read_bytes()
        cast.reply(to, 200, data[:1], size=len(data))
        threading.Event().wait(0.1)  # as long as a chunk takes on a line
        to.sendall(data[1:])

    upstream = lab.liar({"/chunks/": slowly})
    relays = level(lab, upstream.url, 2, connections=2)
    for url, relay in relays.items():
        eventually(lambda one=relay, own=url: relays.keys() - {own} < cast.health(one)["sources"].keys())
    until("0.1", *relays.values())
    before = len(upstream.asked("/chunks/"))
    files, tensors = cast.content(2, sizes=(25_000,))
    manifest = lab.publish(2, files=files, tensors=tensors)
    until("0.2", *relays.values())
    assert len(upstream.asked("/chunks/")) - before <= 1.5 * len({chunk.hash for chunk in manifest.chunks})


def test_only_offered_chunks_are_mirrored_and_every_kept_version_can_be_made(lab: cast.Lab) -> None:
    weights = np.random.default_rng(5).integers(0, 2**15, 8000, dtype=np.uint16)
    manifests: list[PolicyManifest] = []
    for version in range(6):
        weights[version * 10] ^= 1
        views = [TensorView("w", "BF16", weights.shape, memoryview(weights.tobytes()))]
        settings = {"keep_versions": 6, "anchor_every": 4, "delta_from_bytes": 0}
        manifests.append(lab.publish(version, tensors=views, **settings))
    assert [one.anchor for one in manifests] == [True, False, False, False, True, False]
    newest, _ = mirrored(lab, "newest", keep_versions=1)
    deeper, folder = mirrored(lab, "deeper", keep_versions=3)
    until("0.5", newest, deeper)
    assert (cast.health(newest)["versions"], len(cast.health(deeper)["versions"])) == (["0.4", "0.5"], 6)
    assert cast.chunks_in(folder) == {chunk.hash for one in manifests for chunk in offered(one)}
    hidden = next(chunk for chunk in manifests[3].chunks if chunk.hash not in cast.chunks_in(folder))
    assert cast.ask(deeper.url, f"/{chunk_key(hidden.hash)}")[0] == 404  # proves the payload, is not offered
    lab.fetch(manifests[3], deeper.url)


def test_chunk_on_disk_that_is_in_no_signed_manifest_is_not_served(lab: cast.Lab) -> None:
    lab.publish(1)
    relay, folder = mirrored(lab)
    until("0.1", relay)
    for key in (chunk_key("ab" * 32), "manifests/0.7.json", "secret"):
        write(folder / key, b"{}")
        assert cast.ask(relay.url, f"/{key}")[0] == 404


def test_disk_budget_removes_the_oldest_and_complete_versions_are_logged(lab: cast.Lab, caplog: Logs) -> None:
    caplog.set_level("INFO")
    budget = size_of([lab.publish(version) for version in range(3)][1:])
    upstream = lab.honest().url
    relay = lab.relay("relay", upstream, keep_versions=3, disk_bytes=budget)
    for versions in (["0.1", "0.2"], ["0.2", "0.3"]):
        eventually(lambda kept=versions: cast.is_complete(relay, kept[1]) and cast.health(relay)["versions"] == kept)
        assert (cast.health(relay)["ok"], cast.health(relay)["disk_bytes"]) == (True, budget)
        assert f"policy {versions[1]} is whole: 4.15 kB; from {upstream}: " in caplog.text
        lab.publish(3)
    assert sum(path.stat().st_size for path in (lab.folder / "relay" / "chunks").glob("??/*")) <= budget


def test_version_that_does_not_fit_is_reported_and_its_chunks_are_served(lab: cast.Lab, caplog: Logs) -> None:
    small = lab.publish(1)
    relay, _ = mirrored(lab, disk_bytes=size_of([small]))
    until("0.1", relay)
    large = lab.publish(2, tensors=cast.content(2, sizes=(5000,))[1])
    eventually(lambda: cast.health(relay)["ok"] is False)
    state = cast.health(relay)
    needed, allowed = (show_bytes(size_of([one])) for one in (large, small))
    assert f"needs {needed} of disk, {allowed} are allowed (--max-disk)" in state["problem"]
    assert state["problem"] in caplog.text
    assert state["versions"] == ["0.1"]
    for path in cast.chunk_paths(lab.www, small):
        assert cast.ask(relay.url, f"/{path.relative_to(lab.www)}") == (200, path.read_bytes())
    assert cast.ask(relay.url, f"/{chunk_key(large.chunks[0].hash)}")[0] == 404
    assert cast.ask(relay.url, "/have/0.2") == (200, bytes(2 * -(-len(large.chunks) // 8)))
    lab.publish(3)  # small again
    eventually(lambda: cast.health(relay)["ok"] is True and cast.is_complete(relay, "0.3"))
