"""A machine whose only way out is a proxy: it joins, fetches weights and works through it; nothing goes around it.

The proxy is a real one on a real socket. The run's hub and origin are called by names that only the proxy can resolve,
so that whatever does not go through it fails.
"""

import base64
import select
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from kit import Patch
from kit.fork import clean_environment
from kit.nginx import certificate_of
from kit.roles import ONE_STEP, ServedRun, prepared, served_run
from shoal.client import ClientOptions, HubClient
from shoal.errors import BroadcastError, ConfigError, HubUnreachable
from shoal.protocol import PROTOCOL_VERSION, SigningKey
from shoal.run.doctor import examine
from shoal.run.folder import port_of
from shoal.runtime.exchange import ClientRequest, HttpClient, Limit
from shoal.runtime.stop import StopToken
from shoal.runtime.targets import Nearness, Proxy, Reach, TargetRefused, parse_proxy, proxy_of
from shoal.shardcast.connection import Connection, Deadline, Timeouts

DEADLINE_S = 60.0


class Listener:
    """Accepts connections on loopback, each with a thread that serves it."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join(10)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                connection.settimeout(DEADLINE_S)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        raise NotImplementedError

    @staticmethod
    def _read_head(client: socket.socket) -> bytes:
        head = b""
        while b"\r\n\r\n" not in head:
            piece = client.recv(1)
            if not piece:
                return b""
            head += piece
        return head


class ForwardProxy(Listener):
    """Forwards plain requests by their whole URL and opens tunnels; names ending in `.test` are all this machine."""

    def __init__(self, credentials: str = "") -> None:
        self.credentials = credentials
        self.asked: list[str] = []
        super().__init__()
        self.url = f"http://127.0.0.1:{self.port}"

    def _serve(self, client: socket.socket) -> None:
        """One request decides where a connection goes; a client asks one host over one connection."""
        with suppress(OSError, ValueError), closing(client):
            upstream: socket.socket | None = None
            try:
                while head := self._read_head(client):
                    line, _, headers = head.partition(b"\r\n")
                    method, target, _ = line.decode().split(" ")
                    self.asked.append(f"{method} {target}")
                    if self.credentials and self._authorization() not in headers:
                        client.sendall(b"HTTP/1.1 407 Who\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                        return None
                    if method == "CONNECT":
                        upstream = self._reach(target)
                        client.sendall(b"HTTP/1.1 200 Go\r\n\r\n")
                        return self._shovel(client, upstream)
                    parts = urlsplit(target)
                    upstream = self._reach(parts.netloc)
                    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
                    kept = [h for h in headers.split(b"\r\n") if not h.lower().startswith(b"connection")]
                    body = self._body(client, headers)
                    start = f"{method} {path} HTTP/1.1\r\n".encode()
                    upstream.sendall(start + b"Connection: close\r\n" + b"\r\n".join(kept) + body)
                    while piece := upstream.recv(65536):
                        client.sendall(piece)
                    return None
            finally:
                if upstream is not None:
                    upstream.close()

    def _authorization(self) -> bytes:
        return b"Proxy-Authorization: Basic " + base64.b64encode(self.credentials.encode())

    def _reach(self, netloc: str) -> socket.socket:
        host, _, port = netloc.partition(":")
        assert host.endswith(".test"), host
        return socket.create_connection(("127.0.0.1", int(port)), timeout=DEADLINE_S)

    @staticmethod
    def _body(client: socket.socket, headers: bytes) -> bytes:
        sizes = [h.split(b":")[1] for h in headers.split(b"\r\n") if h.lower().startswith(b"content-length:")]
        body = b""
        while sizes and len(body) < int(sizes[0]):
            body += client.recv(int(sizes[0]) - len(body))
        return body

    @staticmethod
    def _shovel(one: socket.socket, other: socket.socket) -> None:
        while True:
            for ready in select.select([one, other], [], [], DEADLINE_S)[0]:
                piece = ready.recv(65536)
                if not piece:
                    return
                (other if ready is one else one).sendall(piece)


@pytest.fixture
def proxy(monkeypatch: Patch) -> Iterator[ForwardProxy]:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    proxy = ForwardProxy()
    monkeypatch.setenv("HTTP_PROXY", proxy.url)
    monkeypatch.setenv("HTTPS_PROXY", proxy.url)
    yield proxy
    proxy.close()


@pytest.fixture
def elsewhere(tmp_path: Path, proxy: ForwardProxy) -> Iterator[ServedRun]:
    """A run whose origin is known by a name only."""
    folder = prepared(tmp_path / "run", ONE_STEP)
    named = f"http://weights.test:{port_of(folder.endpoints.origin)}"
    endpoints = folder.endpoints.model_copy(update={"origin": named})
    (folder.path / "endpoints.json").write_text(endpoints.model_dump_json())
    with served_run(folder) as run:
        yield run


def test_worker_behind_a_proxy_joins_fetches_earns(elsewhere: ServedRun, proxy: ForwardProxy, tmp_path: Path) -> None:
    elsewhere.publish(0)
    hub, join = (url.replace("127.0.0.1", "hub.test") for url in (elsewhere.endpoints.hub, elsewhere.endpoints.join))
    command = [sys.executable, "-m", "shoal.cli", "join", join, "--engine", "scripted", "--name", "guest"]
    command += ["--folder", str(tmp_path / "node")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=clean_environment())
    try:
        elsewhere.train()
    finally:
        _, error = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, error
    [guest] = [node for node in elsewhere.client.status().nodes if node.name == "guest"]
    assert guest.accepted > 0
    asked = {target.split("?")[0] for target in proxy.asked}
    assert f"POST {hub}/leases" in asked
    assert any(target.startswith("GET http://weights.test:") and "/chunks/" in target for target in asked)
    assert not any("127.0.0.1" in target for target in asked), "this machine's own addresses need no proxy"
    findings = {finding.name: finding for finding in examine([join], tmp_path / "node")}
    assert findings["proxy"].text == f"{proxy.url} (by the environment)"
    assert findings["hub"].ok
    assert f"protocol {PROTOCOL_VERSION}" in findings["hub"].text
    assert findings["clock"].ok
    assert findings["weights"].text == "1 of 1 sources answer"


def test_no_proxy_is_respected(proxy: ForwardProxy, monkeypatch: Patch) -> None:
    assert proxy_of("http://hub.test:8470") is not None
    monkeypatch.setenv("NO_PROXY", "hub.test,.internal")
    assert proxy_of("http://hub.test:8470") is None
    assert proxy_of("http://a.internal") is None
    assert proxy_of("http://other.test") is not None
    for own in ("http://127.0.0.1:1", "http://localhost:1", "https://[::1]:1", "http://127.8.8.8"):
        assert proxy_of(own) is None, "this machine is never asked for through a proxy"
    options = ClientOptions(patience_s=0.2)
    client = HubClient("http://hub.test:9", SigningKey.generate(), StopToken(), options=options)
    with closing(client), pytest.raises(HubUnreachable):
        client.run_info()
    with pytest.raises(BroadcastError, match="cannot be reached: "):
        Connection("http://hub.test:9", StopToken()).get("/head.json", Deadline(5))
    assert proxy.asked == []


def test_proxy_gets_its_password(monkeypatch: Patch) -> None:
    with closing(ForwardProxy(credentials="me:se cret")) as proxy, closing(_Source()) as server:
        monkeypatch.setenv("HTTP_PROXY", proxy.url.replace("//", "//me:se%20cret@"))
        assert fetched(f"http://weights.test:{server.port}") == [b"hello"]
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        with pytest.raises(BroadcastError, match=r"wants a user and a password \(407\)"):
            fetched(f"http://weights.test:{server.port}")


def fetched(url: str, times: int = 1, **limits: Any) -> list[bytes]:
    """What a connection gets, each time it asks."""
    found = []
    with closing(Connection(url, StopToken(), Timeouts(**limits))) as connection:
        for _ in range(times):
            assert connection.get("/head.json", Deadline(10)).status == 200
            found.append(connection.read(100, Deadline(10)))
    return found


def got(url: str, reach: Reach) -> bytes:
    """What the hub's client gets."""
    with closing(HttpClient()) as http:
        return http.send(ClientRequest("GET", url, reach=reach), Limit(10, StopToken())).body


