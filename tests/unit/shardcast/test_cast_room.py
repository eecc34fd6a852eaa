"""A version is compared with what was announced and with the disk before a byte of it is fetched; and the throttle."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import time
from pathlib import Path

import pytest

from kit.cast import KEY, RUN, ScriptedSource, assert_content, content, from_folder, make_origin, publish
from shoal.errors import ManifestRefused, ResourceError
from shoal.runtime.limits import MachineLimits
from shoal.runtime.stop import StopToken
from shoal.shardcast import Content, Downloader, DownloadSettings
from shoal.shardcast.limits import PoolSettings


@pytest.fixture
def source(tmp_path: Path):
    made = ScriptedSource(from_folder(tmp_path / "www"))
    yield made
    made.close()


def client(source: ScriptedSource, folder: Path, **settings: object) -> Downloader:
    return Downloader([source.url], RUN, KEY.public_key, folder, StopToken(), DownloadSettings(**settings))


def chunks_asked(source: ScriptedSource) -> list[str]:
    return [target for target in source.seen if "chunks/" in target]


def test_version_larger_than_announced_is_refused_before_it_is_fetched(tmp_path, source):
    manifest = publish(make_origin(tmp_path / "www"), 0)
    with pytest.raises(ManifestRefused, match=rf"announces {manifest.size_bytes} bytes, and .* at most 4000"):
        client(source, tmp_path / "cache", max_payload_bytes=4000).fetch(manifest.policy, 10)
    assert chunks_asked(source) == []
    assert list((tmp_path / "cache").glob("*.*")) == []
    fitting = client(source, tmp_path / "cache", max_payload_bytes=manifest.size_bytes)
    assert_content(fitting.fetch(manifest.policy, 10), *content(0))


def test_version_that_the_disk_limit_does_not_allow_is_refused_before_it_is_written(tmp_path, source):
    manifest = publish(make_origin(tmp_path / "www"), 0)
    downloader = client(source, tmp_path / "cache", limits=MachineLimits(disk_bytes=1000))
    with pytest.raises(ResourceError, match=r"policy 0\.0 needs .* of disk .* and 1 kB are allowed .*--max-disk"):
        downloader.fetch(manifest.policy, 10)
    assert chunks_asked(source) == []
    assert [path.suffix for path in (tmp_path / "cache").glob("*.*")] == []


def test_version_that_does_not_fit_on_the_disk_says_that_it_is_full(tmp_path, source, monkeypatch):
    manifest = make_origin(tmp_path / "www").publish(0, Content.of({"file": bytes(200_000)}))
    used = dataclasses.make_dataclass("Usage", ["free"])(100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: used)
    with pytest.raises(ResourceError, match=r"cannot write .*\.part: the disk is full: free some space"):
        client(source, tmp_path / "cache", limits=MachineLimits()).fetch(manifest.policy, 10)
    assert chunks_asked(source) == []


def test_old_versions_make_room_for_a_new_one_the_least_recently_used_first(tmp_path, source):
    origin = make_origin(tmp_path / "www")
    manifests = [origin.publish(number, Content.of({"file": bytes(40_000 + number)})) for number in range(4)]
    room = MachineLimits(disk_bytes=120_000)  # two versions, their manifests, and nothing else
    downloader = client(source, tmp_path / "cache", kept_payloads=4, limits=room)
    for number in (0, 1):
        downloader.fetch(manifests[number].policy, 10)
    for path in (tmp_path / "cache").glob(f"{manifests[1].policy.digest}.*"):
        os.utime(path, (1, 1))  # a clock's ticks may be longer than a fetch
    downloader.fetch(manifests[2].policy, 10)
    here = {path.stem for path in (tmp_path / "cache").glob("*.bin")}
    assert here == {manifests[0].policy.digest, manifests[2].policy.digest}


def test_interrupted_fetch_counts_once(tmp_path, source):
    """What has come of a version before is not counted beside the version itself."""
    manifest = make_origin(tmp_path / "www").publish(0, Content.of({"file": bytes(range(256)) * 400}))
    cache = tmp_path / "cache"
    first = client(source, cache)
    first.fetch(manifest.policy, 10)
    first.close()
    whole = cache / f"{manifest.policy.digest}.bin"
    whole.write_bytes(whole.read_bytes()[:-1] + b"?")
    again = client(source, cache, limits=MachineLimits(disk_bytes=130_000))
    assert bytes(again.fetch(manifest.policy, 10).files["file"]) == bytes(range(256)) * 400


def test_throttled_client_is_not_faster_than_it_may_be(tmp_path, source):
    manifest = make_origin(tmp_path / "www").publish(0, Content.of({"file": random.Random(0).randbytes(250_000)}))
    downloader = client(source, tmp_path / "cache", pool=PoolSettings.throttled(125_000))
    started_s = time.monotonic()
    assert len(downloader.fetch(manifest.policy, 30).files["file"]) == 250_000
    assert time.monotonic() - started_s > 0.9  # the first second's worth may come at once


def test_throttled_client_has_fewer_connections_and_leaves_no_source_for_its_own_slowness():
    slow, fast = PoolSettings.throttled(100_000), PoolSettings.throttled(10**9)
    assert (slow.connections, slow.min_rate_bytes_s) == (1, 25_000)
    assert (fast.connections, fast.min_rate_bytes_s) == (PoolSettings().connections, PoolSettings().min_rate_bytes_s)
    assert PoolSettings.throttled(None) == PoolSettings()
