"""Which proxy leads to a URL: HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY, as other programs read them.

This machine's own addresses are never asked for through a proxy: it could not reach them.

The way through it (`open_tunnel`): plain sources are asked for by their whole URL, secure ones through a tunnel.

http://source   ─ GET http://source/head.json ─► proxy ─► source
https://source  ─ CONNECT source:443 ──────────► proxy ═► TLS with the source, which the proxy cannot read
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
import time
from base64 import b64encode
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment, proxy_bypass_environment  # type: ignore[attr-defined]  # the second is in every Python, and in no stub

from shoal.errors import ConfigError

DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Proxy:
    """An HTTP proxy. `shown` is its address without the password, for people."""

    host: str
    port: int
    secure: bool = False
    authorization: str = field(default="", repr=False)

    @property
    def shown(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.secure else 'http'}://{host}:{self.port}"


def is_own(host: str) -> bool:
    """Whether a host is this machine by name or by number.

    >>> is_own("localhost"), is_own("127.0.0.3"), is_own("::1"), is_own("example.org")
    (True, True, True, False)
    """
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def proxy_of(url: str) -> Proxy | None:
    """The proxy for a URL by this process's environment; None: it is asked directly."""
    parts = urlsplit(url)
    host, known = parts.hostname or "", getproxies_environment()
    given = known.get(parts.scheme) or known.get("all")
    if not given or is_own(host) or proxy_bypass_environment(parts.netloc.rpartition("@")[2], known):
        return None
    return parse_proxy(given)


def parse_proxy(text: str) -> Proxy:
    """`http://user:password@host:3128`, or just `host:3128`."""
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        port = parts.port or DEFAULT_PORTS.get(parts.scheme, 0)
    except ValueError as error:
        raise ConfigError(f"the proxy in HTTP_PROXY, HTTPS_PROXY or ALL_PROXY is not a URL: {error}") from error
    if parts.scheme not in DEFAULT_PORTS or not parts.hostname:
        raise ConfigError(
            f"shoal does not know the kind of proxy that HTTP_PROXY, HTTPS_PROXY or ALL_PROXY names "
            f"({parts.scheme or 'no kind'}): give one such as http://proxy.example:3128, or list the host in NO_PROXY"
        )
    authorization = ""
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        authorization = "Basic " + b64encode(pair.encode()).decode()
    return Proxy(parts.hostname, port, parts.scheme == "https", authorization)


MAX_ANSWER_BYTES = 16 * 1024
WANTS_PASSWORD = 407


def connect_to(proxy: Proxy, timeout_s: float) -> socket.socket:
    """A connection to the proxy itself; `OSError` if there is none."""
    plain = socket.create_connection((proxy.host, proxy.port), timeout=timeout_s)
    if not proxy.secure:
        return plain
    try:
        return ssl.create_default_context().wrap_socket(plain, server_hostname=proxy.host)
    except OSError:
        plain.close()
        raise


def open_tunnel(connection: socket.socket, proxy: Proxy, target: str, timeout_s: float) -> None:
    """Ask the proxy to connect to `target` (host:port) and pass on bytes from then on; `OSError` if it does not."""
    ends_at_s = time.monotonic() + timeout_s
    lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}", *authorization_lines(proxy)]
    connection.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
    head = b""
    while b"\r\n\r\n" not in head:
        left_s = ends_at_s - time.monotonic()
        if left_s <= 0 or len(head) > MAX_ANSWER_BYTES:
            raise OSError(f"the proxy {proxy.shown} gives no answer to CONNECT")
        connection.settimeout(left_s)
        piece = connection.recv(1)  # byte by byte: what follows the head belongs to the tunnel
        if not piece:
            raise OSError(f"the proxy {proxy.shown} closed the connection")
        head += piece
    status = head.split(b" ", 2)[1:2]
    if status != [b"200"]:
        said = head.split(b"\r\n", 1)[0].decode("latin-1")[:80]
        raise OSError(f"the proxy {proxy.shown} opens no way to {target}: {said}")


def authorization_lines(proxy: Proxy) -> list[str]:
    return [f"Proxy-Authorization: {proxy.authorization}"] if proxy.authorization else []
