"""The server: only names of a tree, held head requests, and no client that can cost more than its connection."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit import eventually
from kit.cast import Lab, Running, ask, asking, chunk_paths, dial, health
from shoal.errors import ResourceError
from shoal.protocol import Chunk
from shoal.runtime import StopToken, http
from shoal.runtime.http import client_of
from shoal.shardcast import run_origin
from shoal.shardcast.connection import Throttle
from shoal.shardcast.server import Blob, Catalogue, Inventory, TreeServer, held_s, run_server
from shoal.shardcast.tree import chunk_key, have_key


def send(url: str, request: bytes, timeout_s: float = 5) -> bytes:
    """Send raw bytes and read until the server closes."""
    answer = b""
    with dial(url, request) as connection, suppress(ConnectionResetError):  # as a refused one ends
        connection.settimeout(timeout_s)
        while piece := connection.recv(65536):
            answer += piece
    return answer


def get(url: str, target: str, method: str = "GET", extra: str = "") -> tuple[int, dict[str, str], bytes]:
    answer = send(url, f"{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{extra}\r\n".encode(), 15)
    head, body = answer.split(b"\r\n\r\n", 1)
    lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    return int(lines[0].split(" ")[1]), headers, body


@contextmanager
def serving(catalogue: Catalogue, host: str = "127.0.0.1", per_client: int | None = None) -> Iterator[Running]:
    server = TreeServer(catalogue, per_client)
    running = Running(lambda stop, ready: run_server(server, host, 0, stop, stop.is_set, ready))
    assert running.url
    yield running
    running.end()


class Shelf(Catalogue):
    """A catalogue of one version of eight chunks, of which so many are there as the test says; one more is coming."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.path = folder / "payload.part"
        self.path.write_bytes(b"chunk")
        self.missed: list[str] = []
        self.set_count(0)

    def find(self, key: str) -> Blob | None:
        return Blob(self.path, 5) if key == SHELVED else None

    def expects(self, key: str) -> bool:
        return key == SHELVED

    def announced(self) -> list[str]:
        return [f"{7:064x}"]

    def lost(self, key: str) -> None:
        self.missed.append(key)

    def health(self) -> dict[str, Any]:
        return {**super().health(), "ok": False, "problem": "too little disk"}

    def set_count(self, count: int | None) -> None:
        chunks = [Chunk(hash=f"{index:064x}", size_bytes=1) for index in range(8)]
        here = {chunk.hash for chunk in chunks[:count]}
        self.inventories = {} if count is None else {(0, 1): Inventory(chunks, here)}
        self.arrivals.notify(have_key((0, 1)))


SHELVED = chunk_key("ab" * 32)


def test_head_manifests_and_chunks_are_served_with_the_right_caching(lab: Lab) -> None:
    manifest, url = lab.publish(1), lab.honest().url
    status, headers, body = get(url, "/head.json")
    assert (status, headers["cache-control"], body) == (200, "no-cache", (lab.www / "head.json").read_bytes())
    for path in [lab.www / "manifests" / "0.1.json", *chunk_paths(lab.www, manifest)]:
        status, headers, body = get(url, f"/{path.relative_to(lab.www)}")
        assert (status, body) == (200, path.read_bytes())
        assert "immutable" in headers["cache-control"]
        status, headers, body = get(url, f"/{path.relative_to(lab.www)}", "HEAD")
        assert (status, int(headers["content-length"]), body) == (200, path.stat().st_size, b"")
    assert get(url, "/head.json", "DELETE")[0] == 405


@pytest.mark.parametrize("target", [
    "/../secret", "/manifests/../../secret", "/chunks/aa/../../../secret", "/%2e%2e/secret", "//etc/passwd",
    "/manifests/%2e%2e/%2e%2e/secret", "/chunks/ab/" + "cd" * 32, "/chunks/AB/" + "AB" * 32, "/manifests/00.1.json",
    "/manifests/0.1.json/", "/manifests/0.-1.json", "/manifests/", "/.lock", "/head.json%00", "/",
])  # fmt: skip
def test_any_other_name_is_not_found(lab: Lab, target: str) -> None:
    (lab.folder / "secret").write_bytes(b"secret")
    lab.publish(1)
    assert get(lab.honest().url, target)[0] == 404


def test_too_many_fields_of_a_query_are_refused(lab: Lab) -> None:
    assert get(lab.honest().url, f"/head.json?{'&'.join(f'a{number}=1' for number in range(20))}")[0] == 400


