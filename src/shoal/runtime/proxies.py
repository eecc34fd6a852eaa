"""Which proxy leads to a URL: HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY, as other programs read them.

This machine's own addresses are never asked for through a proxy: it could not reach them.
"""

from __future__ import annotations

import ipaddress
from base64 import b64encode
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit
from urllib.request import (  # type: ignore[attr-defined]  # the second is in every Python, and in no stub
    getproxies_environment,
    proxy_bypass_environment,
)

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
