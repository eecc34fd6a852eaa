"""The addresses of one run's hubs: which is asked, which rests, which is never asked again.

One that does not answer rests, twice as long with every failure in a row, and the next that does not rest is asked.
When all rest, the one whose rest ends first is asked after a pause.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from shoal.errors import ConfigError
from shoal.runtime.clock import Clock
from shoal.runtime.targets import TargetRefused, check_url

FIRST_REST_S = 5.0
LONGEST_REST_S = 300.0


@dataclass(eq=False)
class HubAddress:
    url: str
    named: bool = False  # by another hub, not by the user
    verified: bool = False  # it was seen to belong to the run
    failures: int = 0
    rests_until_s: float = 0.0

    def answered(self) -> None:
        self.failures, self.rests_until_s = 0, 0.0


class Hubs:
    """Threads may share it."""

    def __init__(self, urls: Sequence[str], clock: Clock) -> None:
        if not urls:
            raise ConfigError("no hub was given: give the run's join URL")
        self._clock, self._lock = clock, threading.Lock()
        self._known = [HubAddress(url) for url in dict.fromkeys(url.rstrip("/") for url in urls)]
        self.present = self._known[0]

    @property
    def urls(self) -> list[str]:
        with self._lock:
            return [hub.url for hub in self._known]

    def named(self, urls: Iterable[str]) -> None:
        """Further addresses of the same run, behind those given; they replace those named before, but for the present
        one."""
        with self._lock:
            known = {hub.url: hub for hub in self._known}
            self._known = [hub for hub in self._known if not hub.named or hub is self.present]
            for url in dict.fromkeys(url.rstrip("/") for url in urls):
                with suppress(TargetRefused):
                    check_url(url)
                    hub = known.get(url) or HubAddress(url, named=True)
                    self._known += [] if hub in self._known else [hub]

    def failed(self, hub: HubAddress) -> bool:
        """That one did not answer. True if another can be asked at once, which is then the present one."""
        with self._lock:
            hub.failures += 1
            rest_s = min(FIRST_REST_S * 2 ** min(hub.failures - 1, 10), LONGEST_REST_S)
            hub.rests_until_s = self._clock.monotonic_s() + rest_s
            return self.present is not hub or self._move_on()  # another thread may have moved on already

    def drop(self, hub: HubAddress) -> bool:
        """Never ask that one again: it belongs to another run. False if there is no other, and it stays."""
        with self._lock:
            if self._known == [hub]:
                return False
            if self.present is hub:
                self._move_on()
            self._known = [each for each in self._known if each is not hub]
            if self.present is hub:
                self.present = self._known[0]
            return True

    def _move_on(self) -> bool:
        """Make the next that does not rest the present one; False if all rest."""
        now_s, index = self._clock.monotonic_s(), self._known.index(self.present)
        order = [*self._known[index + 1 :], *self._known[: index + 1]]
        rested = [hub for hub in order if hub.rests_until_s <= now_s]
        self.present = rested[0] if rested else min(order, key=lambda hub: hub.rests_until_s)
        return bool(rested)
