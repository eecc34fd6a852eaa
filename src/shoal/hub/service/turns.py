"""Whose turn it is among newcomers: networks take turns, in a network its addresses, at an address its keys.

If there is not enough for all, a free unit goes to the waiting network that had fewer; inside it in the same way to an
address, and there to a key. A party with a newly accepted group is first, and its place is kept until it asks again.
A party yields for about `lease_s` at most: the others may wait for what they do not take. All this is of one
process and in memory only: addresses are written nowhere.
"""

from __future__ import annotations

import ipaddress
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

WAITS_MS = 10_000  # of whom nothing has been heard for so long does not wait any more: workers ask every 5 s
FORGOTTEN_MS = 600_000
REMEMBERED = (4096, 256, 256)  # networks; addresses of one; keys of an address


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


@dataclass
class _Party:
    """A network, an address, or a key; `within` are those inside it, in the order in which they asked."""

    taken: int = 0
    asked_ms: int = 0
    waits_ms: int | None = None  # when it last asked in vain, if it has got nothing since
    yields_ms: int | None = None  # since when it has yielded, and nobody has taken what it left
    within: OrderedDict[str, _Party] = field(default_factory=OrderedDict)

    def before(self, own: _Party, now_ms: int) -> int:
        return sum(
            each.waits_ms is not None and each.taken < own.taken and now_ms - each.waits_ms <= WAITS_MS
            for each in self.within.values()
        )

    def took(self, own: _Party, units: int) -> None:
        for each in self.within.values():
            if each.taken > own.taken:
                each.yields_ms = None  # it yielded to this one, and not in vain
        own.taken += units
        own.waits_ms = own.yields_ms = None

    def earned(self, now_ms: int) -> None:
        self.taken, self.waits_ms = -1, now_ms  # before those who have had no turn yet: they may never deliver

    def forget(self, now_ms: int, most: int) -> None:
        while True:
            name, each = next(iter(self.within.items()))
            if len(self.within) <= most and now_ms - each.asked_ms <= FORGOTTEN_MS:
                return
            del self.within[name]


@dataclass(frozen=True)
class Place:
    """Where a newcomer asks from. This machine's own processes are of no network and in no order."""

    network: str
    address: str
    node: str

    def names(self) -> tuple[str, ...]:
        return (self.network, self.address, self.node) if self.network else (self.network,)


class Turns:
    def __init__(self) -> None:
        self._networks = _Party()
        self._lock = threading.Lock()

    def ahead(self, place: Place, now_ms: int, longest_ms: int) -> tuple[int, int]:
        """How many other networks, and how many parties inside this one, wait and have had fewer units. After
        `longest_ms` of yielding in vain, none."""
        found = [0, 0]
        with self._lock:
            for depth, (around, own) in enumerate(self._path(place)):
                if own.yields_ms is None or now_ms - own.yields_ms < longest_ms:
                    found[min(depth, 1)] += around.before(own, now_ms)
        return found[0], found[1]

    def taken(self, place: Place) -> int:
        """How many units newcomers at this address got since a group from there was accepted."""
        with self._lock:
            path = [own.taken for _, own in self._path(place)]
        return max(0, path[1]) if len(path) > 1 else 0

    def _path(self, place: Place) -> Iterator[tuple[_Party, _Party]]:
        around = self._networks
        for name in place.names():
            own = around.within.get(name, _Party())
            yield around, own
            around = own

    def asked(self, place: Place, units: int, now_ms: int, yielded: bool = False, only_inside: bool = False) -> None:
        """A newcomer asked and got so many units; with none it waits. If others of its own network have them
        (`only_inside`), the network does not wait."""
        with self._lock:
            around = self._networks
            for depth, name in enumerate(place.names()):
                own = around.within.setdefault(name, _Party())
                around.within.move_to_end(name)
                own.asked_ms = now_ms
                if units:
                    around.took(own, units)
                elif depth or not only_inside:
                    own.waits_ms = now_ms
                if yielded and own.yields_ms is None and around.before(own, now_ms):
                    own.yields_ms = now_ms
                around.forget(now_ms, REMEMBERED[depth])
                around = own

    def earned(self, network: str, node: str, now_ms: int) -> None:
        with self._lock:
            found = self._networks.within.get(network, _Party())
            found.earned(now_ms)
            for address in found.within.values():
                if node in address.within:
                    address.earned(now_ms)
                    address.within[node].earned(now_ms)