@pytest.fixture
def secure(proxy: ForwardProxy, tmp_path: Path, monkeypatch: Patch) -> "Iterator[_Source]":
    certificate = certificate_of(tmp_path, "weights.test")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with closing(_Source(certificate)) as server:
        yield server


def test_https_source_is_reached_through_a_tunnel(proxy: ForwardProxy, secure: "_Source") -> None:
    assert fetched(f"https://weights.test:{secure.port}", 2) == [b"hello", b"hello"]
    assert proxy.asked == [f"CONNECT weights.test:{secure.port}"]
    with pytest.raises(BroadcastError, match=r"through the proxy http://127\.0\.0\.1:\d+: .*closed the connection"):
        fetched("https://weights.test:9")


@pytest.mark.parametrize("way", ["connection", "http"])
def test_secure_target_is_asked_at_the_checked_address(proxy, secure, monkeypatch, way):
    """The certificate, the server's name in TLS and the Host header are of the name; no proxy is asked."""
    monkeypatch.setenv("NO_PROXY", "weights.test")
    known = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **more: known("127.0.0.1", *rest, **more))
    url, reach = f"https://weights.test:{secure.port}", Reach(Nearness.LOOPBACK)
    if way == "http":
        assert got(f"{url}/head.json", reach) == b"hello"
    else:
        assert fetched(url, reach=reach) == [b"hello"]
    [head] = secure.heads
    assert f"\r\nhost: weights.test:{secure.port}\r\n".encode() in head.lower()
    assert secure.names == ["weights.test"]
    assert proxy.asked == []


