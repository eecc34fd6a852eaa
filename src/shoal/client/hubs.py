"""The addresses of a run's hubs, and which of them is asked now.

    call ─► the present one ─┬─ answers ──────────────► it stays the present one
                             └─ unreachable, or 5xx ──► it rests; the next that does not rest is the present one
                                                        all rest: a pause, then the one that has rested longest

Nobody changes a hub that works: a client goes back to an earlier one only when the present one fails. A rest doubles
with every failure in a row, so that a dead address costs little of a long outage.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.errors import ConfigError
from shoal.runtime.clock import Clock
from shoal.runtime.targets import TargetRefused, check_url

FIRST_REST_S = 5.0
LONGEST_REST_S = 300.0


@dataclass
class _Hub:
    url: str
    failures: int = 0
    rests_until_s: float = 0.0
    verified: bool = False
    named: bool = False  # by another hub, not by the user


class Hubs:
    """Threads may share it."""

    def __init__(self, urls: Sequence[str], clock: Clock) -> None:
        if not urls:
            raise ConfigError("no hub was given: give the run's join URL")
        self._clock = clock
        self._lock = threading.Lock()
        self._known = [_Hub(url) for url in dict.fromkeys(url.rstrip("/") for url in urls)]
        self._present = 0

    @property
    def present(self) -> str:
        with self._lock:
            return self._known[self._present].url

    @property
    def urls(self) -> list[str]:
        with self._lock:
            return [hub.url for hub in self._known]

    def named(self, urls: Iterable[str]) -> None:
        """Further addresses of the same run, behind those given; they replace the ones that were named before, but for
        the present one. What is no address is left out."""
        with self._lock:
            present, known = self._known[self._present], {hub.url: hub for hub in self._known}
            given = [hub for hub in self._known if not hub.named or hub is present]
            new = [url for url in dict.fromkeys(url.rstrip("/") for url in urls) if _is_plain(url)]
            named = [known.get(url) or _Hub(url, named=True) for url in new]
            self._known = [*given, *(hub for hub in named if hub not in given)]
            self._present = given.index(present)

    def answered(self, url: str) -> None:
        with self._lock:
            for hub in self._known:
                if hub.url == url:
                    hub.failures, hub.rests_until_s = 0, 0.0

    def failed(self, url: str) -> bool:
        """That one did not answer. True if another can be asked at once, which is then the present one."""
        with self._lock:
            now_s = self._clock.monotonic_s()
            for hub in self._known:
                if hub.url == url:
                    hub.failures += 1
                    rest_s = min(FIRST_REST_S * 2 ** min(hub.failures - 1, 10), LONGEST_REST_S)
                    hub.rests_until_s = now_s + rest_s
            if self._known[self._present].url != url:
                return True  # another thread has moved on already
            return self._choose(self._present + 1)

    def is_checked(self, url: str) -> bool:
        """Whether the place of this address is checked: not at the first contact with one that the user gave."""
        with self._lock:
            return any(hub.url == url and (hub.named or hub.verified) for hub in self._known)

    def is_verified(self, url: str) -> bool:
        """Whether the hub at this address was seen to belong to the run."""
        with self._lock:
            return any(hub.url == url and hub.verified for hub in self._known)

    def verified(self, url: str) -> None:
        with self._lock:
            for hub in self._known:
                if hub.url == url:
                    hub.verified = True

    def drop(self, url: str) -> bool:
        """Never ask that one again: it belongs to another run. False if there is no other, and it stays."""
        with self._lock:
            index = next((i for i, hub in enumerate(self._known) if hub.url == url), None)
            if index is None:
                return True
            if len(self._known) == 1:
                return False
            del self._known[index]
            if self._present > index:
                self._present -= 1
            elif self._present == index:
                self._choose(index)
            return True

    def _choose(self, first: int) -> bool:
        """Make the next from `first` on that does not rest the present one; False if all rest."""
        now_s, count = self._clock.monotonic_s(), len(self._known)
        order = [(first + offset) % count for offset in range(count)]
        rested = [index for index in order if self._known[index].rests_until_s <= now_s]
        self._present = rested[0] if rested else min(order, key=lambda index: self._known[index].rests_until_s)
        return bool(rested)


def _is_plain(url: str) -> bool:
    try:
        check_url(url)
    except TargetRefused:
        return False
    return True
