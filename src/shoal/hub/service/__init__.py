"""What the hub does: each call is one or two transactions around a decision of `hub.state`.

Services are synchronous and know nothing of HTTP: a refusal is an exception (`state.commands.Refusal`).
"""

from __future__ import annotations

import logging

from shoal.errors import ShoalError
from shoal.hub.service.checking import Checking
from shoal.hub.service.context import Context, retry
from shoal.hub.service.measuring import Calibrating, Evaluating
from shoal.hub.service.membership import Administration, Membership
from shoal.hub.service.reporting import Reporting
from shoal.hub.service.showing import Showing
from shoal.hub.service.stories import Stories
from shoal.hub.service.training import Training
from shoal.hub.service.upkeep import Posting, Upkeep
from shoal.hub.service.work import Work
from shoal.hub.settings import HubConfig
from shoal.hub.storage import Storage
from shoal.runtime.clock import Clock

__all__ = ["Context", "Hub", "retry"]

log = logging.getLogger("shoal.hub")


class Hub:
    """All services over one open folder; `storage` takes the place of its database."""

    def __init__(self, config: HubConfig, clock: Clock, storage: Storage | None = None) -> None:
        self.context = Context(config, clock, storage)
        self.posting = Posting(self.context)
        self.membership = Membership(self.context)
        self.calibrating = Calibrating(self.context)
        self.work = Work(self.context, self.calibrating)
        self.evaluating = Evaluating(self.context, self.work.drawing)
        self.showing = Showing(self.context)
        self.checking = Checking(self.context, self.work, self.evaluating, self.showing)
        self.training = Training(self.context)
        self.reporting = Reporting(self.context, self.posting)
        self.stories = Stories(self.context, self.posting)
        self.administration = Administration(self.context)
        self.upkeep = Upkeep(self.context, self.posting, self.evaluating)
        self._closed = False

    def close(self) -> None:
        """Leave a ledger with nothing outgoing, so that who reads the folder reads all of it. Twice is harmless."""
        if self._closed:
            return
        self._closed = True
        try:
            self.posting.post()
            self.context.resign()
        except ShoalError as error:  # what is recorded is in the outbox, on disk: the next to lead posts it
            log.warning("the last rows of the ledger are not posted yet: %s", error)
        self.context.close()
