"""The published tree behind servers that know nothing of shoal: nginx, and a bucket that speaks S3.

    Origin ─► folder ──────────────► nginx ──┬─► Downloader
                 └─ boto3, PutObject ─► S3 ──┴─► relay ─► Downloader

Both are the real thing: nginx as a process of this user, with a configuration that the test writes; the bucket as an
HTTP server that is filled by signed S3 requests and read without any, as a public bucket or a CDN in front of it is.
Where one of them is not installed its tests are skipped and say what to install.
"""

from __future__ import annotations

import json
import secrets
import shutil
import socket
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kit import Request
from shoal.protocol import PolicyManifest, SigningKey, TensorView
from shoal.runtime.stop import StopToken
from shoal.shardcast import (
    Content,
    Downloader,
    Origin,
    OriginSettings,
    Payload,
    Progress,
    RelayConfig,
    RelaySettings,
    run_relay,
)
from shoal.shardcast.connection import Connection, Deadline

KEY = SigningKey.from_seed(b"\x0b" * 32)
RUN = "static"
CHUNK_BYTES = 16 * 1024
VALUES = 100_000
WITHIN_S = 30.0

NGINX = """
daemon off;
master_process off;
worker_processes 1;
pid {scratch}/nginx.pid;
error_log {scratch}/error.log;
events {{ worker_connections 256; }}
http {{
    access_log off;
    sendfile on;
    client_body_temp_path {scratch}/body;
    proxy_temp_path {scratch}/proxy;
    fastcgi_temp_path {scratch}/fastcgi;
    uwsgi_temp_path {scratch}/uwsgi;
    scgi_temp_path {scratch}/scgi;
    server {{
        listen 127.0.0.1:{port};
        root {folder};
        location ~ /\\. {{ return 404; }}
        location = /head.json {{ add_header Cache-Control no-cache; }}
        location /manifests/ {{ add_header Cache-Control "public, max-age=31536000, immutable"; }}
        location /chunks/ {{ add_header Cache-Control "public, max-age=31536000, immutable"; }}
    }}
}}
"""


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < end, f"not in time: {what}"
        threading.Event().wait(0.02)


def get(url: str, target: str) -> tuple[int, bytes]:
    connection = Connection(url, StopToken())
    answer = connection.get(target, Deadline(WITHIN_S))
    body = connection.read(1 << 20, Deadline(WITHIN_S))
    connection.close()
    return answer.status, body


