"""The client against honest, dead, lagging and lying sources: it ends with the right bytes or the right error."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from kit.cast import (
    CHUNK,
    Handler,
    Running,
    ScriptedSource,
    assert_content,
    content,
    from_folder,
    instead,
    make_downloader,
    make_origin,
    publish,
    reply,
    tensor,
)
from shoal.errors import BroadcastError, DiskError, ManifestRefused, ResourceError
from shoal.protocol import PolicyRef
from shoal.runtime.stop import StopToken
from shoal.shardcast import Content, Downloader, Prefetch, digest_of
from shoal.shardcast.cache import PayloadFile

Scripted = Callable[[Handler], ScriptedSource]
Start = Callable[[Path], Running]

DEAD = "http://127.0.0.1:9"  # the discard port: nobody listens there


def chunk_requests(source: ScriptedSource) -> list[str]:
    return [target for target in source.seen if target.startswith("/chunks/")]


def test_a_version_arrives_whole_and_its_tensors_are_views(tmp_path: Path, start_origin: Start) -> None:
    manifest = publish(make_origin(tmp_path / "origin"), 1)
    downloader = make_downloader([start_origin(tmp_path / "origin").url], tmp_path / "cache")
    payload = downloader.fetch(downloader.newest(10), 10)
    assert payload.manifest == manifest
    assert_content(payload, *content(1))
    assert all(view.data.readonly for view in payload.tensors)
    assert len({id(view.data.obj) for view in payload.tensors}) == 1


def test_fetching_again_asks_nobody(tmp_path: Path, scripted: Scripted) -> None:
    manifest = publish(make_origin(tmp_path / "origin"), 1)
    source = scripted(from_folder(tmp_path / "origin"))
    downloader = make_downloader([source.url], tmp_path / "cache")
    first = downloader.fetch(manifest.policy, 10)
    asked = len(source.seen)
    assert_content(downloader.fetch(manifest.policy, 10), first.files, first.tensors)
    assert len(source.seen) == asked
    source.close()
    assert_content(make_downloader([source.url], tmp_path / "cache").fetch(manifest.policy, 10), *content(1))


def test_chunks_that_did_not_change_are_not_fetched_again(tmp_path: Path, scripted: Scripted) -> None:
    origin = make_origin(tmp_path / "origin")
    files, (first, second, third) = content()
    old = origin.publish(1, Content.of(files, [first, second, third]))
    new = origin.publish(2, Content.of(files, [first, second, tensor(third.name, 31, seed=9)]))
    source = scripted(from_folder(tmp_path / "origin"))
    downloader = make_downloader([source.url], tmp_path / "cache")
    downloader.fetch(old.policy, 10)
    before = len(chunk_requests(source))
    downloader.fetch(new.policy, 10)
    changed = {chunk.hash for chunk in new.chunks} - {chunk.hash for chunk in old.chunks}
    assert len(chunk_requests(source)) - before == len(changed) == 1


def test_equal_chunks_of_one_version_are_fetched_once(tmp_path: Path, scripted: Scripted) -> None:
    manifest = make_origin(tmp_path / "origin").publish(1, Content.of({"zeros": bytes(5 * CHUNK)}, []))
    source = scripted(from_folder(tmp_path / "origin"))
    payload = make_downloader([source.url], tmp_path / "cache").fetch(manifest.policy, 10)
    assert payload.files == {"zeros": bytes(5 * CHUNK)}
    assert len(chunk_requests(source)) == 1


def test_an_empty_payload_arrives(tmp_path: Path, start_origin: Start) -> None:
    manifest = make_origin(tmp_path / "origin").publish(0, Content.of({"empty": b""}, [tensor("none", 0)]))
    payload = make_downloader([start_origin(tmp_path / "origin").url], tmp_path / "cache").fetch(manifest.policy, 10)
    assert payload.files == {"empty": b""}
    assert payload.tensors[0].data.nbytes == 0


def test_only_dead_sources_is_an_error_that_names_them(tmp_path: Path) -> None:
    ref = PolicyRef(incarnation=0, version=1, digest="a" * 64)
    with pytest.raises(
        BroadcastError,
        match=r"no source could be asked for policy 0\.1: .*127\.0\.0\.1:9 cannot be reached: Connection refused",
    ):
        make_downloader([DEAD], tmp_path / "cache").fetch(ref, 0.5)


def test_sources_may_appear_while_a_fetch_waits(tmp_path: Path, start_origin: Start) -> None:
    manifest = publish(make_origin(tmp_path / "origin"), 1)
    downloader = make_downloader([], tmp_path / "cache")
    url = start_origin(tmp_path / "origin").url
    later = threading.Timer(0.2, downloader.set_sources, ([url],))
    later.start()
    assert_content(downloader.fetch(manifest.policy, 20), *content(1))


def test_a_version_not_published_yet_is_waited_for(tmp_path: Path, start_origin: Start) -> None:
    origin = make_origin(tmp_path / "origin")
    publish(origin, 1)
    files, tensors = content(2)
    ref = PolicyRef(incarnation=0, version=2, digest=digest_of(files, tensors, CHUNK))
    downloader = make_downloader([start_origin(tmp_path / "origin").url], tmp_path / "cache")
    threading.Timer(0.3, publish, (origin, 2)).start()
    assert_content(downloader.fetch(ref, 20), files, tensors)


def test_other_weights_than_the_lease_names_are_refused(tmp_path: Path, start_origin: Start) -> None:
    manifest = publish(make_origin(tmp_path / "origin"), 1)
    wrong = manifest.policy.model_copy(update={"digest": "0" * 64})
    with pytest.raises(ManifestRefused, match="digest"):
        make_downloader([start_origin(tmp_path / "origin").url], tmp_path / "cache").fetch(wrong, 10)


def test_a_fetch_that_failed_is_continued_where_it_stopped(tmp_path: Path, scripted: Scripted) -> None:
    folder = tmp_path / "origin"
    manifest = publish(make_origin(folder), 1)
    last = manifest.chunks[-1].hash
    partial = scripted(instead(from_folder(folder), {last: lambda target, to: reply(to, 503, b"")}))
    with pytest.raises(BroadcastError, match=r"policy 0\.1 did not arrive before the deadline: 1 chunks are missing"):
        make_downloader([partial.url], tmp_path / "cache").fetch(manifest.policy, 1)
    whole = scripted(from_folder(folder))
    assert_content(make_downloader([whole.url], tmp_path / "cache").fetch(manifest.policy, 10), *content(1))
    assert chunk_requests(whole) == [f"/chunks/{last[:2]}/{last}"]


def test_a_cached_payload_that_rotted_is_mended_not_believed(tmp_path: Path, scripted: Scripted) -> None:
    folder = tmp_path / "origin"
    manifest = publish(make_origin(folder), 1)
    source = scripted(from_folder(folder))
    make_downloader([source.url], tmp_path / "cache").fetch(manifest.policy, 10)
    cached = tmp_path / "cache" / f"{manifest.policy.digest}.bin"
    data = bytearray(cached.read_bytes())
    data[CHUNK + 5] ^= 1
    cached.write_bytes(data)
    before = len(chunk_requests(source))
    again = make_downloader([source.url], tmp_path / "cache")  # a new process
    assert_content(again.fetch(manifest.policy, 10), *content(1))
    rotten = manifest.chunks[1].hash
    assert chunk_requests(source)[before:] == [f"/chunks/{rotten[:2]}/{rotten}"]


def test_old_payloads_are_removed_but_stay_valid_for_their_holders(tmp_path: Path, start_origin: Start) -> None:
    origin = make_origin(tmp_path / "origin")
    manifests = [publish(origin, version) for version in range(5)]
    downloader = make_downloader([start_origin(tmp_path / "origin").url], tmp_path / "cache")
    payloads = [downloader.fetch(manifest.policy, 10) for manifest in manifests]
    assert len(list((tmp_path / "cache").glob("*.bin"))) == 3
    assert len(list((tmp_path / "cache").iterdir())) == 6
    assert_content(payloads[0], *content(0))


def test_a_stop_ends_a_fetch_at_once(tmp_path: Path, scripted: Scripted) -> None:
    folder = tmp_path / "origin"
    manifest = publish(make_origin(folder), 1)
    stop = StopToken()
    hanging = scripted(instead(from_folder(folder), {"/chunks/": lambda target, to: stop.set("test")}))
    started = time.monotonic()
    with pytest.raises(BroadcastError, match=r"stopped \(test\) while fetching policy 0\.1"):
        make_downloader([hanging.url], tmp_path / "cache", stop).fetch(manifest.policy, 60)
    assert time.monotonic() - started < 4


def test_a_full_disk_is_a_resource_error_and_does_not_hang(tmp_path, start_origin, monkeypatch):
    def full(self: PayloadFile, chunk: object, data: memoryview) -> None:
        raise ResourceError("cannot write: the disk is full: free some space")

    manifest = publish(make_origin(tmp_path / "origin"), 1)
    monkeypatch.setattr(PayloadFile, "write", full)
    with pytest.raises(ResourceError, match="disk is full"):
        make_downloader([start_origin(tmp_path / "origin").url], tmp_path / "cache").fetch(manifest.policy, 60)


class Failing:
    """A downloader, and its own follower, that knows of a newer version and cannot fetch it."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def follower(self) -> Failing:
        return self

    def newer(self, _wait_s: float) -> PolicyRef:
        return PolicyRef(incarnation=0, version=1, digest="ab" * 32)

    def fetch(self, *_arguments: Any, **_options: Any) -> None:
        raise self._error

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("error", "traced"), [(DiskError("the disk is full"), False), (KeyError("oops"), True)])
def test_fetching_ahead_ends_with_a_line_or_for_a_bug_with_a_traceback(error, traced, caplog):
    prefetch = Prefetch(cast("Downloader", Failing(error)), StopToken())
    with caplog.at_level(logging.INFO, "shoal"):
        prefetch._run()  # in this thread: it ends by itself
    (record,) = caplog.records
    assert "fetching ahead has ended" in record.getMessage()
    assert bool(record.exc_info) is traced
    assert traced or "the disk is full" in record.getMessage()
