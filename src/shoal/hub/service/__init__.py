"""Each call is one or two transactions around a decision of `hub.state`. Services are synchronous and know nothing of
HTTP: a refusal is an exception (`state.commands.Refusal`)."""

import logging

from shoal.errors import ShoalError
from shoal.hub.service.archiving import Archiving
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
    def __init__(self, config: HubConfig, clock: Clock, storage: Storage | None = None) -> None:
        self.context = context = Context(config, clock, storage)
        self.membership, self.administration = Membership(context), Administration(context)
        self.calibrating, self.showing, self.training = Calibrating(context), Showing(context), Training(context)
        self.work = Work(context, self.calibrating)
        self.evaluating = Evaluating(context, self.work.drawing)
        self.checking = Checking(context, self.work, self.evaluating, self.showing)
        self.posting = posting = Posting(context)
        self.reporting, now_ms = Reporting(context, posting), context.clock.now_ms
        self.stories = Stories(
            context.storage, config.run_id, context.secret, context.rules, now_ms,
            post=lambda: posting.post_for_reader(),  # looked up each time
        )  # fmt: skip
        self.archiving = Archiving(context)
        self.upkeep, self._closed = Upkeep(context, posting, self.evaluating, self.archiving), False

    def close(self) -> None:
        """Empty the outbox first, so that the folder has the whole ledger. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        try:
            self.context.storage.flush()
            self.posting.post()
            self.archiving.close()
            self.context.resign()
        except ShoalError as error:  # what is recorded is in the outbox, on disk: the next to lead posts it
            log.warning("the last rows of the ledger are not posted yet: %s", error)
        self.context.close()
