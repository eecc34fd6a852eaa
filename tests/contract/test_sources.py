"""One suite for everything that can be a source: the origin's server, a relay, and a plain static file server.

A client, and a relay that takes one of them as its upstream, must not be able to tell them apart by what they get.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from kit import Request
from kit.cast import Running, ask, eventually
from shoal.errors import VersionNotFound
from shoal.protocol import PolicyManifest, SigningKey, TensorView
from shoal.runtime.stop import StopToken
from shoal.shardcast import (
    Content,
    Downloader,
    Origin,
    OriginSettings,
    Payload,
    RelayConfig,
    RelaySettings,
    run_origin,
    run_relay,
)

KEY = SigningKey.from_seed(b"\x07" * 32)
RUN = "contract"
KEPT = 2
WITHIN_S = 20.0


@contextmanager
def running(run: Callable[[StopToken, Callable[[str], None]], None]) -> Iterator[str]:
    server = Running(run)
    yield server.url
    server.end()


def origin_server(folder: Path) -> AbstractContextManager[str]:
    return running(partial(run_origin, folder, "127.0.0.1", 0))


@contextmanager
def static_server(folder: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join(10)


@contextmanager
def relay_server(folder: Path, upstream: Callable[[Path], AbstractContextManager[str]]) -> Iterator[str]:
    with upstream(folder) as url:
        settings, relay = RelaySettings(kept_versions=KEPT), folder.parent / "relay"
        config = RelayConfig(relay, (url,), RUN, KEY.public_key, "127.0.0.1", 0, settings, poll_s=0.05)
        with running(partial(run_relay, config)) as relay_url:
            yield relay_url


SOURCES: dict[str, Callable[[Path], AbstractContextManager[str]]] = {
    "origin": origin_server,
    "static": static_server,
    "relay of origin": partial(relay_server, upstream=origin_server),
    "relay of static": partial(relay_server, upstream=static_server),
}


class Published:
    """An origin, and one source that offers what it publishes."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url
        self.origin = Origin(folder, RUN, KEY, settings=OriginSettings(chunk_size_bytes=4096, kept_versions=KEPT))

    def publish(self, version: int) -> PolicyManifest:
        return self.origin.publish(version, Content.of({"config.json": b"{}"}, [self.tensor(version)]))

    def tensor(self, version: int) -> TensorView:
        return TensorView("w", "F32", (5000,), memoryview(np.random.default_rng(version).bytes(20_000)))

    def downloader(self, name: str = "cache") -> Downloader:
        return Downloader([self.url], RUN, KEY.public_key, self.folder.parent / name, StopToken())

    def get(self, target: str) -> tuple[int, bytes]:
        return ask(self.url, target)

    def until_head_is(self, version: int) -> None:
        def is_head() -> bool:
            status, body = self.get("/head.json?wait_s=1")
            return status == 200 and json.loads(body)["document"]["policy"]["version"] == version

        eventually(is_head, WITHIN_S)

    def until_gone(self, version: int) -> None:
        """A relay serves the new head first and removes old versions after that."""
        eventually(lambda: self.get(f"/manifests/0.{version}.json")[0] == 404, WITHIN_S)


@pytest.fixture(params=SOURCES)
def published(request: Request, tmp_path: Path) -> Iterator[Published]:
    folder = tmp_path / "origin"
    folder.mkdir()
    with SOURCES[request.param](folder) as url:
        yield Published(folder, url)


def assert_is(payload: Payload, published: Published, version: int) -> None:
    assert payload.files == {"config.json": b"{}"}
    assert bytes(payload.tensors[0].data) == bytes(published.tensor(version).data)


def test_before_anything_is_published_there_is_no_head(published: Published) -> None:
    assert published.get("/head.json")[0] == 404


def test_head_manifest_and_chunks_are_the_very_bytes_that_were_published(published: Published) -> None:
    manifest = published.publish(1)
    published.until_head_is(1)
    published.downloader().fetch(manifest.policy, WITHIN_S)  # by now a relay has everything
    for path in published.folder.rglob("*"):
        if path.is_file() and path.name != ".lock":
            assert published.get(f"/{path.relative_to(published.folder)}") == (200, path.read_bytes())


def test_every_new_version_can_be_fetched(published: Published) -> None:
    downloader = published.downloader()
    for version in range(3):
        manifest = published.publish(version)
        assert_is(downloader.fetch(manifest.policy, WITHIN_S), published, version)


def test_the_version_before_the_newest_can_still_be_fetched(published: Published) -> None:
    old = published.publish(1)
    published.publish(2)
    published.until_head_is(2)
    assert_is(published.downloader().fetch(old.policy, WITHIN_S), published, 1)


def test_the_newest_version_is_found_by_the_head(published: Published) -> None:
    manifest = published.publish(1)
    published.until_head_is(1)
    assert published.downloader().newest(WITHIN_S) == manifest.policy


def test_a_version_no_longer_kept_is_known_to_be_gone(published: Published) -> None:
    gone = published.publish(1)
    for version in (2, 3):
        published.publish(version)
    published.until_head_is(3)
    published.until_gone(1)
    with pytest.raises(VersionNotFound, match="no longer offered"):
        published.downloader().fetch(gone.policy, WITHIN_S)


def test_what_was_never_published_is_not_found(published: Published) -> None:
    published.publish(1)
    published.until_head_is(1)
    for target in ("/manifests/0.9.json", "/chunks/ab/" + "ab" * 32, "/../origin/head.json", "/nothing"):
        assert published.get(target)[0] == 404
