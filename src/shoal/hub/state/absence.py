"""A time in which nobody could reach the hub: it was stopped or suspended, or its database was away.

    from ──────────── away ──────────── until ──── grace ────┐
         deadlines that fall in here, of leases given out    └─► end only now, and count as nobody's fault
         before the hub was back

Workers could not hand in anything meanwhile, nor ask for more time. What was overdue before, is overdue.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.hub.state.rows import LeaseRow


@dataclass(frozen=True)
class Absence:
    """The hub was away between these times; who holds a lease has `grace_ms` to come back."""

    from_ms: int
    until_ms: int
    grace_ms: int

    def struck(self, lease: LeaseRow) -> bool:
        """Whether the absence took from a lease the time in which its work would have been handed in."""
        is_older = lease.issued_at_ms < self.until_ms
        return is_older and self.from_ms < lease.deadline_ms < self.until_ms + self.grace_ms

    def spares(self, lease: LeaseRow, now_ms: int) -> bool:
        """Whether the lease goes on for now, although its deadline has passed."""
        return now_ms < self.until_ms + self.grace_ms and self.struck(lease)
