"""The HTTP client that shoal's own calls to a hub go through: proxies as the environment says, and who is asking."""

from __future__ import annotations

import httpx

from shoal import __version__
from shoal.protocol.versions import HEADER_PROTOCOL, PROTOCOL_VERSION

OWN_ADDRESSES = ("localhost", "127.0.0.1", "[::1]")  # never through a proxy, which could not reach them
HEADERS = {HEADER_PROTOCOL: str(PROTOCOL_VERSION), "user-agent": f"shoal/{__version__}"}


def open_http(max_connections: int = 16) -> httpx.Client:
    """A client that honours HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY, and says which protocol it speaks."""
    limits = httpx.Limits(max_connections=max_connections)
    certificates = httpx.create_ssl_context()  # takes a while to make: one for both
    direct = httpx.HTTPTransport(verify=certificates, limits=limits)
    mounts = {f"all://{host}": direct for host in OWN_ADDRESSES}
    return httpx.Client(verify=certificates, limits=limits, headers=HEADERS, mounts=mounts)
