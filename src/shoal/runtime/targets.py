"""Which addresses a hub may name for this machine to connect to: none that is nearer to this machine than the hub.

    hub at …            may name targets at …
    a public address    public addresses
    a private one       private and public ones
    link-local          link-local, private and public ones
    loopback            loopback, private and public ones         (the user's own run, or a tunnel that the user opened)

Otherwise a hub, which anyone may run, could reach what only this machine can reach: a router's page, a database, the
metadata service of a cloud. This machine's own addresses count as loopback, and IPv6 addresses of its own link (/64) as
private although they are global, because firewalls let this machine reach them and the hub knows the prefix.

The hub's nearness is that of the address that answered. A name is resolved once, and the checked address is used.
Redirects are not followed. Addresses that the user gave are not checked.

Proxies are named by HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY; this machine's own addresses are never reached
through one. A proxy resolves names itself, so behind it only numeric addresses can be checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import os
import re
import socket
import ssl
import time
from base64 import b64encode
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment, proxy_bypass_environment  # type: ignore[attr-defined]  # the second is in every Python, and in no stub

from shoal.errors import ConfigError

DEFAULT_PORTS = {"http": 80, "https": 443}
HOST = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")
MAX_ANSWER_BYTES = 16 * 1024
WANTS_PASSWORD = 407


@dataclass(frozen=True)
class Proxy:
    """An HTTP proxy. `shown` is its address without the password."""

    host: str
    port: int
    secure: bool = False
    authorization: str = field(default="", repr=False)

    @property
    def shown(self) -> str:
        return f"{'https' if self.secure else 'http'}://{netloc(self.host, self.port)}"

    @property
    def headers(self) -> list[str]:
        return [f"Proxy-Authorization: {self.authorization}"] if self.authorization else []

    def connect(self, timeout_s: float, tunnel_to: str = "") -> socket.socket:
        """A connection to the proxy, or through it to `tunnel_to` (host:port); `OSError` without an answer."""
        connection = socket.create_connection((self.host, self.port), timeout=timeout_s)
        try:
            if self.secure:
                connection = ssl.create_default_context().wrap_socket(connection, server_hostname=self.host)
            if tunnel_to:
                self._open_tunnel(connection, tunnel_to, timeout_s)
                connection.settimeout(timeout_s)
        except OSError:
            connection.close()
            raise
        return connection

    def _open_tunnel(self, connection: socket.socket, target: str, timeout_s: float) -> None:
        ends_at_s = time.monotonic() + timeout_s
        lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}", *self.headers]
        connection.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
        head = b""
        while b"\r\n\r\n" not in head:
            left_s = ends_at_s - time.monotonic()
            if left_s <= 0 or len(head) > MAX_ANSWER_BYTES:
                raise OSError(f"the proxy {self.shown} does not answer CONNECT")
            connection.settimeout(left_s)
            piece = connection.recv(1)  # byte by byte: what follows belongs to the tunnel
            if not piece:
                raise OSError(f"the proxy {self.shown} closed the connection")
            head += piece
        if head.split(b" ", 2)[1:2] != [b"200"]:
            message = head.split(b"\r\n", 1)[0].decode("latin-1")[:80]
            raise OSError(f"the proxy {self.shown} refuses a tunnel to {target}: {message}")


def netloc(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def as_number(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.partition("%")[0])
    return None


def is_own(host: str) -> bool:
    number = as_number(host)
    return host.lower() == "localhost" if number is None else number.is_loopback


def proxy_of(url: str) -> Proxy | None:
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
    pair = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}".encode()
    authorization = "" if parts.username is None else f"Basic {b64encode(pair).decode()}"
    return Proxy(parts.hostname, port, parts.scheme == "https", authorization)


SANDBOX = "SHOAL_SANDBOX"  # the folder with the sockets that lead out of a sandbox; unset outside


class Nearness(IntEnum):
    """How near an address is. SPECIAL addresses belong to no single machine: nobody may name them."""

    SPECIAL = 0
    LOOPBACK = 1
    LINK_LOCAL = 2
    PRIVATE = 3
    PUBLIC = 4

    @property
    def word(self) -> str:
        return self.name.lower().replace("_", "-")


class TargetRefused(OSError): ...


_PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7")
_GLOBAL_IPV6, _NAT64 = ipaddress.IPv6Network("2000::/3"), ipaddress.IPv6Network("64:ff9b::/96")
# 6to4 and Teredo relays, which contain an IPv4 address; addresses for documentation; services of two clouds
_RESERVED = ("192.88.99.0/24", "2001::/32", "2002::/16", "3fff::/20", "192.0.0.0/24", "168.63.129.16/32")


def nearness(address: str) -> Nearness:
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or (ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else None)
        if inner is not None:
            return nearness(str(inner))
    if ip.is_loopback:
        return Nearness.LOOPBACK
    if ip.is_link_local:
        return Nearness.LINK_LOCAL
    if any(ip in network for network in map(ipaddress.ip_network, _PRIVATE) if network.version == ip.version):
        return Nearness.PRIVATE
    is_reserved = any(
        ip in network for network in map(ipaddress.ip_network, _RESERVED) if network.version == ip.version
    )
    outside = ip.version == 6 and ip not in _GLOBAL_IPV6
    if is_reserved or outside or ip.is_multicast or ip.is_reserved or not ip.is_global:
        return Nearness.SPECIAL
    source = _source_of(str(ip))
    if source == ip:
        return Nearness.LOOPBACK
    on_link = source is not None and ip.version == 6 and int(source) >> 64 == int(ip) >> 64
    return Nearness.PRIVATE if on_link else Nearness.PUBLIC


def _source_of(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """This machine's own address on the route there. Nothing is sent."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((address, 9))
        except OSError:  # there is no way there
            return None
        return ipaddress.ip_address(asking.getsockname()[0].partition("%")[0])


