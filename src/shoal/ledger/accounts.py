"""Accounts: the credit of each node, computed from the ledger alone.

An accepted submission earns one credit per generated token, as counted by the validator. Credit is given once per
submission and never taken away. If a run audits by reputation, credit is pending for a window, and void if an audit of
the same node fails in it. A node earns for the key that vouched for it first, or else for itself.

    share of X at step n  =  final credit of X  /  final credit of all,      both in rows 0 … b(n)

b(n) is the row of the batch of step n. X is an owner with all machines that it had vouched for by that row, or a
machine without an owner. The fraction is exact, and later rows cannot change it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import gcd
from typing import Any

from shoal.errors import LedgerError, UserError
from shoal.protocol import LedgerEntry

CREDIT_PER_TOKEN = 1


def credit_for(generated_tokens: int) -> int:
    return CREDIT_PER_TOKEN * generated_tokens


@dataclass
class Account:
    credit: int = 0
    pending: int = 0
    void: int = 0
    accepted: int = 0
    rejected: int = 0
    banned: bool = False
    reason: str = ""
    suspended_until_ms: int | None = None
    owner: str = ""

    def plus(self, other: Account) -> Account:
        """The sum of two accounts of one owner, without the sanctions of single machines."""
        names = ("credit", "pending", "void", "accepted", "rejected")
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return Account(**sums, owner=self.owner or other.owner)


@dataclass
class Accounts:
    """By node; `add` one entry at a time, in order."""

    by_node: dict[str, Account] = field(default_factory=dict)
    steps: int = 0
    _judged: set[str] = field(default_factory=set)
    _pending: dict[str, tuple[str, int]] = field(default_factory=dict)

    @property
    def total_credit(self) -> int:
        return sum(account.credit for account in self.by_node.values())

    def holder(self, node: str) -> str:
        return self.by_node[node].owner or node

    def add(self, entry: LedgerEntry) -> None:
        try:
            if entry.kind == "batch":
                if entry.body["step"] != self.steps:
                    raise ValueError(f"the batch of step {entry.body['step']} comes where step {self.steps} should be")
                self.steps += 1
            elif entry.kind in ("node", "credit", "pending", "void", "rejected", "sanction", "vouch"):
                self._count(entry.kind, entry.body, self.by_node.setdefault(str(entry.body["node"]), Account()))
        except (KeyError, TypeError, ValueError) as error:
            raise LedgerError(f"ledger row {entry.index} ({entry.kind}) cannot be counted: {error}") from error

    def _count(self, kind: str, body: dict[str, Any], account: Account) -> None:
        if kind == "sanction":
            state, until_ms = str(body["state"]), body.get("until_ms")
            account.banned, account.reason = state == "banned", "" if state == "active" else str(body["reason"])
            account.suspended_until_ms = int(until_ms) if state == "suspended" and until_ms is not None else None
        elif kind == "vouch":
            if account.owner not in ("", str(body["owner"])):
                raise ValueError(f"node {body['node']} has an owner already, and an owner never changes")
            account.owner = str(body["owner"])
        elif kind == "rejected":
            self._judge_once(str(body["submission"]))
            account.rejected += 1
        elif kind != "node":
            tokens, credit = body["tokens"], body["credit"]
            if not isinstance(tokens, int) or credit != credit_for(tokens) or tokens < 0:
                raise ValueError(f"{tokens} tokens do not earn {credit} credit")
            submission, node, amount = str(body["submission"]), str(body["node"]), int(credit)
            if kind == "void" or (kind == "credit" and submission in self._pending):
                if self._pending.pop(submission, None) != (node, amount):
                    raise ValueError(f"{amount} credit for submission {submission[:16]}… is not what is pending for it")
                account.pending -= amount
            else:
                self._judge_once(submission)
                account.accepted += 1
            if kind == "pending":
                self._pending[submission] = node, amount
            setattr(account, kind, getattr(account, kind) + amount)

    def _judge_once(self, submission: str) -> None:
        if submission in self._judged:
            raise ValueError(f"submission {submission[:16]}… was judged before")
        self._judged.add(submission)


def fold(entries: Iterable[LedgerEntry]) -> Accounts:
    accounts = Accounts()
    for entry in entries:
        accounts.add(entry)
    return accounts


@dataclass(frozen=True)
class Share:
    """A holder's `credit` of `total`; `nodes` earned it."""

    holder: str
    nodes: tuple[str, ...]
    credit: int
    total: int

    @property
    def fraction(self) -> tuple[int, int]:
        """In lowest terms; (0, 1) while nobody has any credit."""
        common = gcd(self.credit, self.total) or 1
        return self.credit // common, max(1, self.total // common)


@dataclass(frozen=True)
class Shares:
    """The shares after row `index`, the largest first; they add up to `total`."""

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
        last = f"the last one is of step {accounts.steps - 1}" if accounts.steps else "no step has a batch yet"
        raise UserError(f"the ledger has no batch of step {step}: {last}")
    nodes, credit, total = dict[str, list[str]](), Counter[str](), accounts.total_credit
    for node in sorted(accounts.by_node):
        nodes.setdefault(accounts.holder(node), []).append(node)
        credit[accounts.holder(node)] += accounts.by_node[node].credit
    found = [Share(who, tuple(nodes[who]), earned, total) for who, earned in credit.items() if earned]
    return Shares(index, total, tuple(sorted(found, key=lambda share: (-share.credit, share.holder))))
