"""What a client has registered as, kept so that a hub which has forgotten the node can be told again.

    call ─► 401 auth.unknown_node ─► repeat: POST /nodes as before ─► the call once more ─► its answer, whatever it is

A hub restored from a backup does not know the nodes that came after it. Nobody has to start their worker anew for that.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from shoal.errors import HubUnreachable
from shoal.protocol import Registration

log = logging.getLogger(__name__)

UNKNOWN_NODE = "auth.unknown_node"  # the hub's code for a key that has not registered


class Introduction:
    """Threads may share it: of several calls that are refused together, one registers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._registration: Registration | None = None
        self.times = 0  # registered so far; a call notes it before it is made

    def made(self, registration: Registration) -> None:
        self._registration = registration
        self.times += 1

    def repeat(self, seen: int, register: Callable[[Registration], object], patience_s: float) -> bool:
        """Have the node registered again, unless that was done since a call saw `seen`. False: it never was at all."""
        if self._registration is None:
            return False
        if not self._lock.acquire(timeout=patience_s):
            raise HubUnreachable(
                f"the hub has forgotten this node, and it is not registered again in {patience_s:.0f} s"
            )
        try:
            if self.times == seen:
                log.warning("the hub does not know this node any more (restored from a backup?): registering again")
                register(self._registration)
            return True
        finally:
            self._lock.release()