@dataclass(frozen=True)
class Reach:
    """The addresses that a hub of nearness `nearest` may name. `given`: (host, port) of the user's, not checked."""

    nearest: Nearness
    given: frozenset[tuple[str, int]] = frozenset()

    def allows(self, target: Nearness) -> bool:
        """Link-local addresses hold metadata services, so only a hub on the same link may name them."""
        further = target > self.nearest and target is not Nearness.LINK_LOCAL
        return target is not Nearness.SPECIAL and (target is self.nearest or further)

    def check(self, host: str, address: str) -> None:
        near = nearness(address)
        if not self.allows(near):
            shown = host if host == address else f"{host} ({address})"
            what = f"{shown} is a {near.word} address, and the hub is at a {self.nearest.word} one"
            raise TargetRefused(f"{what}: it may not send this machine there")


PUBLIC_ONLY = Reach(Nearness.PUBLIC)


def own_address() -> str:
    return str(_source_of("192.0.2.1") or "127.0.0.1")


def endpoint_of(url: str) -> tuple[str, int]:
    """Host, as it is looked up (`xn--bcher-kva.example`), and port of a URL; `ValueError` if it has none."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if as_number(host) is None:
        host = host.encode("idna").decode("ascii")
        if not HOST.fullmatch(host) or "[" in parts.netloc:
            raise ValueError(f"{host[:200]!r} is no name of a host")
        host.encode("ascii").decode("idna")  # ValueError for labels that are not valid
    return host, parts.port or DEFAULT_PORTS.get(parts.scheme, 0)


def is_address(url: str) -> bool:
    """Whether this is an http(s) URL of a host that can be looked up."""
    try:
        endpoint_of(url)
        parts = urlsplit(url)
        return parts.scheme in DEFAULT_PORTS and parts.port != 0
    except ValueError:
        return False


def check_url(url: str) -> None:
    """Raise `TargetRefused` unless this is an http(s) URL without user and password."""
    if not (is_address(url) and "@" not in urlsplit(url).netloc and url.isascii() and url.isprintable()):
        raise TargetRefused(f"{url[:200]!r} is no http:// or https:// URL without user and password")


def nearness_of_hub(url: str, peer: str | None) -> Nearness:
    """The nearness of the hub: that of `peer`, the address that answered. None: a hub in this process."""
    if proxy_of(url) is None:
        return Nearness.LOOPBACK if peer is None else nearness(peer)
    return min(map(nearness, numeric(*endpoint_of(url))), default=Nearness.PUBLIC)


def addresses(host: str, port: int, reach: Reach | None) -> list[str]:
    try:
        entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise TargetRefused(f"{host[:200]!r} is no name of a host: {error}") from error
    found = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
    if reach is not None and (host, port) not in reach.given:
        for address in found:
            reach.check(host, address)
    return found


def check_behind_proxy(host: str, port: int, reach: Reach | None) -> None:
    """Check a target that a proxy will resolve: possible only if it is numeric."""
    if reach is not None and (host, port) not in reach.given:
        for address in numeric(host, port):
            reach.check(host, address)


def dial(
    is_secure: bool, host: str, port: int, proxy: Proxy | None, reach: Reach | None, timeout_s: float
) -> socket.socket:
    """A connection to the first checked address that answers, direct or through a proxy."""
    if proxy is None or os.environ.get(SANDBOX):
        plain = connect(host, port, timeout_s, reach)
    else:
        check_behind_proxy(host, port, reach)
        if proxy.secure and is_secure:
            raise OSError("a https:// address is not asked through a https:// proxy: name the proxy as http://")
        plain = proxy.connect(timeout_s, tunnel_to=netloc(host, port) if is_secure else "")
    try:
        if plain.family != socket.AF_UNIX:  # a Unix socket leads out of a sandbox
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return ssl.create_default_context().wrap_socket(plain, server_hostname=host) if is_secure else plain
    except OSError:
        plain.close()
        raise


def connect(host: str, port: int, timeout_s: float, reach: Reach | None) -> socket.socket:
    if (inside := way_out(host, port)) is None:
        return first_answer(addresses(host, port, reach), port, timeout_s)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        connection.connect(str(inside))
    except OSError:
        connection.close()
        raise
    return connection


def first_answer(found: list[str], port: int, timeout_s: float) -> socket.socket:
    for address in found[:-1]:
        with contextlib.suppress(OSError):
            return socket.create_connection((address, port), timeout=timeout_s)
    return socket.create_connection((found[-1], port), timeout=timeout_s)


def way_out(host: str, port: int) -> Path | None:
    """In a sandbox: the socket that leads to an address (`run.sandbox`), or a refusal. None outside."""
    if not (folder := os.environ.get(SANDBOX)):
        return None
    path = Path(folder) / socket_name(host, port)
    if not path.is_socket():
        raise TargetRefused(f"{host}:{port} is no hub or source of the run: the sandbox reaches nothing else")
    return path


def socket_name(host: str, port: int) -> str:
    """A hash, because the path of a unix socket must be short."""
    return hashlib.sha256(f"{host}_{port}".encode(errors="replace")).hexdigest()[:32]


def numeric(host: str, port: int) -> list[str]:
    """The address of a host in numbers (also `127.1` or `0x7f000001`); empty for a name."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return []
    return [str(entry[4][0]) for entry in found]
