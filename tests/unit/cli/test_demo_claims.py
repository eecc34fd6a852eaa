"""The demo's claims: each is shown a run in which it holds, and runs in which it does not."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.adversary import CHEATS
from shoal.ledger import append, fold
from shoal.protocol import LedgerEntry
from shoal.run.demo import claims
from shoal.run.demo.claims import Cast, Claim, Standing, learned, model_scores_as_claimed
from shoal.run.demo.recount import Recount

CAST = Cast(honest={"worker-0": "aa", "worker-1": "bb"}, cheater="cc", cheater_name="worker-2", cheat=CHEATS["best-of"])
START_MS = 1_000_000


def ledger(*rows: tuple[str, dict[str, Any]]) -> list[LedgerEntry]:
    """A chain of these rows, one second apart."""
    entries: list[LedgerEntry] = []
    for second, (kind, body) in enumerate([("run", {"run": "demo"}), *rows]):
        entries.append(append(entries[-1] if entries else None, kind, body, START_MS + 1000 * second))
    return entries


def credit(node: str, unit: int) -> tuple[str, dict[str, Any]]:
    return "credit", {"node": node, "unit": unit, "submission": f"{node}{unit}", "tokens": 10, "credit": 10}


def rejected(node: str, unit: int) -> tuple[str, dict[str, Any]]:
    return "rejected", {"node": node, "unit": unit, "submission": f"{node}{unit}", "reason": "sampling.seed"}


def banned(node: str, reason: str) -> tuple[str, dict[str, Any]]:
    return "sanction", {"node": node, "state": "banned", "reason": reason}


def batch(*units: int) -> tuple[str, dict[str, Any]]:
    return "batch", {"step": 0, "units": list(units)}


def standing(entries: list[LedgerEntry]) -> Standing:
    """As the hub's rows would have it."""
    banned_at_ms = {entry.body["node"]: entry.at_ms for entry in entries if entry.kind == "sanction"}
    return Standing(fold(entries).by_node, banned_at_ms)


def cheater_caught(entries: list[LedgerEntry], cast: Cast) -> Claim:
    return claims.cheater_caught(entries, standing(entries), cast)


def honest_unpunished(entries: list[LedgerEntry], cast: Cast) -> Claim:
    return claims.honest_unpunished(standing(entries), cast)


CAUGHT = (credit("aa", 1), credit("bb", 2), rejected("cc", 3), banned("cc", "sampling.seed: other dice"), batch(1, 2))


def test_learning_is_twenty_points_or_more() -> None:
    assert learned([0.3, 0.4, 0.5]).holds
    assert "+20.0 points" in learned([0.3, 0.5]).sentence
    short = learned([0.3, 0.49])
    assert not short.holds
    assert "at least +20 were expected" in short.sentence
    assert not learned([0.3, 0.9, 0.4]).holds, "the last score counts, not the best"


@pytest.mark.parametrize("scores", [[], [0.9]])
def test_a_score_measured_once_shows_no_learning(scores: list[float]) -> None:
    assert not learned(scores).holds


def test_the_cheater_is_caught_for_what_it_did() -> None:
    claim = cheater_caught(ledger(*CAUGHT), CAST)
    assert claim.holds
    assert "banned 4 s after" in claim.sentence
    assert "sampling.seed: other dice; 1 rejected, none accepted" in claim.sentence


def test_what_equals_honest_work_may_pass_and_is_said() -> None:
    rows = (credit("cc", 5), credit("cc", 6), batch(4, 5), rejected("cc", 7), banned("cc", "sampling.seed: x"))
    claim = cheater_caught(ledger(*rows), CAST)
    assert claim.holds
    assert "2 accepted, being what honest dice give as well (1 of them trained on)" in claim.sentence


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ((credit("aa", 1), credit("bb", 2)), "not caught"),
        ((rejected("cc", 3),), "not caught"),
        ((banned("aa", "sampling.seed: x"),), "not caught"),
        ((rejected("cc", 3), banned("cc", "envelope.malformed: x")), "not for"),
    ],
    ids=["never seen", "rejected only", "another was banned", "for another reason"],
)
def test_a_cheater_that_got_away_fails_the_demo(rows: tuple[tuple[str, dict[str, Any]], ...], why: str) -> None:
    claim = cheater_caught(ledger(*rows), CAST)
    assert not claim.holds
    assert why in claim.sentence


def test_without_a_ledger_nothing_holds() -> None:
    assert not cheater_caught([], CAST).holds
    assert not honest_unpunished([], CAST).holds


def test_the_honest_are_unpunished() -> None:
    claim = honest_unpunished(ledger(*CAUGHT), CAST)
    assert claim.holds
    assert "2 groups accepted, 0 rejected, credit 20" in claim.sentence


@pytest.mark.parametrize("extra", [rejected("aa", 9), banned("bb", "sampling.seed: x")], ids=["rejected", "banned"])
def test_one_honest_worker_punished_fails_the_demo(extra: tuple[str, dict[str, Any]]) -> None:
    claim = honest_unpunished(ledger(*CAUGHT, extra), CAST)
    assert not claim.holds
    assert "punished without cause" in claim.sentence


def test_an_honest_worker_that_did_nothing_fails_the_demo() -> None:
    claim = honest_unpunished(ledger(credit("aa", 1)), CAST)
    assert not claim.holds
    assert "worker-1" in claim.sentence


def test_the_model_scores_as_claimed_within_one_task() -> None:
    assert model_scores_as_claimed(0.75, Recount(score=0.75, tasks=256)).holds
    assert model_scores_as_claimed(0.75, Recount(score=0.75 - 1 / 256, tasks=256)).holds
    assert not model_scores_as_claimed(0.75, Recount(score=0.75 - 2 / 256, tasks=256)).holds
    assert not model_scores_as_claimed(None, Recount(score=0.75, tasks=256)).holds
