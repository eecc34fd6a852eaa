"""Relays: mirror, verify, hold, resume, never go back."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

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
    eventually,
    from_folder,
    health,
    instead,
    is_complete,
    make_downloader,
    make_origin,
    manifest_path,
    publish,
)
from shoal.errors import ConfigError, ResourceError
from shoal.protocol import Chunk
from shoal.runtime.stop import StopToken
from shoal.shardcast import Content, RelayConfig, run_relay
from shoal.shardcast.relay import Mirror

Scripted = Callable[[Handler], ScriptedSource]
StartOrigin = Callable[[Path], Running]
StartRelay = Callable[..., Running]


def test_origin_to_relay_to_relay_to_client(tmp_path: Path, start_origin: StartOrigin, start_relay: StartRelay) -> None:
    origin = make_origin(tmp_path / "origin")
    manifest = publish(origin, 1)
    first = start_relay(tmp_path / "first", start_origin(tmp_path / "origin").url)
    second = start_relay(tmp_path / "second", first.url)
    downloader = make_downloader([second.url], tmp_path / "cache")
    assert_content(downloader.fetch(manifest.policy, 20), *content(1))
    assert_content(downloader.fetch(publish(origin, 2).policy, 20), *content(2))
    eventually(lambda: is_complete(first, "0.2"))
    state = health(first)
    assert state["versions"] == ["0.1", "0.2"]
    assert state["role"] == "relay"
    fetched = {chunk.hash: chunk.size_bytes for v in (1, 2) for chunk in publish(origin, v).chunks}
    assert state["bytes_in"] == sum(fetched.values())
    assert int(str(state["bytes_out"])) >= sum(fetched.values())


@pytest.mark.parametrize("allowed", [2, 3])
def test_a_client_that_may_have_few_connections_does_with_few(tmp_path, start_origin, start_relay, allowed):
    """Idle ones are closed, or they would keep the busy one out until the relay tires of them, after half a minute."""
    files = {"file": bytes(range(256)) * 400}
    manifest = make_origin(tmp_path / "origin").publish(1, Content.of(files))
    relay = start_relay(
        tmp_path / "relay", start_origin(tmp_path / "origin").url, connections_per_client=allowed + 1
    )  # one for what this test asks
    eventually(lambda: is_complete(relay, "0.1"))
    downloader = make_downloader([relay.url], tmp_path / "cache")
    assert downloader.fetch(manifest.policy, 15).files == files


@pytest.mark.parametrize("damage", ["removed", "cut short"])
def test_a_chunk_that_vanishes_from_a_relays_disk_is_fetched_again(tmp_path, start_origin, start_relay, damage):
    manifest = publish(make_origin(tmp_path / "origin"), 1)
    relay = start_relay(tmp_path / "relay", start_origin(tmp_path / "origin").url)
    eventually(lambda: is_complete(relay, "0.1"))
    path = chunk_paths(tmp_path / "relay", manifest)[0]
    path.unlink() if damage == "removed" else path.write_bytes(b"short")
    assert_content(make_downloader([relay.url], tmp_path / "cache").fetch(manifest.policy, 20), *content(1))
    eventually(lambda: is_complete(relay, "0.1"))


def test_a_relay_keeps_the_last_versions_whole_and_removes_the_rest(tmp_path, start_origin, start_relay):
    origin = make_origin(tmp_path / "origin")
    relay = start_relay(tmp_path / "relay", start_origin(tmp_path / "origin").url, kept_versions=2)
    manifests = []
    for version in range(5):
        manifests.append(publish(origin, version, seed=version // 2))
        eventually(lambda label=manifests[-1].policy.label: is_complete(relay, label))
    assert not any(manifest_path(tmp_path / "relay", old).exists() for old in manifests[:3])
    for kept in manifests[3:]:
        assert all(path.stat().st_size for path in chunk_paths(tmp_path / "relay", kept))
    here = {path.name for path in (tmp_path / "relay" / "chunks").glob("??/*")}
    assert here == {chunk.hash for kept in manifests[3:] for chunk in kept.chunks}


def test_a_request_for_a_chunk_on_its_way_is_held_and_an_unknown_one_is_not(tmp_path, start_relay, scripted):
    folder = tmp_path / "origin"
    manifest = publish(make_origin(folder), 1)
    late = manifest.chunks[0].hash
    asked, release = threading.Event(), threading.Event()
    honest = from_folder(folder)

    def hold(target: str, to: socket.socket) -> None:
        asked.set()
        release.wait(10)
        honest(target, to)

    relay = start_relay(tmp_path / "relay", scripted(instead(honest, {late: hold})).url)
    assert asked.wait(10)
    answers: list[tuple[int, bytes]] = []
    client = threading.Thread(target=lambda: answers.append(ask(relay.url, f"/chunks/{late[:2]}/{late}")))
    client.start()
    assert ask(relay.url, "/chunks/00/" + "0" * 64)[0] == 404
    assert answers == []
    release.set()
    client.join(10)
    assert answers == [(200, chunk_paths(folder, manifest)[0].read_bytes())]


def test_an_upstream_that_lags_does_not_hold_up_one_that_does_not(tmp_path, start_relay, scripted):
    ahead, behind = tmp_path / "ahead", tmp_path / "behind"
    publish(make_origin(behind), 1)
    origin = make_origin(ahead)
    publish(origin, 1)
    new = publish(origin, 2)
    relay = start_relay(tmp_path / "relay", scripted(from_folder(behind)).url, scripted(from_folder(ahead)).url)
    assert_content(make_downloader([relay.url], tmp_path / "cache").fetch(new.policy, 20), *content(2))


RELAY_PROGRAM = """
import sys
from pathlib import Path
from shoal.runtime.stop import StopToken
from shoal.shardcast import RelayConfig, run_relay
folder, upstream, run, key = sys.argv[1:]
config = RelayConfig(Path(folder), (upstream,), run, key, port=0)
run_relay(config, StopToken(), lambda url: print(url, flush=True))
"""


@pytest.fixture
def relay_process() -> Iterator[Callable[[Path, str], tuple[subprocess.Popen[str], str]]]:
    processes: list[subprocess.Popen[str]] = []

    def start(folder: Path, upstream: str) -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, "-c", RELAY_PROGRAM, str(folder), upstream, RUN, KEY.public_key]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        stdout = processes[-1].stdout
        assert stdout is not None
        return processes[-1], stdout.readline().strip()

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_a_relay_killed_in_the_middle_resumes_without_fetching_twice(tmp_path, scripted, relay_process):
    folder, mirrored = tmp_path / "origin", tmp_path / "relay"
    files, tensors = content(1, sizes=(5000,))
    manifest = make_origin(folder).publish(1, Content.of(files, tensors))
    last = manifest.chunks[-1].hash
    slow = scripted(instead(from_folder(folder), {last: lambda target, to: slow.closed.wait(30)}))  # type: ignore[dict-item]
    process, _ = relay_process(mirrored, slow.url)
    eventually(lambda: sum(path.exists() for path in chunk_paths(mirrored, manifest)) == len(manifest.chunks) - 1, 30)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(10)
    rotten = chunk_paths(mirrored, manifest)[0]  # and the disk was not kind either
    rotten.write_bytes(b"x" * CHUNK)

    upstream = scripted(from_folder(folder))
    _, url = relay_process(mirrored, upstream.url)
    assert_content(make_downloader([url], tmp_path / "cache").fetch(manifest.policy, 30), files, tensors)
    asked = {target for target in upstream.seen if target.startswith("/chunks/")}
    assert asked == {f"/chunks/{last[:2]}/{last}", f"/chunks/{rotten.name[:2]}/{rotten.name}"}


def test_a_full_disk_ends_the_relay_with_the_reason(tmp_path, start_origin, monkeypatch):
    def full(self: Mirror, chunk: Chunk, data: memoryview) -> None:
        raise ResourceError("cannot write: the disk is full: free some space")

    publish(make_origin(tmp_path / "origin"), 1)
    monkeypatch.setattr(Mirror, "keep", full)
    config = RelayConfig(tmp_path / "relay", (start_origin(tmp_path / "origin").url,), RUN, KEY.public_key, port=0)
    with pytest.raises(ResourceError, match="disk is full"):
        run_relay(config, StopToken(), lambda url: None)


def test_setup_mistakes_are_one_clear_line(tmp_path: Path, start_origin: StartOrigin) -> None:
    (tmp_path / "file").write_bytes(b"")
    port = int(start_origin(tmp_path / "origin").url.rsplit(":", 1)[1])
    up = ("http://127.0.0.1:9",)
    cases = [
        (RelayConfig(tmp_path / "r", (), RUN, KEY.public_key), ConfigError, "at least one upstream"),
        (RelayConfig(tmp_path / "r", ("nonsense",), RUN, KEY.public_key), ConfigError, "not a URL"),
        (RelayConfig(tmp_path / "r", up, RUN, KEY.public_key, peers=("nonsense",)), ConfigError, "not a URL"),
        (RelayConfig(tmp_path / "file" / "r", up, RUN, KEY.public_key), ResourceError, "file"),
        (RelayConfig(tmp_path / "r", up, RUN, KEY.public_key, port=port), ResourceError, "is taken"),
    ]
    for config, error, sentence in cases:
        with pytest.raises(error, match=sentence):
            run_relay(config, StopToken(), lambda url: None)
