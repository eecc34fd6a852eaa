"""One suite for everything that can be a source: the origin's server, servers that know nothing of shoal, and relays.

    Origin ─► folder ───────────────────► origin's server, Python's, nginx ──┬─► Downloader
                 └─ boto3, PutObject ─► S3 (moto's, as a public bucket) ─────┴─► relay ─► Downloader

A client, and a relay that takes one of them as its upstream, must not be able to tell them apart by what they get.
"""

from __future__ import annotations

import json
import secrets
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from kit import Request, eventually
from kit.cast import Running, ask
from kit.s3 import Shop
from shoal.errors import VersionNotFound
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
    run_origin,
    run_relay,
)

KEY = SigningKey.from_seed(b"\x07" * 32)
RUN = "contract"
KEPT = 2
WITHIN_S = 20.0
FOR_EVER = "public, max-age=31536000, immutable"

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
        location /manifests/ {{ add_header Cache-Control "{cache}"; }}
        location /chunks/ {{ add_header Cache-Control "{cache}"; }}
    }}
}}
"""


@dataclass(frozen=True)
class Site:
    """Where a published folder is offered, and how what was published gets there."""

    url: str
    upload: Callable[[], object] = lambda: "it lies there already"
    keeps_all: bool = False  # what nobody removes


Server = Callable[[Path, Request], AbstractContextManager[Site]]


@contextmanager
def running(run: Callable[[StopToken, Callable[[str], None]], None]) -> Iterator[str]:
    server = Running(run)
    yield server.url
    server.end()


@contextmanager
def origin_server(folder: Path, _request: Request) -> Iterator[Site]:
    with running(partial(run_origin, folder, "127.0.0.1", 0)) as url:
        yield Site(url)


@contextmanager
def static_server(folder: Path, _request: Request) -> Iterator[Site]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        yield Site(f"http://127.0.0.1:{server.server_address[1]}")
        server.shutdown()
        thread.join(10)


@contextmanager
def nginx(folder: Path, _request: Request) -> Iterator[Site]:
    program = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin:/opt/homebrew/bin")
    if program is None:
        pytest.skip("nginx is not installed: install it (Debian: apt-get install nginx-light) to run this test")
    scratch = folder.parent / "nginx"
    scratch.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    configuration = scratch / "nginx.conf"
    configuration.write_text(NGINX.format(scratch=scratch, folder=folder, port=port, cache=FOR_EVER))
    command = [program, "-p", str(scratch), "-e", str(scratch / "error.log"), "-c", str(configuration)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        eventually(lambda: process.poll() is not None or listens(port), WITHIN_S)
        assert process.poll() is None, (scratch / "error.log").read_text()
        yield Site(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.communicate(timeout=WITHIN_S)


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@contextmanager
def bucket(folder: Path, request: Request) -> Iterator[Site]:
    """Only what changed is uploaded: the head last, so that whoever sees it finds everything else."""
    shop: Shop = request.getfixturevalue("shop")
    name, there = f"weights-{secrets.token_hex(4)}", set[Path]()
    shop.client.create_bucket(Bucket=name)

    def upload() -> None:
        paths = {path for pattern in ("chunks/??/*", "manifests/*.json") for path in folder.glob(pattern)} - there
        for path in [*paths, folder / "head.json"]:
            cache = "no-cache" if path.name == "head.json" else FOR_EVER
            how = {"ACL": "public-read", "CacheControl": cache, "Body": path.read_bytes()}
            shop.client.put_object(Bucket=name, Key=str(path.relative_to(folder)), **how)
        there.update(paths)

    yield Site(f"{shop.endpoint}/{name}", upload, keeps_all=True)


@contextmanager
def relay_server(folder: Path, request: Request, upstream: Server) -> Iterator[Site]:
    with upstream(folder, request) as site:
        settings, relay = RelaySettings(kept_versions=KEPT), folder.parent / "relay"
        config = RelayConfig(relay, (site.url,), RUN, KEY.public_key, "127.0.0.1", 0, settings, poll_s=0.05)
        with running(partial(run_relay, config)) as url:
            yield replace(site, url=url, keeps_all=False)


SERVERS: dict[str, Server] = {"origin": origin_server, "static": static_server, "nginx": nginx, "bucket": bucket}
SOURCES = {**SERVERS, **{f"relay of {name}": partial(relay_server, upstream=made) for name, made in SERVERS.items()}}


class Published:
    """An origin, and one source that offers what it publishes."""

    def __init__(self, folder: Path, site: Site, **settings: int) -> None:
        self.folder = folder
        self.site = site
        chosen = OriginSettings(chunk_size_bytes=4096, kept_versions=KEPT, **settings)
        self.origin = Origin(folder, RUN, KEY, settings=chosen)

    def publish(self, version: int, tensor: TensorView | None = None) -> PolicyManifest:
        manifest = self.origin.publish(version, Content.of({"config.json": b"{}"}, [tensor or self.tensor(version)]))
        self.site.upload()
        return manifest

    def tensor(self, version: int) -> TensorView:
        return TensorView("w", "F32", (5000,), memoryview(np.random.default_rng(version).bytes(20_000)))

    def downloader(self, name: str = "cache") -> Downloader:
        return Downloader([self.site.url], RUN, KEY.public_key, self.folder.parent / name, StopToken())

    def get(self, target: str) -> tuple[int, bytes]:
        return ask(self.site.url, target)

    def until_head_is(self, version: int) -> None:
        def is_head() -> bool:
            status, body = self.get("/head.json?wait_s=1")
            return status == 200 and json.loads(body)["document"]["policy"]["version"] == version

        eventually(is_head, WITHIN_S)

    def until_gone(self, version: int) -> None:
        """A relay serves the new head first and removes old versions after that."""
        eventually(lambda: self.get(f"/manifests/0.{version}.json")[0] == 404, WITHIN_S)


@pytest.fixture(params=SOURCES)
def site(request: Request, tmp_path: Path) -> Iterator[Site]:
    (tmp_path / "origin").mkdir()
    with SOURCES[request.param](tmp_path / "origin", request) as site:
        yield site


@pytest.fixture
def published(tmp_path: Path, site: Site) -> Published:
    return Published(tmp_path / "origin", site)


def assert_is(payload: Payload, tensor: TensorView) -> None:
    assert payload.files == {"config.json": b"{}"}
    assert bytes(payload.tensors[0].data) == bytes(tensor.data)


def test_a_source_has_no_head_before_anything_is_published_and_then_the_newest(published: Published) -> None:
    assert published.get("/head.json")[0] == 404
    manifest = published.publish(1)
    published.until_head_is(1)
    assert published.downloader().newest(WITHIN_S) == manifest.policy


def test_it_serves_the_very_bytes_that_were_published_and_nothing_else(published: Published) -> None:
    manifest = published.publish(1)
    published.until_head_is(1)
    published.downloader().fetch(manifest.policy, WITHIN_S)  # by now a relay has everything
    for path in published.folder.rglob("*"):
        if path.is_file() and path.name != ".lock":
            assert published.get(f"/{path.relative_to(published.folder)}") == (200, path.read_bytes())
    for target in ("/manifests/0.9.json", "/chunks/ab/" + "ab" * 32, "/../origin/head.json", "/nothing"):
        assert published.get(target)[0] in (400, 403, 404)


def test_the_newest_version_and_the_one_before_can_be_fetched_and_older_ones_are_gone(published: Published) -> None:
    downloader, manifests = published.downloader(), list[PolicyManifest]()
    for version in range(3):
        manifests.append(published.publish(version))
        assert_is(downloader.fetch(manifests[-1].policy, WITHIN_S), published.tensor(version))
    published.until_head_is(2)
    assert_is(published.downloader("new").fetch(manifests[1].policy, WITHIN_S), published.tensor(1))
    if not published.site.keeps_all:
        published.until_gone(0)
        with pytest.raises(VersionNotFound, match="no longer offered"):
            published.downloader("other").fetch(manifests[0].policy, WITHIN_S)


def test_a_later_version_is_fetched_by_its_difference(tmp_path: Path, site: Site) -> None:
    published, weights = Published(tmp_path / "origin", site, delta_from_bytes=0), np.zeros(40_000, np.uint16)
    for version in (1, 2):
        weights[version::2000] ^= 1
        tensor = TensorView("w", "BF16", (40_000,), memoryview(weights.tobytes()))
        manifest = published.publish(version, tensor)
        progress: list[Progress] = []
        assert_is(published.downloader().fetch(manifest.policy, WITHIN_S, progress.append), tensor)
    assert not manifest.anchor
    assert 0 < sum(progress[-1].by_source.values()) < manifest.size_bytes / 10
    assert_is(published.downloader("empty").fetch(manifest.policy, WITHIN_S), tensor)  # by way of the anchor