def test_a_held_request_whose_client_hung_up_frees_its_place(lab: Lab) -> None:
    lab.publish(1)
    origin = lab.honest()
    held = [dial(origin.url, b"GET /head.json?after=9.9&wait_s=60 HTTP/1.0\r\n\r\n") for _ in range(5)]
    eventually(lambda: health(origin)["connections"] == 6)
    for connection in held:
        connection.close()
    eventually(lambda: health(origin)["connections"] == 1)


def test_health_counts_bytes_and_names_versions(lab: Lab) -> None:
    lab.publish(1)
    origin = lab.honest()
    size = len(get(origin.url, "/head.json")[2])
    found = health(origin)
    assert len(found.pop("instance")) == 16
    assert found == {"ok": True, "role": "origin", "versions": ["0.1"], "bytes_out": size, "connections": 1}
    assert get(origin.url, "/have/0.1")[0] == 404, "an origin sends no maps"


def test_a_held_head_is_answered_by_a_newer_one_or_when_the_wait_is_over(lab: Lab) -> None:
    url = lab.honest().url
    assert get(url, "/head.json?wait_s=0.1")[0] == 404
    lab.publish(1)
    started = time.monotonic()
    assert get(url, "/head.json?after=0.1&wait_s=0.2")[::2] == (200, (lab.www / "head.json").read_bytes())
    assert 0.2 <= time.monotonic() - started < 15
    for nonsense in ("after=x&wait_s=nan", "after=0.0&wait_s=20", "wait_s=-3", "wait_s=1e999", ""):
        assert get(url, f"/head.json?{nonsense}")[0] == 200
    origin = lab.honest()
    answer = asking(origin.url, "/head.json?after=0.1&wait_s=20")
    eventually(lambda: health(origin)["connections"] == 2)
    assert not answer.done()
    lab.publish(2)
    assert json.loads(answer.result(15)[1])["document"]["policy"]["version"] == 2


def _read_rest(connection: socket.socket) -> int:
    received = 0
    with suppress(ConnectionError):
        while piece := connection.recv(1 << 20):
            received += len(piece)
    return received


def test_a_stop_ends_held_requests(tmp_path: Path) -> None:
    with serving(Catalogue(tmp_path)) as server, dial(server.url, b"GET /head.json?wait_s=60 HTTP/1.0\r\n\r\n"):
        assert server.end() < 3


def test_a_client_that_does_not_read_is_cut_off_and_others_are_served(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "FILE_S", 0.3)
    monkeypatch.setattr(http, "FILE_FLOOR_BYTES_S", 1e9)
    path = chunk_paths(lab.www, lab.publish(1, files={"big": bytes(1)}))[0]
    path.write_bytes(bytes(32 << 20))  # larger than any socket buffer
    asked = f"GET /{path.relative_to(lab.www)} HTTP/1.0\r\n\r\n".encode()
    with serving(Catalogue(lab.www)) as server, dial(server.url, asked) as lazy:
        assert get(server.url, "/head.json")[0] == 200
        eventually(lambda: health(server)["connections"] == 1)
        assert _read_rest(lazy) < path.stat().st_size


@pytest.mark.parametrize(("per_client", "refusal"), [(None, 503), (2, 429)])
def test_connections_beyond_a_cap_are_told_to_come_back(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, per_client: int | None, refusal: int
) -> None:
    lab.publish(1)
    monkeypatch.setattr("shoal.shardcast.server.MAX_CONNECTIONS", 99 if per_client else 2)
    with serving(Catalogue(lab.www), per_client=per_client) as server:
        idle = [dial(server.url) for _ in range(2)]

        def refused() -> bool:
            status, headers, _ = get(server.url, "/head.json")
            return status == refusal and headers["retry-after"] == "2"

        eventually(refused)
        address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
        with socket.create_connection(address, timeout=5, source_address=("127.0.0.2", 0)) as other:
            other.sendall(b"GET /head.json HTTP/1.0\r\n\r\n")
            assert other.recv(12) == (b"HTTP/1.1 200" if refusal == 429 else b"HTTP/1.1 503")
        for one in idle:
            one.close()
        eventually(lambda: get(server.url, "/head.json")[0] == 200)