def test_addresses_in_numbers_are_checked_before_a_proxy_is_asked(proxy: ForwardProxy) -> None:
    reach = Reach(Nearness.PUBLIC)
    with pytest.raises(TargetRefused, match="it may not send this machine there"):
        got("http://10.0.0.1:80/", reach)
    with pytest.raises(BroadcastError, match="it may not send this machine there"):
        Connection("http://169.254.169.254", StopToken(), Timeouts(reach=reach)).get("/head.json", Deadline(10))
    assert proxy.asked == []


def test_wrong_proxy_is_refused_and_its_password_not_shown() -> None:
    for text in ("socks5://proxy:1080", "http://", "http://proxy:nonsense"):
        with pytest.raises(ConfigError, match="proxy"):
            parse_proxy(text)
    proxy = parse_proxy("http://me:secret@proxy.example:3128")
    assert proxy.shown == "http://proxy.example:3128"
    assert "secret" not in repr(proxy)
    assert parse_proxy("proxy:3128") == Proxy("proxy", 3128)


class _Source(Listener):
    """A source of one document, with or without TLS."""

    def __init__(self, certificate: Path | None = None) -> None:
        self._context = None if certificate is None else ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.names: list[str] = []  # what TLS clients asked for
        self.heads: list[bytes] = []
        if self._context is not None:
            self._context.load_cert_chain(certificate)
            self._context.sni_callback = lambda _socket, name, _context: self.names.append(name)
        super().__init__()

    def _serve(self, client: socket.socket) -> None:
        wrap = (lambda plain, **_: plain) if self._context is None else self._context.wrap_socket
        with suppress(OSError), closing(wrap(client, server_side=True)) as speaking:
            while head := self._read_head(speaking):
                self.heads.append(head)
                speaking.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
                if b"connection: close" in head.lower():
                    break