class Site(ABC):
    """A folder that an origin publishes into, and a static server that offers it."""

    url: str

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        settings = OriginSettings(chunk_size_bytes=CHUNK_BYTES, kept_versions=2, delta_from_bytes=0)
        self.origin = Origin(folder, RUN, KEY, settings=settings)
        self._weights = np.random.default_rng(3).integers(0, 2**15, VALUES, dtype=np.uint16)

    def publish(self, version: int) -> tuple[PolicyManifest, bytes]:
        """A version that differs a little from the one before, so that it is offered as a delta; and its weights."""
        self._weights[version :: VALUES // 50] ^= 1
        data = self._weights.tobytes()
        content = Content.of({"config.json": b"{}"}, [TensorView("w", "BF16", (VALUES,), memoryview(data))])
        manifest = self.origin.publish(version, content)
        self.upload()
        return manifest, data

    @abstractmethod
    def upload(self) -> None:
        """Bring what was published to where it is served from."""


class NginxSite(Site):
    def upload(self) -> None:
        """It lies there already."""


class BucketSite(Site):
    """Only what changed is uploaded: the head last, so that whoever sees it finds everything else."""

    def __init__(self, folder: Path, client: Any, server_url: str) -> None:
        super().__init__(folder)
        self._client = client
        self._there: set[str] = set()
        self._bucket = f"weights-{secrets.token_hex(4)}"  # the server's memory outlives the server
        client.create_bucket(Bucket=self._bucket)
        self.url = f"{server_url}/{self._bucket}"

    def upload(self) -> None:
        paths = [path for pattern in ("chunks/??/*", "manifests/*.json") for path in self.folder.glob(pattern)]
        for path in [*paths, self.folder / "head.json"]:
            key = str(path.relative_to(self.folder))
            if key not in self._there or path.name == "head.json":
                cache = "no-cache" if path.name == "head.json" else "public, max-age=31536000, immutable"
                data = path.read_bytes()
                self._client.put_object(Bucket=self._bucket, Key=key, Body=data, ACL="public-read", CacheControl=cache)
                self._there.add(key)


@contextmanager
def nginx(folder: Path) -> Iterator[NginxSite]:
    program = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin:/opt/homebrew/bin")
    if program is None:
        pytest.skip("nginx is not installed: install it (Debian: apt-get install nginx-light) to run this test")
    site, scratch = NginxSite(folder / "origin"), folder / "nginx"
    scratch.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    site.url = f"http://127.0.0.1:{port}"
    configuration = scratch / "nginx.conf"
    configuration.write_text(NGINX.format(scratch=scratch, folder=site.folder, port=port))
    command = [program, "-p", str(scratch), "-e", str(scratch / "error.log"), "-c", str(configuration)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        until(lambda: process.poll() is not None or _listens(port), "nginx listens")
        assert process.poll() is None, (scratch / "error.log").read_text()
        yield site
    finally:
        process.terminate()
        process.communicate(timeout=WITHIN_S)


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@contextmanager
def bucket(folder: Path) -> Iterator[BucketSite]:
    reason = "an S3 server is not installed: pip install 'moto[s3]' flask flask-cors, or .[dev], to run this test"
    moto = pytest.importorskip("moto.server", reason=reason)
    boto3 = pytest.importorskip("boto3", reason=reason)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        client = boto3.client(
            "s3", endpoint_url=url, aws_access_key_id="test", aws_secret_access_key="test", region_name="us-east-1"
        )
        yield BucketSite(folder / "origin", client, url)
        client.close()
    finally:
        server.stop()


SITES = {"nginx": nginx, "bucket": bucket}


@pytest.fixture(params=SITES)
def site(request: Request, tmp_path: Path) -> Iterator[Site]:
    with SITES[request.param](tmp_path) as found:
        yield found


@contextmanager
def relay(folder: Path, upstream: str) -> Iterator[str]:
    stop, url, done = StopToken(), Future[str](), Future[None]()
    config = RelayConfig(
        folder, (upstream,), RUN, KEY.public_key, "127.0.0.1", 0, RelaySettings(kept_versions=2), poll_s=0.05
    )

    def run() -> None:
        try:
            run_relay(config, stop, url.set_result)
            done.set_result(None)
        except Exception as error:  # noqa: BLE001  raised where the test waits
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        yield url.result(WITHIN_S)
    finally:
        stop.set("the test ends")
        done.result(WITHIN_S)


def is_whole(url: str, label: str) -> bool:
    health = json.loads(get(url, "/health")[1])
    return bool(health["head"] == label and health["missing_chunks"] == 0)


def fetched(url: str, cache: Path, manifest: PolicyManifest, seen: list[Progress] | None = None) -> Payload:
    downloader = Downloader([url], RUN, KEY.public_key, cache, StopToken())
    try:
        assert downloader.newest(WITHIN_S) == manifest.policy
        return downloader.fetch(manifest.policy, WITHIN_S, ([] if seen is None else seen).append)
    finally:
        downloader.close()


def assert_is(payload: Payload, data: bytes) -> None:
    assert payload.files == {"config.json": b"{}"}
    assert bytes(payload.tensors[0].data) == data


def test_a_client_fetches_from_it_and_a_later_version_too(site: Site, tmp_path: Path) -> None:
    manifest, data = site.publish(1)
    assert manifest.anchor
    assert_is(fetched(site.url, tmp_path / "cache", manifest), data)
    later, data = site.publish(2)
    assert not later.anchor
    progress: list[Progress] = []
    assert_is(fetched(site.url, tmp_path / "cache", later, progress), data)
    assert 0 < sum(progress[-1].by_source.values()) < later.size_bytes / 10  # by its delta
    assert_is(fetched(site.url, tmp_path / "empty", later), data)  # by way of the anchor


def test_a_relay_mirrors_it_and_a_later_version_too(site: Site, tmp_path: Path) -> None:
    manifest, data = site.publish(1)
    with relay(tmp_path / "relay", site.url) as url:
        until(partial(is_whole, url, "0.1"), "the relay has version 1")
        assert_is(fetched(url, tmp_path / "cache", manifest), data)
        later, data = site.publish(2)
        until(partial(is_whole, url, "0.2"), "the relay has version 2")
        assert_is(fetched(url, tmp_path / "cache", later), data)
    here = {path.relative_to(tmp_path / "relay") for path in (tmp_path / "relay").glob("[cm]*/**/*") if path.is_file()}
    published = {path.relative_to(site.folder) for path in site.folder.glob("[cm]*/**/*") if path.is_file()}
    assert here == published


def test_a_relay_started_before_anything_is_published_waits_for_it(site: Site, tmp_path: Path) -> None:
    with relay(tmp_path / "relay", site.url) as url:
        assert get(url, "/head.json")[0] == 404
        manifest, data = site.publish(1)
        until(partial(is_whole, url, "0.1"), "the relay has version 1")
        assert_is(fetched(url, tmp_path / "cache", manifest), data)


def test_it_serves_the_very_bytes_and_nothing_beside_the_tree(site: Site) -> None:
    site.publish(1)
    for pattern in ("head.json", "manifests/*.json", "chunks/??/*"):
        for path in site.folder.glob(pattern):
            assert get(site.url, f"/{path.relative_to(site.folder)}") == (200, path.read_bytes())
    for target in ("/have/0.1", "/manifests/0.9.json", "/.lock", "/chunks/ab/" + "ab" * 32):
        assert get(site.url, target)[0] in (403, 404)
