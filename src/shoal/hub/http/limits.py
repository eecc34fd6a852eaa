"""How much one caller may ask for: who an address is, and the bytes that are being received.

An IPv4 address is one client, an IPv6 /64 network another (`client_of`). This machine's processes have no address here.
"""

from __future__ import annotations

import ipaddress
import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from shoal.errors import ConfigError
from shoal.hub.state.commands import Refusal
from shoal.shardcast.limits import client_of

OWN_ADDRESSES = ("", "127.0.0.1", "::1")
SHARE_OF_ONE = 4  # one caller may have a quarter of all that may be received at a time


def too_much(code: str, sentence: str, wait_s: float) -> Refusal:
    return Refusal(429, code, sentence, retry_after_s=max(1, math.ceil(wait_s)))


_client_of = lru_cache(4096)(client_of)  # asked with every request


class Addresses:
    """Whom an address belongs to; "" for those without a limit.

    >>> addresses = Addresses(["10.0.0.0/8"])
    >>> addresses.client("127.0.0.1"), addresses.client("::ffff:192.0.2.7"), addresses.is_proxy("10.1.2.3")
    ('', '192.0.2.7', True)
    """

    def __init__(self, trusted_proxies: Sequence[str] = ()) -> None:
        try:
            self._proxies = [ipaddress.ip_network(text, strict=False) for text in trusted_proxies]
        except ValueError as error:
            sentence = f"hub.trusted_proxies: {error}; each is an address or a network such as 10.0.0.0/8"
            raise ConfigError(sentence) from error

    def client(self, address: str) -> str:
        client = _client_of(address)
        return "" if address in OWN_ADDRESSES or client in OWN_ADDRESSES else client

    def forwarded(self, peer: str, hops: str) -> str:
        """The address that the trusted proxy `peer` speaks for: the last of its X-Forwarded-For that is no trusted
        proxy. What comes before that may be made up.

        >>> Addresses(["10.0.0.0/8"]).forwarded("10.0.0.1", "198.51.100.1, 203.0.113.5, 10.0.0.2")
        '203.0.113.5'
        """
        named = [hop.strip() for hop in hops.split(",") if hop.strip()] if hops and self.is_proxy(peer) else []
        return next((hop for hop in reversed(named) if not self.is_proxy(hop)), named[0] if named else peer)

    def is_proxy(self, address: str) -> bool:
        if not self._proxies:
            return False
        try:
            parsed = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return False
        parsed = getattr(parsed, "ipv4_mapped", None) or parsed  # of a socket for IPv6 and IPv4 alike
        return any(parsed in network for network in self._proxies)


@lru_cache(4096)
def network_of(client: str) -> str:
    """The network of a client: /24 of IPv4, /48 of IPv6.

    >>> network_of("192.0.2.7"), network_of("2001:db8:1:2::/64"), network_of("")
    ('192.0.2.0/24', '2001:db8:1::/48', '')
    """
    try:
        found = ipaddress.ip_network(client, strict=False)
    except ValueError:
        return client
    return str(found.supernet(new_prefix=24 if found.version == 4 else 48))


class Intake:
    """The bytes of request bodies in memory, in all and by sender. They count as they arrive, not as announced: to keep
    others out, a sender has to send them all. A body that is alone is never refused."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.held: Counter[str] = Counter()
        self.held_bytes = self.received_bytes = 0

    def add(self, who: str, size_bytes: int, body_bytes: int) -> None:
        self.received_bytes += size_bytes
        self.held_bytes += size_bytes
        self.held[who] += size_bytes
        if self.held_bytes > max(body_bytes, self.most_bytes):
            raise Refusal(503, "hub.busy", "the hub is receiving as much as it can hold: try again in a moment")
        if self.held[who] > max(body_bytes, self.most_bytes // SHARE_OF_ONE):
            raise too_much("rate.uploads", "too much is being sent at once: send one body after the other", 1.0)

    def release(self, who: str, body_bytes: int) -> None:
        self.held_bytes -= body_bytes
        self.held[who] -= body_bytes
        if self.held[who] <= 0:
            del self.held[who]
