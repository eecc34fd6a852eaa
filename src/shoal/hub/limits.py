"""How much one caller may ask for: buckets by key and by address, and the bytes that are being received.

An IPv4 address is one client, an IPv6 /64 network another (`client_of`). This machine's processes have no address here.
"""

from __future__ import annotations

import ipaddress
import math
import threading
from collections import Counter
from collections.abc import Sequence

from shoal.errors import ConfigError
from shoal.hub.state.commands import Refusal
from shoal.shardcast.limits import client_of

OWN_ADDRESSES = ("", "127.0.0.1", "::1")
SHARE_OF_ONE = 4  # one caller may have a quarter of all that may be received at a time


def too_much(code: str, sentence: str, wait_s: float) -> Refusal:
    return Refusal(429, code, sentence, retry_after_s=max(1, math.ceil(wait_s)))


class Buckets:
    """A bucket for each caller that fills at a rate; a rate of 0 is no limit. Threads may share it. Beyond `remembered`
    callers, whoever was here longest ago is forgotten: many addresses cost no more memory.

    >>> buckets = Buckets(rate_s=1.0, burst_s=2.0)
    >>> [buckets.take("alice", now_s=0.0) for _ in range(3)]
    [0.0, 0.0, 1.0]
    """

    def __init__(self, rate_s: float, burst_s: float = 10.0, remembered: int = 4096) -> None:
        self._rate_s, self._full, self._remembered = rate_s, max(1.0, rate_s * burst_s), remembered
        self._buckets: dict[str, tuple[float, float]] = {}  # level, and when it was that
        self._lock = threading.Lock()

    def take(self, who: str, now_s: float, only_look: bool = False) -> float:
        """Take one, if there is one; else for how long to wait. `only_look` takes and remembers nothing."""
        if self._rate_s <= 0:
            return 0.0
        with self._lock:
            level, at_s = self._buckets.get(who, (self._full, now_s))
            level = min(self._full, level + max(0.0, now_s - at_s) * self._rate_s)
            wait_s = max(0.0, 1.0 - level) / self._rate_s
            if not only_look:
                self._buckets.pop(who, None)
                self._buckets[who] = (level if wait_s else level - 1.0, now_s)
                if len(self._buckets) > self._remembered:
                    del self._buckets[next(iter(self._buckets))]
            return wait_s


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
        client = client_of(address)
        return "" if address in OWN_ADDRESSES or client in OWN_ADDRESSES else client

    def is_proxy(self, address: str) -> bool:
        try:
            parsed = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return False
        parsed = getattr(parsed, "ipv4_mapped", None) or parsed  # of a socket for IPv6 and IPv4 alike
        return any(parsed in network for network in self._proxies)


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
