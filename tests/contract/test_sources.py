"""One suite for everything that can be a source: the origin's server, servers that know nothing of shoal, and relays.

    Origin ─► folder ───────────────────► origin's server, Python's, nginx ──┬─► Downloader
                 └─ boto3, PutObject ─► S3 (moto's, as a public bucket) ─────┴─► relay ─► Downloader

A client, and a relay that takes one of them as its upstream, must not be able to tell them apart by what they get.
"""

import secrets
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kit import Request, eventually
from kit.cast import WITHIN_S, Lab, ask, head_version
from kit.fork import free_port
from kit.nginx import nginx_command
from kit.s3 import Shop
from shoal.errors import VersionNotFound
from shoal.protocol import PolicyManifest, TensorView
from shoal.shardcast import Progress

KEPT = 2
FOR_EVER = "public, max-age=31536000, immutable"

SERVER = """
server {{
    listen 127.0.0.1:{port};
    root {folder};
    location ~ /\\. {{ return 404; }}
    location = /head.json {{ add_header Cache-Control no-cache; }}
    location /manifests/ {{ add_header Cache-Control "{cache}"; }}
    location /chunks/ {{ add_header Cache-Control "{cache}"; }}
}}
"""


@dataclass(frozen=True)
class Site:
    """Where a published folder is offered, and how what was published gets there."""

    url: str
    upload: Callable[[], object] = lambda: "it lies there already"
    keeps_all: bool = False  # what nobody removes


Server = Callable[[Lab, Request], AbstractContextManager[Site]]


@contextmanager
def origin_server(lab: Lab, _request: Request) -> Iterator[Site]:
    yield Site(lab.honest().url)


@contextmanager
def static_server(lab: Lab, _request: Request) -> Iterator[Site]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(lab.www))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        yield Site(f"http://127.0.0.1:{server.server_address[1]}")
        server.shutdown()
        thread.join(10)


@contextmanager
def nginx(lab: Lab, _request: Request) -> Iterator[Site]:
    port, scratch = free_port(), lab.folder / "nginx"
    command = nginx_command(scratch, SERVER.format(folder=lab.www, port=port, cache=FOR_EVER))
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        eventually(lambda: process.poll() is not None or listens(port), WITHIN_S)
        assert process.poll() is None, (scratch / "error.log").read_text()
        yield Site(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.communicate(timeout=WITHIN_S)


def listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@contextmanager
def bucket(lab: Lab, request: Request) -> Iterator[Site]:
    """Only what changed is uploaded: the head last: a client that sees it finds everything else."""
    shop: Shop = request.getfixturevalue("shop")
    name, there = f"weights-{secrets.token_hex(4)}", set[Path]()
    shop.client.create_bucket(Bucket=name)

    def upload() -> None:
        paths = {path for pattern in ("chunks/??/*", "manifests/*.json") for path in lab.www.glob(pattern)} - there
        for path in [*paths, lab.www / "head.json"]:
            cache = "no-cache" if path.name == "head.json" else FOR_EVER
            how = {"ACL": "public-read", "CacheControl": cache, "Body": path.read_bytes()}
            shop.client.put_object(Bucket=name, Key=str(path.relative_to(lab.www)), **how)
        there.update(paths)

    yield Site(f"{shop.endpoint}/{name}", upload, keeps_all=True)


@contextmanager
def relay_server(lab: Lab, request: Request, upstream: Server) -> Iterator[Site]:
    with upstream(lab, request) as site:
        relay = lab.relay("relay", site.url, keep_versions=KEPT)
        yield replace(site, url=relay.url, keeps_all=False)
        lab.stop(relay)


SERVERS: dict[str, Server] = {"origin": origin_server, "static": static_server, "nginx": nginx, "bucket": bucket}
SOURCES = {**SERVERS, **{f"relay of {name}": partial(relay_server, upstream=made) for name, made in SERVERS.items()}}


class Published(Lab):
    """A broadcast, and one source that offers what is published."""

    site: Site

    def publish(self, version: int, *arguments: Any, **options: Any) -> PolicyManifest:
        manifest = super().publish(version, *arguments, keep_versions=KEPT, **options)
        self.site.upload()
        return manifest

    def get(self, target: str) -> tuple[int, bytes]:
        return ask(self.site.url, target)

    def until_head_is(self, label: str) -> None:
        eventually(lambda: head_version(self.site) == label)


@pytest.fixture(params=SOURCES)
def published(request: Request, tmp_path: Path) -> Iterator[Published]:
    (tmp_path / "www").mkdir()
    with closing(Published(tmp_path)) as lab, SOURCES[request.param](lab, request) as lab.site:
        yield lab


def test_head_is_missing_at_first_and_then_exactly_what_was_published_is_served(published: Published) -> None:
    assert published.get("/head.json")[0] == 404
    manifest = published.publish(1)
    published.until_head_is("0.1")
    assert published.client(published.site.url).newest(WITHIN_S) == manifest.policy
    published.fetch(manifest, published.site.url)  # by now a relay has everything
    for path in published.www.rglob("*"):
        if path.is_file() and path.name != ".lock":
            assert published.get(f"/{path.relative_to(published.www)}") == (200, path.read_bytes())
    for target in ("/manifests/0.9.json", "/chunks/ab/" + "ab" * 32, "/../www/head.json", "/nothing"):
        assert published.get(target)[0] in (400, 403, 404)


def test_two_newest_versions_can_be_fetched(published: Published) -> None:
    client, manifests = published.client(published.site.url), list[PolicyManifest]()
    for version in range(3):
        manifests.append(published.publish(version))
        published.fetch(manifests[-1], client)
    published.until_head_is("0.2")
    published.fetch(manifests[1], published.site.url, name="new")
    if not published.site.keeps_all:
        eventually(lambda: published.get("/manifests/0.0.json")[0] == 404)  # a relay removes it after the new head
        with pytest.raises(VersionNotFound, match="no longer offered"):
            published.client(published.site.url, name="other").fetch(manifests[0].policy, WITHIN_S)


def test_later_version_is_fetched_as_a_delta(published: Published) -> None:
    weights, client = np.zeros(40_000, np.uint16), published.client(published.site.url)
    for version in (1, 2):
        weights[version::2000] ^= 1
        tensor = TensorView("w", "BF16", (40_000,), memoryview(weights.tobytes()))
        manifest = published.publish(version, tensors=[tensor], delta_from_bytes=0)
        progress: list[Progress] = []
        client.fetch(manifest.policy, WITHIN_S, progress.append)
        published.fetch(manifest, client)
    assert not manifest.anchor
    assert 0 < sum(progress[-1].by_source.values()) < manifest.size_bytes / 10
    published.fetch(manifest, published.site.url, name="empty")  # by way of the anchor
