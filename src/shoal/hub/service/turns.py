"""Whose turn it is among newcomers: networks take turns, so that many keys of one network are not many turns.

    a newcomer that could start at once asks in vain, only for want of a unit ──► its network waits
    it is given units ────────► its network has had so many turns
    a group is accepted ──────► its network has had none: who works well is never behind those who waste units

A unit that comes free goes to a waiting network that had fewer turns, if there is not enough for all who wait. Nobody
yields for longer than about `lease_s`: the others may wait for something that they do not take. Of this process, and
forgotten when it ends: hubs that share a database each go by those who ask there.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

WAITS_MS = 10_000
"""A network of which nobody has asked for so long does not wait any more: workers ask every 5 s."""
FORGOTTEN_MS = 600_000
REMEMBERED = 4096


@dataclass
class _Turns:
    taken: int = 0
    asked_ms: int = 0
    waits: bool = False
    yields_ms: int | None = None  # since when it has yielded, and nobody has taken what it left


class Turns:
    """Turns of networks; the empty one (this machine's own) is one like any other. Threads may share it."""

    def __init__(self) -> None:
        self._networks: OrderedDict[str, _Turns] = OrderedDict()  # who asked last is last
        self._lock = threading.Lock()

    def ahead(self, network: str, now_ms: int, longest_ms: int) -> int:
        """How many other networks wait and have had fewer turns; none if it has yielded for `longest_ms` in vain."""
        with self._lock:
            own = self._networks.get(network, _Turns())
            if own.yields_ms is not None and now_ms - own.yields_ms >= longest_ms:
                return 0
            return sum(
                each.waits and each.taken < own.taken and now_ms - each.asked_ms <= WAITS_MS
                for each in self._networks.values()
            )

    def asked(self, network: str, units: int, now_ms: int, yielded: bool = False) -> None:
        """A newcomer of the network asked and got so many units; it waits if it got none."""
        with self._lock:
            turns = self._networks.setdefault(network, _Turns())
            self._networks.move_to_end(network)
            if units:
                for each in self._networks.values():
                    if each.taken > turns.taken:
                        each.yields_ms = None  # it yielded to this one, and not in vain
                turns.yields_ms = None
            elif yielded and turns.yields_ms is None:
                turns.yields_ms = now_ms
            turns.taken += units
            turns.asked_ms, turns.waits = now_ms, units == 0
            self._forget(now_ms)

    def earned(self, network: str) -> None:
        """A group of one of its newcomers was accepted."""
        with self._lock:
            if network in self._networks:
                self._networks[network].taken = 0

    def _forget(self, now_ms: int) -> None:
        while True:
            name, oldest = next(iter(self._networks.items()))
            if len(self._networks) <= REMEMBERED and now_ms - oldest.asked_ms <= FORGOTTEN_MS:
                return
            del self._networks[name]
