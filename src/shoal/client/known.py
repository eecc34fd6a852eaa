"""What a client knows of its run: described by its hubs, verified from the root key down, shared by its threads.

    GET /run ─► open_run_info (pinned root; the first answer's if none is pinned) ─► TrustedRun
       ▲                                                                               │ further hubs ─► Hubs
       └── again, once, when something is signed by a hub key that is not in there ◄───┘ (the key was rotated)

A hub at a further address, asked when the first fails, has to describe the same run by the same root key.

What the client has registered as is kept, so that a hub which has forgotten the node (restored from a backup) is told:

    call ─► 401 auth.unknown_node ─► repeat: POST /nodes as before ─► the call once more ─► its answer, whatever it is
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace

from pydantic import ValidationError

from shoal.client.transport import RUN, Hubs, Transport
from shoal.client.trust import TrustedRun, open_run_info
from shoal.errors import HubUnreachable, ProtocolError, SignatureError
from shoal.protocol import Registration, SignedDocument, first_problem
from shoal.runtime.clock import Clock
from shoal.runtime.targets import Nearness, Reach

log = logging.getLogger(__name__)

UNKNOWN_NODE = "auth.unknown_node"  # the hub's code for a key that has not registered
REFRESH_S = 10.0  # whoever answers with one strange signature after another makes nobody ask for /run all the time


class KnownRun:
    """Threads may share it."""

    def __init__(self, pinned: str | None, hubs: Hubs, clock: Clock) -> None:
        self._pinned = pinned
        self._hubs = hubs
        self._clock = clock
        self._fetching = threading.Lock()
        self._changing = threading.Lock()
        self._trusted: TrustedRun | None = None
        self._refreshed_s = -REFRESH_S

    def get(self, transport: Transport) -> TrustedRun:
        """The run; asked for at the first call. Who asks for it anew, for however long, keeps nobody waiting here."""
        known = self._trusted
        if known is not None:
            return known
        with self._fetching:
            if self._trusted is None:
                transport.send(RUN)
            assert self._trusted is not None, "a description that is not believed raises"
            return self._trusted

    def again(self, transport: Transport, seen: TrustedRun) -> TrustedRun:
        """The run as its hub describes it now, if that is not `seen` any more. Asks at most every few seconds."""
        with self._fetching:
            now_s = self._clock.monotonic_s()
            if self._trusted is seen and now_s - self._refreshed_s >= REFRESH_S:
                self._refreshed_s = now_s
                transport.send(RUN)
            return self._trusted or seen

    @property
    def reach(self) -> Reach | None:
        """Where the run's hubs may send this machine; None until one is known."""
        return None if self._trusted is None else self._trusted.reach

    def admit(self, url: str, content: bytes, near: Nearness) -> None:
        """Believe what the hub at `url`, which is so near, says of the run, or raise with what is wrong."""
        try:
            signed = SignedDocument.model_validate_json(content, extra="ignore")
        except ValidationError as error:
            what = f"the answer of {url}/run is not a SignedDocument: {first_problem(error)}"
            raise ProtocolError(f"{what}; is this address a shoal hub of the same version?") from error
        with self._changing:
            known = self._trusted
            pinned = self._pinned if known is None else known.root_fingerprint
            found = open_run_info(signed, pinned, frozenset() if known is None else known.revoked)
            if known is not None and found.run != known.run:
                raise SignatureError(f"the hub at {url} belongs to run {found.run!r}, not to {known.run!r}")
            nearest = near if known is None else min(near, known.reach.nearest)
            self._trusted = replace(found, reach=Reach(nearest))
        self._hubs.named(found.info.hubs)


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
            raise HubUnreachable(f"the hub has forgotten this node, and it is not registered in {patience_s:.0f} s")
        try:
            if self.times == seen:
                log.warning("the hub does not know this node any more (restored from a backup?): registering again")
                register(self._registration)
            return True
        finally:
            self._lock.release()
