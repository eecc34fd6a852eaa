"""Units that nobody could judge: the validator generates them itself, and hands them in like a worker.

    hub ─ leases (`AuditReply.generate`) ─► one engine call per policy ─► submissions ─► hub ─ a light audit, no credit
               ▲                                  │ this machine cannot
               └── `left` with the next request ◄─┘

So a worker whose groups are unsure, by accident or on purpose, can keep no step from its units.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from shoal.client import Activity, HubClient
from shoal.client.delivery import Delivery
from shoal.engines.groups import generate, is_finite
from shoal.engines.shelf import EngineShelf
from shoal.engines.submission import submission_of
from shoal.errors import BroadcastError, DeadlineExceeded, HubRefused, ProtocolError, ResourceError
from shoal.protocol import Lease, PolicyRef, SignedDocument, pack
from shoal.runtime.stop import StopToken

log = logging.getLogger(__name__)

MAX_LEFT = 16


class Generating:
    """A validator's part in generating. `left` are leases that it could not do: the hub gives them to another."""

    def __init__(self, client: HubClient, shelf: EngineShelf, activity: Activity, stop: StopToken) -> None:
        self._client = client
        self._shelf = shelf
        self._activity = activity
        self._stop = stop
        self._delivery: Delivery | None = None
        self.left: tuple[str, ...] = ()

    def close(self) -> None:
        if self._delivery is not None:
            self._delivery.close()

    def generate(self, signed: Sequence[SignedDocument]) -> None:
        """Generate and hand in the groups of these leases."""
        leases = [self._client.open_own_lease(each) for each in signed]
        for policy in dict.fromkeys(lease.policy for lease in leases):
            if self._stop.is_set():
                return
            together = [lease for lease in leases if lease.policy == policy]
            try:
                self._generate(policy, together)
            except (BroadcastError, DeadlineExceeded, ResourceError, ProtocolError) as error:
                if self._stop.is_set():
                    return
                log.warning("%d units that nobody could judge were not generated: %s", len(together), error)
                self._leave(together)

    def _generate(self, policy: PolicyRef, leases: Sequence[Lease]) -> None:
        with self._activity.waiting(f"policy {policy.label}"):
            loaded = self._shelf.get(policy, self._shelf.wait_s)
        with self._activity.busy(f"generating {len(leases)} units that nobody could judge, by policy {policy.label}"):
            groups = generate(loaded, leases, self._activity.generated)
        for lease, completions in zip(leases, groups, strict=True):
            if not is_finite(completions):
                log.error("unit %d: this machine computed log-probabilities that are NaN or infinite", lease.unit)
                self._leave([lease])
                continue
            self._hand_in(lease, pack(submission_of(lease, completions, loaded.engine.name)))

    def _hand_in(self, lease: Lease, body: bytes) -> None:
        self._delivery = self._delivery or Delivery(self._client)
        try:
            self._delivery.hand_in(lease.lease, body)
            self._activity.count("generated")
        except HubRefused as refusal:  # it came too late: another validator has it, or nobody needs it any more
            log.warning("unit %d, which this validator generated, was not taken: %s", lease.unit, refusal)
        finally:
            self._activity.ended(lease.lease)

    def _leave(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            self._activity.ended(lease.lease)
        self.left = (*self.left, *(lease.lease for lease in leases))[-MAX_LEFT:]
