"""Shares: which part of a run is whose, at any step, as whole numbers.

    share of X at step n  =  final credit of X  /  final credit of all,      both in rows 0 … b(n)

b(n) is the row that wrote down the batch of step n: from then on what that step is trained on never changes. X is an
owner (a public key) with all the machines that it had vouched for by that row, or a machine that nobody had vouched
for. Credit that is pending there is not counted: it is nobody's yet. The fraction is exact: two integers, never a
float. It follows from a prefix of the ledger, so nothing that is written later can change it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import gcd

from shoal.errors import UserError
from shoal.ledger.accounts import Accounts
from shoal.protocol import LedgerEntry


@dataclass(frozen=True)
class Share:
    """`credit` of `total`; `nodes` are the machines that earned it.

    >>> Share("ab", ("ab",), 6, 8).fraction
    (3, 4)
    """

    holder: str
    nodes: tuple[str, ...]
    credit: int
    total: int

    @property
    def fraction(self) -> tuple[int, int]:
        """In lowest terms; (0, 1) while nobody has any credit."""
        if self.credit == 0:
            return 0, 1
        common = gcd(self.credit, self.total)
        return self.credit // common, self.total // common


@dataclass(frozen=True)
class Shares:
    """All shares after row `index`, the largest first. They add up to `total` exactly."""

    index: int
    total: int
    shares: tuple[Share, ...]


def shares_of(entries: Iterable[LedgerEntry], step: int | None = None) -> Shares:
    """The shares when the batch of `step` was written down; None: after the last entry."""
    accounts, index = Accounts(), -1
    for entry in entries:
        accounts.add(entry)
        index = entry.index
        if step is not None and accounts.steps > step:
            break
    if step is not None and accounts.steps <= step:
        raise UserError(
            f"the ledger has no batch of step {step}: "
            + (f"the last one is of step {accounts.steps - 1}" if accounts.steps else "no step has a batch yet")
        )
    return Shares(index, accounts.total_credit, _sorted(accounts))


def _sorted(accounts: Accounts) -> tuple[Share, ...]:
    nodes: dict[str, list[str]] = {}
    for node in accounts.by_node:
        nodes.setdefault(accounts.holder(node), []).append(node)
    total = accounts.total_credit
    found = [
        Share(holder, tuple(sorted(nodes[holder])), account.credit, total)
        for holder, account in accounts.by_holder().items()
        if account.credit
    ]
    return tuple(sorted(found, key=lambda share: (-share.credit, share.holder)))
