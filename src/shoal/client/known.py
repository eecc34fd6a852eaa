"""What a client knows of its run: described by its hubs, verified from the root key down, shared by its threads.

    GET /run ─► open_run_info (pinned root; the first answer's if none is pinned) ─► TrustedRun
       ▲                                                                               │ further hubs ─► Hubs
       └── again, once, when something is signed by a hub key that is not in there ◄───┘ (the key was rotated)

A hub at a further address, asked when the first fails, has to describe the same run by the same root key.
"""

from __future__ import annotations

import threading
from dataclasses import replace

from pydantic import ValidationError

from shoal.client.hubs import Hubs
from shoal.client.transport import RUN, Transport
from shoal.client.trust import TrustedRun, open_run_info
from shoal.errors import ProtocolError, SignatureError
from shoal.protocol import SignedDocument, first_problem
from shoal.runtime.clock import Clock
from shoal.runtime.targets import Nearness, Reach

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
            raise ProtocolError(
                f"the answer of {url}/run is not a SignedDocument: {first_problem(error)}; "
                "is this address a shoal hub of the same version?"
            ) from error
        with self._changing:
            known = self._trusted
            pinned = self._pinned if known is None else known.root_fingerprint
            found = open_run_info(signed, pinned, frozenset() if known is None else known.revoked)
            if known is not None and found.run != known.run:
                raise SignatureError(f"the hub at {url} belongs to run {found.run!r}, not to {known.run!r}")
            nearest = near if known is None else min(near, known.reach.nearest)
            self._trusted = replace(found, reach=Reach(nearest))
        self._hubs.named(found.info.hubs)
