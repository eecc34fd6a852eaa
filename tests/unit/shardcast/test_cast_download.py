"""The client against honest, dead, lagging and lying sources: it ends with the right bytes or the right error.

A version is compared with what was announced and with the disk before a byte of it is fetched.
"""

import logging
import os
import random
import shutil
import threading
import time
from typing import Any, cast
from unittest.mock import Mock

import pytest

from kit import Logs, Patch
from kit.cast import CHUNK, DEAD, WITHIN_S, Lab, assert_content, content, flip, says, tensor
from shoal.errors import BroadcastError, DiskError, ManifestRefused, ResourceError
from shoal.protocol import PolicyRef
from shoal.runtime import MachineLimits, StopToken
from shoal.shardcast import Downloader, Prefetch, digest_of
from shoal.shardcast.cache import PartFiles
from shoal.shardcast.connection import PoolSettings
from shoal.shardcast.tree import chunk_key

REF = PolicyRef(incarnation=0, version=1, digest="a" * 64)


def test_a_version_arrives_whole_and_its_tensors_are_views(lab: Lab) -> None:
    manifest, client = lab.publish(1), lab.client(lab.honest().url)
    assert client.newest(10) == manifest.policy
    payload = lab.fetch(manifest, client)
    assert payload.manifest == manifest
    assert all(view.data.readonly for view in payload.tensors)
    assert len({id(view.data.obj) for view in payload.tensors}) == 1


def test_fetching_again_asks_nobody(lab: Lab) -> None:
    manifest, source = lab.publish(1), lab.source()
    client = lab.client(source.url)
    lab.fetch(manifest, client)
    asked = len(source.seen)
    lab.fetch(manifest, client)
    assert len(source.seen) == asked
    source.close()
    lab.fetch(manifest, source.url)


def test_chunks_that_did_not_change_are_not_fetched_again(lab: Lab) -> None:
    files, (first, second, third) = content()
    old = lab.publish(1, files=files, tensors=[first, second, third])
    new = lab.publish(2, files=files, tensors=[first, second, tensor(third.name, 31, seed=9)])
    source = lab.source()
    client = lab.client(source.url)
    lab.fetch(old, client)
    before = len(source.asked("/chunks/"))
    lab.fetch(new, client)
    changed = {chunk.hash for chunk in new.chunks} - {chunk.hash for chunk in old.chunks}
    assert len(source.asked("/chunks/")) - before == len(changed) == 1


def test_an_empty_payload_arrives(lab: Lab) -> None:
    lab.fetch(lab.publish(0, files={"empty": b""}, tensors=[tensor("none", 0)]), lab.honest().url)


def test_only_dead_sources_is_an_error_that_names_them(lab: Lab) -> None:
    no_source = r"no source could be asked for policy 0\.1: .*127\.0\.0\.1:9 cannot be reached: Connection refused"
    with pytest.raises(BroadcastError, match=no_source):
        lab.client(DEAD).fetch(REF, 0.5)


def test_sources_and_versions_may_appear_while_a_fetch_waits(lab: Lab) -> None:
    lab.publish(1)
    files, tensors = content(2)
    client, url = lab.client(), lab.honest().url
    threading.Timer(0.2, client.set_sources, ([url],)).start()
    threading.Timer(0.4, lab.publish, (2,)).start()
    ref = PolicyRef(incarnation=0, version=2, digest=digest_of(files, tensors, CHUNK))
    assert_content(client.fetch(ref, WITHIN_S), files, tensors)


def test_a_fetch_that_failed_is_continued_where_it_stopped(lab: Lab) -> None:
    manifest = lab.publish(1)
    last = manifest.chunks[-1].hash
    partial = lab.liar({last: says(b"", 503)})
    with pytest.raises(BroadcastError, match=r"policy 0\.1 did not arrive before the deadline: 1 chunks are missing"):
        lab.client(partial.url).fetch(manifest.policy, 1)
    whole = lab.source()
    lab.fetch(manifest, whole.url)
    assert whole.asked("/chunks/") == [f"/{chunk_key(last)}"]


@pytest.mark.parametrize(("damage", "fetched"), [
    (lambda path: flip(path, CHUNK + 5), [1]), (lambda path: os.truncate(path, path.stat().st_size + 1), []),
])  # fmt: skip
def test_damaged_cached_payload_is_repaired(damage: Any, fetched: list[int], lab: Lab, caplog: Logs) -> None:
    manifest, source = lab.publish(1), lab.source()
    lab.fetch(manifest, source.url)
    assert "damaged" not in caplog.text
    path = lab.folder / "cache" / f"{manifest.policy.digest}.bin"
    damage(path)
    before = len(source.asked("/chunks/"))
    lab.fetch(manifest, source.url)  # a new process
    assert source.asked("/chunks/")[before:] == [f"/{chunk_key(manifest.chunks[one].hash)}" for one in fetched]
    assert "is damaged; it is repaired" in caplog.text
    assert path.stat().st_size == manifest.size_bytes


