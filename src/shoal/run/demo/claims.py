"""What the demo says of itself, and whether it is true: decided from what the run wrote down and the model alone.

    ledger.jsonl ──► who was paid; whose groups were trained on
    hub.db ────────► who was rejected and banned, and why: who never had work accepted is not in the ledger
    metrics.jsonl ─► the held-out score before and after
    recount ───────► the exported model's score, by somebody else's code

A claim that does not hold makes the demo fail, whatever else went well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.adversary import Cheat
from shoal.ledger import Account
from shoal.protocol import LedgerEntry
from shoal.run.demo.recount import Recount

LEAST_RISE = 0.20
SCORE_TOLERANCE_TASKS = 1  # another engine may break one tie between two next tokens otherwise


@dataclass(frozen=True)
class Claim:
    """A sentence for people, under a short name, and whether it is so."""

    name: str
    holds: bool
    sentence: str


@dataclass(frozen=True)
class Cast:
    """Who plays what: node ids by the names of their processes."""

    honest: Mapping[str, str]
    cheater: str
    cheater_name: str
    cheat: Cheat


@dataclass(frozen=True)
class Standing:
    """The accounts of all nodes, and when the banned ones were banned."""

    accounts: Mapping[str, Account]
    banned_at_ms: Mapping[str, int]


def learned(scores: Sequence[float], least_rise: float = LEAST_RISE) -> Claim:
    """The greedy held-out score rose by enough."""
    if len(scores) < 2:
        return Claim("it learned", False, f"the held-out score was measured {len(scores)} times; two are needed")
    rise = scores[-1] - scores[0]
    sentence = f"held-out score {scores[0]:.3f} → {scores[-1]:.3f} ({100 * rise:+.1f} points)"
    if rise < least_rise:
        sentence += f"; at least {100 * least_rise:+.0f} were expected"
    return Claim("it learned", rise >= least_rise, sentence)


def cheater_caught(entries: Sequence[LedgerEntry], standing: Standing, cast: Cast) -> Claim:
    """The cheater was banned, and for what it did."""
    name, who = "the cheater", f"{cast.cheater_name} ({cast.cheat.what})"
    account = standing.accounts.get(cast.cheater, Account())
    if not account.banned:
        return Claim(name, False, f"{who} was not caught: {account.accepted} accepted, {account.rejected} rejected")
    code = account.reason.partition(":")[0]
    if code not in cast.cheat.reasons:
        expected = " or ".join(sorted(cast.cheat.reasons))
        return Claim(name, False, f"{who} was banned for {account.reason}, not for {expected}")
    after_s = (standing.banned_at_ms[cast.cheater] - entries[0].at_ms) / 1000
    sentence = (
        f"{who} was banned {after_s:.0f} s after the hub began, for {account.reason}; {account.rejected} rejected"
    )
    if not account.accepted:
        return Claim(name, True, f"{sentence}, none accepted")
    theirs = {entry.body["unit"] for entry in entries if entry.kind == "credit" and entry.body["node"] == cast.cheater}
    trained = sum(unit in theirs for entry in entries if entry.kind == "batch" for unit in entry.body["units"])
    passed = f"{account.accepted} accepted, being what honest dice give as well ({trained} of them trained on)"
    return Claim(name, True, f"{sentence}, {passed}")


def honest_unpunished(standing: Standing, cast: Cast) -> Claim:
    """No honest worker lost a group, let alone its place; and each did something."""
    of = {name: standing.accounts.get(node, Account()) for name, node in cast.honest.items()}
    punished = [
        f"{name}: {account.rejected} rejected{f', banned: {account.reason}' if account.banned else ''}"
        for name, account in of.items()
        if account.banned or account.rejected
    ]
    idle = [name for name, account in of.items() if not account.accepted]
    if punished:
        return Claim("the honest", False, "punished without cause: " + "; ".join(punished))
    if idle:
        return Claim("the honest", False, f"{' and '.join(idle)} had nothing accepted")
    accepted, credit = sum(a.accepted for a in of.values()), sum(a.credit for a in of.values())
    return Claim("the honest", True, f"{' and '.join(of)}: {accepted:,} groups accepted, 0 rejected, credit {credit:,}")


def model_scores_as_claimed(claimed: float | None, counted: Recount) -> Claim:
    """The exported model does what the trainer said, when somebody else's code loads it."""
    sentence = f"loads with plain transformers, scores {counted.score:.3f} on {counted.tasks} held-out tasks"
    if claimed is None:
        return Claim("the model", False, f"{sentence}; the trainer made no claim")
    off = abs(counted.score - claimed) * counted.tasks
    if off > SCORE_TOLERANCE_TASKS + 1e-6:
        return Claim("the model", False, f"{sentence}; the trainer claimed {claimed:.3f}")
    return Claim("the model", True, f"{sentence}, as claimed")
