"""Which newcomer gets the next unit: networks take turns, then the addresses of a network, then the keys of an address.

If there are too few units, a free one goes to the waiting network that got the fewest; by the same rule to one of its
addresses, and to a key there. A newly accepted group puts its network, address and key first until they ask again.
Letting others go first ends after about `lease_s`: they may be unable to take what is free. All of it is kept
in the memory of one process: addresses are written nowhere.
"""

from __future__ import annotations

import ipaddress
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

WAITS_MS = 10_000  # who has not asked for so long does not wait any more: workers ask every 5 s
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
class _Asker:
    """A network, an address, or a key; `within` are its addresses or keys, the one that asked last at the end."""

    taken: int = 0
    asked_ms: int = 0
    waiting_ms: int | None = None  # when it last asked and got nothing, if it has got nothing since
    deferring_ms: int | None = None  # since when it lets others go first who took nothing
    within: OrderedDict[str, _Asker] = field(default_factory=OrderedDict)

    def before(self, own: _Asker, now_ms: int) -> int:
        return sum(
            each.waiting_ms is not None and each.taken < own.taken and now_ms - each.waiting_ms <= WAITS_MS
            for each in self.within.values()
        )

    def took(self, own: _Asker, units: int) -> None:
        for each in self.within.values():
            if each.taken > own.taken:
                each.deferring_ms = None  # it let this one go first, which took units
        own.taken += units
        own.waiting_ms = own.deferring_ms = None

    def earned(self, now_ms: int) -> None:
        self.taken, self.waiting_ms = -1, now_ms  # before those who have had no turn yet: they may never deliver

    def forget(self, now_ms: int, most: int) -> None:
        while len(self.within) > most or now_ms - next(iter(self.within.values())).asked_ms > FORGOTTEN_MS:
            self.within.popitem(last=False)


@dataclass(frozen=True)
class Place:
    """Where a newcomer asks from. This machine's own processes have no network and wait for nobody's turn."""

    network: str
    address: str
    node: str

    def names(self) -> tuple[str, ...]:
        return (self.network, self.address, self.node) if self.network else (self.network,)


class Turns:
    def __init__(self) -> None:
        self._networks = _Asker()
        self._lock = threading.Lock()

    def ahead(self, place: Place, now_ms: int, longest_ms: int) -> tuple[int, int]:
        """How many other networks, and how many addresses and keys of this one, wait and got fewer units. None if this
        one has let them go first for `longest_ms` and they took nothing."""
        found = [0, 0]
        with self._lock:
            for depth, (around, own) in enumerate(self._path(place)):
                if own.deferring_ms is None or now_ms - own.deferring_ms < longest_ms:
                    found[min(depth, 1)] += around.before(own, now_ms)
        return found[0], found[1]

    def taken(self, place: Place) -> int:
        """How many units newcomers at this address got since a group from there was accepted."""
        with self._lock:
            path = [own.taken for _, own in self._path(place)]
        return max(0, path[1]) if len(path) > 1 else 0

    def _path(self, place: Place) -> Iterator[tuple[_Asker, _Asker]]:
        around = self._networks
        for name in place.names():
            own = around.within.get(name, _Asker())
            yield around, own
            around = own

    def asked(self, place: Place, units: int, now_ms: int, deferred: bool = False, only_inside: bool = False) -> None:
        """A newcomer asked and got so many units; with none it waits. If only its own network is to blame
        (`only_inside`), the network does not wait. `deferred`: it got none because others go first."""
        with self._lock:
            around = self._networks
            for depth, name in enumerate(place.names()):
                own = around.within.setdefault(name, _Asker())
                around.within.move_to_end(name)
                own.asked_ms = now_ms
                if units:
                    around.took(own, units)
                elif depth or not only_inside:
                    own.waiting_ms = now_ms
                if deferred and own.deferring_ms is None and around.before(own, now_ms):
                    own.deferring_ms = now_ms
                around.forget(now_ms, REMEMBERED[depth])
                around = own

    def earned(self, network: str, node: str, now_ms: int) -> None:
        with self._lock:
            found = self._networks.within.get(network, _Asker())
            found.earned(now_ms)
            for address in found.within.values():
                if node in address.within:
                    address.earned(now_ms)
                    address.within[node].earned(now_ms)
