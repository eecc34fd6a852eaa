"""What the hub does: each call is one or two transactions around a decision of `hub.state`.

    context     Context: configuration, storage, secret, clock; `decision()`
    membership  Membership: register, heartbeat
    work        Work: lease, release, submit                     (workers)
    checking    Checking: audits, verdicts, bodies               (validators)
    training    Training: announce, batch, rollouts, report      (trainer)
    reporting   Reporting: run_info, status, ledger              (anyone)
    readiness   Ready: check                                     (anyone)
    upkeep      Upkeep: tick

Services are synchronous and know nothing of HTTP: a refusal is an exception (`state.refusals.Refusal`).
"""

from __future__ import annotations

from shoal.hub.service.checking import Checking
from shoal.hub.service.context import Context
from shoal.hub.service.membership import Membership
from shoal.hub.service.readiness import Ready
from shoal.hub.service.reporting import Reporting
from shoal.hub.service.training import Training
from shoal.hub.service.upkeep import Upkeep
from shoal.hub.service.work import Work
from shoal.hub.settings import HubConfig
from shoal.hub.storage import Storage
from shoal.runtime.clock import Clock


class Hub:
    """All services over one open folder; `storage` takes the place of its database."""

    def __init__(self, config: HubConfig, clock: Clock, storage: Storage | None = None) -> None:
        self.context = Context(config, clock, storage)
        self.membership = Membership(self.context)
        self.work = Work(self.context)
        self.checking = Checking(self.context)
        self.training = Training(self.context)
        self.reporting = Reporting(self.context)
        self.readiness = Ready(self.context)
        self.upkeep = Upkeep(self.context)

    def close(self) -> None:
        self.context.close()


__all__ = ["Checking", "Context", "Hub", "Membership", "Ready", "Reporting", "Training", "Upkeep", "Work"]
