"""A way through an HTTP proxy: plain sources are asked for by their whole URL, secure ones through a tunnel.

http://source   ─ GET http://source/head.json ─► proxy ─► source
https://source  ─ CONNECT source:443 ──────────► proxy ═► TLS with the source, which the proxy cannot read
"""

from __future__ import annotations

import socket
import ssl
import time

from shoal.runtime.proxies import Proxy

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