def test_failure_to_serve_is_a_resource_error(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "TAKEN_S", 0.0)
    (tmp_path / "file").write_bytes(b"")
    port = int(lab.honest().url.rsplit(":", 1)[1])
    for folder, host, at, why in (
        (tmp_path, "127.0.0.1", port, f"port {port} on 127.0.0.1 is taken"),
        (tmp_path / "file" / "origin", "127.0.0.1", 0, "a part of the path is a file"),
        (tmp_path, "192.0.2.1", 0, "cannot listen on .* check --host"),
    ):
        with pytest.raises(ResourceError, match=why):
            run_origin(folder, host, at, StopToken(), lambda url: None)


def test_a_file_shorter_than_it_should_be_is_not_found(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    shelf.path.write_bytes(b"chun")
    with serving(shelf) as server:
        assert get(server.url, f"/{SHELVED}")[0] == 404
    assert shelf.missed == [SHELVED]


def test_a_map_is_held_until_more_chunks_are_there_or_its_version_goes(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    with serving(shelf) as server:
        for target in ("/have/0.2?wait_s=20", "/have/", "/have/x", "/have/0.1/", "/have/00.1"):
            assert get(server.url, target)[0] == 404
        status, headers, body = get(server.url, "/have/0.1")
        assert (status, headers["cache-control"], body) == (200, "no-store", b"\x00\x80")
        assert ask(server.url, "/have/0.1?count=0&wait_s=0.05") == (200, b"\x00\x80")
        more = asking(server.url, "/have/0.1?count=1&wait_s=20")
        all_of_it = asking(server.url, "/have/0.1?count=9&wait_s=20")
        eventually(lambda: shelf.arrivals.waited_for("have/0.1"))
        shelf.set_count(1)  # more than none, but not more than one
        eventually(lambda: shelf.arrivals.waited_for("have/0.1"))
        assert not more.done()
        shelf.set_count(2)
        assert more.result(15) == (200, b"\x03\x80")
        assert not all_of_it.done()
        shelf.set_count(None)
        assert all_of_it.result(15)[0] == 404


def test_ipv6_clients_are_let_in_and_counted_by_network(lab: Lab) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    lab.publish(1)
    with (
        serving(Catalogue(lab.www), "::1", per_client=1) as server,
        dial(server.url, b"GET /head.json HTTP/1.1\r\nHost: x\r\n\r\n") as first,
    ):
        assert first.recv(15) == b"HTTP/1.1 200 OK"
        with dial(server.url) as second:
            assert second.recv(12) == b"HTTP/1.1 429"


@pytest.mark.parametrize(
    ("query", "seconds"),
    [("wait_s=3", 3.0), ("wait_s=1e9", 20.0), ("wait_s=-1", 0.0), ("wait_s=nan", 0.0), ("wait_s=x", 0.0), ("", 0.0)],
)
def test_seconds_are_bounded_whatever_is_asked(query: str, seconds: float) -> None:
    assert held_s(dict(parse_qsl(query)), 20.0) == seconds


@pytest.mark.parametrize(("address", "client"), [
    ("192.0.2.7", "192.0.2.7"), ("::ffff:192.0.2.7", "192.0.2.7"), ("fe80::1%eth0", "fe80::/64"), ("", ""),
    ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"), ("2001:db8:1:2::ffff", "2001:db8:1:2::/64"),
    ("2001:db8:1:3::ffff", "2001:db8:1:3::/64"),
])  # fmt: skip
def test_a_client_is_an_address_or_a_network_of_ipv6(address: str, client: str) -> None:
    assert client_of(address) == client


@given(sizes=st.lists(st.integers(1, 5000), min_size=1), pauses=st.lists(st.floats(0, 3)))
def test_a_bucket_never_gives_more_than_its_rate_and_one_burst(sizes: list[int], pauses: list[float]) -> None:
    throttle = Throttle(rate_bytes_s=1000.0)
    now_s, sent = 100.0, 0
    for index, size in enumerate(sizes):
        now_s += pauses[index] if index < len(pauses) else 0.0
        may_go_s = now_s + throttle.take(size, now_s)
        sent += size
        assert sent <= 1000.0 * (may_go_s - 100.0 + Throttle.BURST_S) + 1e-3


def test_throttle_allows_a_burst_and_then_delays() -> None:
    throttle = Throttle(rate_bytes_s=1000.0)
    assert throttle.take(1000, 50.0) == 0.0
    assert throttle.take(500, 50.0) == pytest.approx(0.5)
    assert throttle.take(500, 50.0) == pytest.approx(1.0)  # a second connection waits behind the first
    assert throttle.take(1000, 53.0) == 0.0
