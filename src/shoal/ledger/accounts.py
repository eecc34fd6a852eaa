"""Accounts: who earned what, folded from the ledger and nothing else.

The published formula: one credit per generated token of an accepted submission, as counted by the validator.
Credit is a whole number, is given once per submission, and is never taken away. Where a run audits by reputation it is
pending for a window, and void if an audit of the same node fails in it.

A node earns for whoever vouched for it first (`vouch` rows), or else for itself: `holder` says for whom.

    share of X at step n  =  final credit of X  /  final credit of all,      both in rows 0 … b(n)

b(n) is the row that wrote down the batch of step n. X is an owner (a public key) with all the machines that it had
vouched for by that row, or a machine that nobody had vouched for. The fraction is exact, two integers, and follows from
a prefix of the ledger, so nothing that is written later can change it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    """What the ledger says about one node."""

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
        """The sums of two accounts of one owner; what is about a single machine (sanctions) is left out."""
        names = ("credit", "pending", "void", "accepted", "rejected")
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return Account(**sums, owner=self.owner or other.owner)


@dataclass
class Accounts:
    """Accounts by node; `add` one entry at a time, in order."""

    by_node: dict[str, Account] = field(default_factory=dict)
    steps: int = 0
    _judged: set[str] = field(default_factory=set)
    _pending: dict[str, tuple[str, int]] = field(default_factory=dict)

    @property
    def total_credit(self) -> int:
        return sum(account.credit for account in self.by_node.values())

    def holder(self, node: str) -> str:
        """For whom a node earns: the public key that vouched for it, or the node itself."""
        return self.by_node[node].owner or node

    def by_holder(self) -> dict[str, Account]:
        """Accounts added up for each owner; nodes that nobody vouched for stand for themselves."""
        sums: dict[str, Account] = {}
        for node, account in self.by_node.items():
            holder = self.holder(node)
            sums[holder] = sums.get(holder, Account()).plus(account)
        return sums

    def add(self, entry: LedgerEntry) -> None:
        count: Callable[[dict[str, Any]], None] | None = getattr(self, f"_on_{entry.kind}", None)
        if count is None:
            return  # run, policy, pulled and admin rows move no credit: what an admin did to a node is a sanction row
        try:
            count(entry.body)
        except (KeyError, TypeError, ValueError) as error:
            raise LedgerError(f"ledger row {entry.index} ({entry.kind}) cannot be counted: {error}") from error

    def _account(self, body: dict[str, Any]) -> Account:
        return self.by_node.setdefault(str(body["node"]), Account())

    def _on_node(self, body: dict[str, Any]) -> None:
        self._account(body)

    def _on_credit(self, body: dict[str, Any]) -> None:
        amount = _amount(body)
        account = self._account(body)
        if str(body["submission"]) in self._pending:
            self._settle(body, amount)
        else:
            self._judge_once(body)
            account.accepted += 1
        account.credit += amount

    def _on_pending(self, body: dict[str, Any]) -> None:
        amount = _amount(body)
        self._judge_once(body)
        self._pending[str(body["submission"])] = (str(body["node"]), amount)
        account = self._account(body)
        account.accepted += 1
        account.pending += amount

    def _on_void(self, body: dict[str, Any]) -> None:
        amount = _amount(body)
        self._settle(body, amount)
        self._account(body).void += amount

    def _settle(self, body: dict[str, Any], amount: int) -> None:
        """Take from what is pending what this row is about; it must be that node's, and as much."""
        submission = str(body["submission"])
        held = self._pending.pop(submission, None)
        if held != (str(body["node"]), amount):
            raise ValueError(f"{amount} credit for submission {submission[:16]}… is not what is pending for it")
        self._account(body).pending -= amount

    def _on_rejected(self, body: dict[str, Any]) -> None:
        self._judge_once(body)
        self._account(body).rejected += 1

    def _on_sanction(self, body: dict[str, Any]) -> None:
        account, state = self._account(body), str(body["state"])
        until_ms = body.get("until_ms")
        account.banned = state == "banned"
        account.reason = "" if state == "active" else str(body["reason"])
        account.suspended_until_ms = int(until_ms) if state == "suspended" and until_ms is not None else None

    def _on_vouch(self, body: dict[str, Any]) -> None:
        account, owner = self._account(body), str(body["owner"])
        if account.owner not in ("", owner):
            raise ValueError(f"node {body['node']} has an owner already: the first who vouched stays")
        account.owner = owner

    def _on_batch(self, body: dict[str, Any]) -> None:
        if body["step"] != self.steps:
            raise ValueError(f"the batch of step {body['step']} comes where that of step {self.steps} should be")
        self.steps += 1

    def _judge_once(self, body: dict[str, Any]) -> None:
        submission = str(body["submission"])
        if submission in self._judged:
            raise ValueError(f"submission {submission[:16]}… was judged before")
        self._judged.add(submission)


def _amount(body: dict[str, Any]) -> int:
    tokens, credit = body["tokens"], body["credit"]
    if not isinstance(tokens, int) or credit != credit_for(tokens) or tokens < 0:
        raise ValueError(f"{tokens} tokens do not earn {credit} credit")
    return int(credit)


def fold(entries: Iterable[LedgerEntry]) -> Accounts:
    accounts = Accounts()
    for entry in entries:
        accounts.add(entry)
    return accounts


@dataclass(frozen=True)
class Share:
    """`credit` of `total`; `nodes` are the machines that earned it."""

    holder: str
    nodes: tuple[str, ...]
    credit: int
    total: int

    @property
    def fraction(self) -> tuple[int, int]:
        """In lowest terms; (0, 1) while nobody has any credit."""
        common = gcd(self.credit, self.total) if self.credit else max(1, self.total)
        return self.credit // common, max(1, self.total // common)


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
        last = f"the last one is of step {accounts.steps - 1}" if accounts.steps else "no step has a batch yet"
        raise UserError(f"the ledger has no batch of step {step}: {last}")
    nodes: dict[str, list[str]] = {}
    for node in accounts.by_node:
        nodes.setdefault(accounts.holder(node), []).append(node)
    total = accounts.total_credit
    found = [
        Share(holder, tuple(sorted(nodes[holder])), account.credit, total)
        for holder, account in accounts.by_holder().items()
        if account.credit
    ]
    return Shares(index, total, tuple(sorted(found, key=lambda share: (-share.credit, share.holder))))
