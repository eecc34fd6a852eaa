"""The HTTP client for shoal's own calls: proxies by the environment, checked targets, no redirects, no compressed
answers. `runtime.exchange.limited` bounds the time of an exchange.

A request with `extensions={REACH: reach}` goes to a target that a hub named: its host is resolved once, checked
(`runtime.targets`), and connected to by that address; TLS and the Host header still use the name.
"""

import threading
from pathlib import Path

import httpx2

from shoal import __version__
from shoal.protocol.node import HEADER_PROTOCOL, PROTOCOL_VERSION
from shoal.runtime.exchange import Network
from shoal.runtime.targets import Proxy, Reach, addresses, check_behind_proxy, endpoint_of, proxy_of, way_out

HEADERS = {HEADER_PROTOCOL: str(PROTOCOL_VERSION), "user-agent": f"shoal/{__version__}", "accept-encoding": "identity"}
REACH = "shoal.reach"
LIMITS = httpx2.Limits(max_connections=16)


def open_http() -> httpx2.Client:
    """A client that honours HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY."""
    return httpx2.Client(transport=_Routes(), headers=HEADERS)


class _Routes(httpx2.BaseTransport):
    """Direct, through a proxy, or through a socket out of a sandbox. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._certificates = httpx2.create_ssl_context()  # slow to create, so shared
        self._direct = self._transport()
        self._others: dict[Proxy | Path, httpx2.HTTPTransport] = {}

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        reach, proxy = request.extensions.get(REACH), proxy_of(str(request.url))
        try:
            if (inside := way_out(*endpoint_of(request.url))) is not None:
                return self._by(inside).handle_request(request)
            if proxy is not None:
                check_behind_proxy(*endpoint_of(request.url), reach)
                return self._by(proxy).handle_request(request)
            return self._direct.handle_request(request) if reach is None else self._checked(request, reach)
        except OSError as error:
            raise httpx2.ConnectError(str(error), request=request) from error

    def _checked(self, request: httpx2.Request, reach: Reach) -> httpx2.Response:
        host, port = endpoint_of(request.url)
        *earlier, last = addresses(host, port, reach)
        for address in earlier:
            try:
                return self._direct.handle_request(_at(request, address))
            except (httpx2.ConnectError, httpx2.ConnectTimeout):
                continue
        return self._direct.handle_request(_at(request, last))

    def _by(self, way: Proxy | Path) -> httpx2.HTTPTransport:
        with self._lock:
            if way not in self._others:
                if isinstance(way, Path):
                    self._others[way] = self._transport(uds=str(way))
                else:
                    headers = {"proxy-authorization": way.authorization} if way.authorization else {}
                    self._others[way] = self._transport(proxy=httpx2.Proxy(way.shown, headers=headers))
            return self._others[way]

    def _transport(self, uds: str | None = None, proxy: httpx2.Proxy | None = None) -> httpx2.HTTPTransport:
        made = httpx2.HTTPTransport(verify=self._certificates, limits=LIMITS, uds=uds, proxy=proxy)
        made._pool._network_backend = Network()  # httpx2 has no parameter for it
        return made

    def close(self) -> None:
        for transport in (self._direct, *self._others.values()):
            transport.close()


def _at(request: httpx2.Request, address: str) -> httpx2.Request:
    url, extensions = request.url.copy_with(host=address), {**request.extensions, "sni_hostname": request.url.host}
    return httpx2.Request(request.method, url, headers=request.headers, stream=request.stream, extensions=extensions)
