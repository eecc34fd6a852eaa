"""Weights before leases: the newest policy is fetched and loaded before the worker asks for work.

    heartbeat, lease reply ─ newest policy ─► follow ─┬─ loaded ─► the worker asks for leases under it
                                                      └─ a newer one is out: it is fetched for `FOLLOW_S`, then in the
                                                         background (`Prefetch`) while the hub gives out leases under
                                                         the old one; once it does not, only fetching is left to do

So the time of a lease is for generating only, however slow the link: a fetch that takes minutes costs no lease.
"""

from __future__ import annotations

import logging

from shoal.client import Activity, HubClient
from shoal.engines.shelf import EngineShelf
from shoal.errors import BroadcastError, DeadlineExceeded
from shoal.protocol import HeartbeatReply, LeaseReply, PolicyRef
from shoal.protocol.lease import DEFAULT_PROFILE
from shoal.runtime.stop import StopToken

log = logging.getLogger(__name__)

FETCH_S = 3600.0  # what has arrived by then stays on disk, and the next attempt continues from there
FOLLOW_S = 5.0
PAUSE_S = 1.0  # after a policy could not be fetched, or while the run has none, before looking again


class NewestPolicy:
    """Which policy is loaded, and which is the newest. `hear` may be called by another thread than the rest."""

    def __init__(self, client: HubClient, shelf: EngineShelf, activity: Activity, stop: StopToken) -> None:
        self._client, self._shelf, self._activity, self._stop = client, shelf, activity, stop
        self._newest: PolicyRef | None = None
        self._outdated = True
        self.loaded: PolicyRef | None = None
        self.kind = DEFAULT_PROFILE  # of the engine that has it
        self.finished = False

    def hear(self, reply: HeartbeatReply | LeaseReply) -> None:
        newest, found = self._newest, reply.policy
        if found is not None and (newest is None or _age(found) >= _age(newest)):
            self._newest = found
        self.finished = self.finished or reply.finished

    @property
    def behind(self) -> bool:
        """Whether a newer policy than the loaded one is known to be out."""
        return self.loaded != self._newest

    def refused(self) -> None:
        """The hub gave out nothing under the loaded policy, and a newer one is out."""
        self._outdated = True

    def follow(self) -> bool:
        """Load the newest policy; whether there is one loaded to ask for leases under. False if the run is finished."""
        newest = self._newest or self._first()
        if newest is None or (self.finished and self.behind):
            return False
        if not self.behind:
            return True
        try:
            with self._activity.waiting(f"policy {newest.label}"):
                self.kind = self._shelf.get(newest, FETCH_S if self._outdated else FOLLOW_S).engine.kind
        except (BroadcastError, DeadlineExceeded) as error:
            if not self._outdated or self._stop.is_set():
                return not self._stop.is_set()
            log.warning("policy %s could not be fetched: %s", newest.label, error)
            self._stop.wait(PAUSE_S)
            return False
        self.loaded, self._outdated = newest, False
        return True

    def _first(self) -> PolicyRef | None:
        """Ask for the newest policy, with the patience that every call of the role has."""
        with self._activity.waiting("the first policy of the run"):
            self.hear(self._client.heartbeat(self._activity.heartbeat()))
            if self._newest is None and not self.finished:
                self._stop.wait(PAUSE_S)
        return self._newest


def _age(policy: PolicyRef) -> tuple[int, int]:
    return policy.incarnation, policy.version