def test_old_payloads_are_removed_but_stay_valid_for_their_holders(lab: Lab) -> None:
    manifests = [lab.publish(version) for version in range(5)]
    client = lab.client(lab.honest().url)
    payloads = [lab.fetch(manifest, client) for manifest in manifests]
    assert len(list((lab.folder / "cache").glob("*.bin"))) == 3
    assert len(list((lab.folder / "cache").iterdir())) == 6
    assert_content(payloads[0], *content(0))


def test_a_stop_ends_a_fetch_at_once(lab: Lab) -> None:
    manifest, stop = lab.publish(1), StopToken()
    hanging = lab.liar({"/chunks/": lambda target, to: stop.set("test")})
    started = time.monotonic()
    with pytest.raises(BroadcastError, match=r"stopped \(test\) while fetching policy 0\.1"):
        lab.client(hanging.url, stop=stop).fetch(manifest.policy, 60)
    assert time.monotonic() - started < 30


def test_a_full_disk_is_a_resource_error_and_does_not_hang(lab: Lab, monkeypatch: Patch) -> None:
    manifest = lab.publish(1)
    monkeypatch.setattr(PartFiles, "keep", Mock(side_effect=ResourceError("the disk is full")))
    with pytest.raises(ResourceError, match="disk is full"):
        lab.client(lab.honest().url).fetch(manifest.policy, 60)


@pytest.mark.parametrize(("error", "traced"), [(DiskError("the disk is full"), False), (KeyError("oops"), True)])
def test_prefetch_ends_with_a_log_line_and_for_a_bug_with_a_traceback(error, traced, caplog: Logs) -> None:
    """It knows of a newer version and cannot fetch it."""
    failing = Mock(fetch=Mock(side_effect=error), head_poller=lambda: Mock(newer=lambda _wait_s: REF))
    with caplog.at_level(logging.INFO, "shoal"):
        Prefetch(cast("Downloader", failing), StopToken())._run()  # in this thread: it ends by itself
    (record,) = caplog.records
    assert "prefetching has ended" in record.getMessage()
    assert bool(record.exc_info) is traced
    assert traced or "the disk is full" in record.getMessage()


@pytest.mark.parametrize(("settings", "free", "error", "sentence"), [
    ({"max_payload_bytes": 4000}, None, ManifestRefused, r"announces \d+ bytes, and .* at most 4000"),
    ({"limits": MachineLimits(disk_bytes=1000)}, None, ResourceError,
        r"policy 0\.0 needs .* of disk .* and 1 kB are allowed .*--max-disk"),
    ({"limits": MachineLimits()}, 100, ResourceError, r"cannot write .*\.part: the disk is full: free some space"),
])  # fmt: skip
def test_a_version_that_is_too_large_is_refused_before_it_is_fetched(lab, monkeypatch, settings, free, error, sentence):
    manifest, source = lab.publish(0), lab.source()
    if free is not None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _path: Mock(free=free))
    with pytest.raises(error, match=sentence):
        lab.client(source.url, download=settings).fetch(manifest.policy, 10)
    assert source.asked("/chunks/") == []
    assert list((lab.folder / "cache").glob("*.*")) == []
    lab.fetch(manifest, source.url, download={"max_payload_bytes": manifest.size_bytes})


def test_old_versions_make_room_for_a_new_one_the_least_recently_used_first(lab: Lab) -> None:
    first, second, third = (lab.publish(number, files={"file": bytes(40_000 + number)}) for number in range(3))
    room = MachineLimits(disk_bytes=120_000)  # two versions, their manifests, and nothing else
    client = lab.client(lab.source().url, download={"kept_payloads": 4, "limits": room})
    lab.fetch(first, client)
    lab.fetch(second, client)
    for path in (lab.folder / "cache").glob(f"{second.policy.digest}.*"):
        os.utime(path, (1, 1))  # a clock's ticks may be longer than a fetch
    lab.fetch(third, client)
    here = {path.stem for path in (lab.folder / "cache").glob("*.bin")}
    assert here == {first.policy.digest, third.policy.digest}


def test_interrupted_fetch_counts_once(lab: Lab) -> None:
    """What has come of a version before is not counted beside the version itself."""
    manifest, source = lab.publish(0, files={"file": bytes(range(256)) * 400}), lab.source()
    lab.fetch(manifest, source.url)
    flip(lab.folder / "cache" / f"{manifest.policy.digest}.bin", -1)
    lab.fetch(manifest, source.url, download={"limits": MachineLimits(disk_bytes=130_000)})


def test_throttled_client_is_slow_has_fewer_connections_and_blames_no_source(lab: Lab) -> None:
    manifest = lab.publish(0, files={"file": random.Random(0).randbytes(250_000)})
    started_s = time.monotonic()
    lab.fetch(manifest, lab.source().url, download={"pool": PoolSettings.throttled(125_000)})
    assert time.monotonic() - started_s > 0.9  # the first second's worth may come at once
    slow, fast = PoolSettings.throttled(100_000), PoolSettings.throttled(10**9)
    assert (slow.connections, slow.min_rate_bytes_s) == (1, 25_000)
    assert (fast.connections, fast.min_rate_bytes_s) == (PoolSettings().connections, PoolSettings().min_rate_bytes_s)
    assert PoolSettings.throttled(None) == PoolSettings()
