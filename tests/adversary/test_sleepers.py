"""The sleeper: honest until it is trusted, then not; where not everything is audited.

Under `audit = "all"` trust buys nothing (test_cheats_are_caught). By reputation a trusted node is audited fully with
p = max(5 %, 10/streak), so a cheat passes 1/p - 1 times on average before it is looked at: 19 times at most. What it
loses then is everything that is in no batch yet, and all credit of the window. A real run of it: test_trials.
"""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kit import TempPaths
from kit.hub import make_config
from kit.served_hub import Hub, ok, refusal, running_hub
from shoal.hub.state.draws import audit_fraction
from shoal.hub.state.reputation import depth_for, full_audit_probability
from shoal.hub.state.rows import NodeRow
from shoal.ledger import fold
from shoal.protocol import LedgerEntry, LedgerPage, NodeState, NodeView, Severity

TRUSTED_AFTER = 30  # full audits passed: the next are p = 1/3
CERTAIN = {
    "outcome": "rejected", "rewards": (), "generated_tokens": 0, "reason": "sampling.seed",
    "severity": Severity.CERTAIN,
}  # fmt: skip


@dataclass
class Caught:
    """What a sleeper's story left behind: the units that it cheated on, and how it stood before and after."""

    cheated: list[int]
    looked_at: list[bool]
    before: NodeView
    after: NodeView
    refused: tuple[int, str]
    entries: list[LedgerEntry]
    units: dict[str, int]

    def bodies(self, kind: str) -> list[dict[str, Any]]:
        mine = (entry for entry in self.entries if entry.body.get("node") == self.after.node)
        return [entry.body for entry in mine if entry.kind == kind]


class Sleeping:
    """A worker, and a validator that sees what it submits when it looks closely, and only then."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.worker = hub.worker("sleeper")
        self.validator = hub.trusted("validator-0", "validator")

    def unit(self, cheats: bool) -> tuple[int, bool]:
        """One unit from lease to verdict: its number, and whether it was looked at closely."""
        [lease] = self.worker.deliver()
        [audit] = self.validator.audits()
        self.validator.judge(audit, **(CERTAIN if cheats and audit.depth == "full" else {}))
        return lease.unit, audit.depth == "full"

    def node(self) -> NodeView:
        return next(node for node in self.hub.status().nodes if node.name == "sleeper")

    def ledger(self) -> list[LedgerEntry]:
        return list(LedgerPage.model_validate_json(ok(self.hub.http.get("/ledger?limit=1000")).content).entries)


@pytest.fixture(scope="module")
def caught(tmp_path_factory: TempPaths) -> Caught:
    """A node that was honest until it was trusted, and then cheated until it was caught."""
    wide = {"groups_per_step": 128, "max_staleness": 1}
    with running_hub(tmp_path_factory.mktemp("sleeper") / "run", run=wide, hub={"audit": "reputation"}) as hub:
        sleeper = Sleeping(hub)
        full = 0
        while full < TRUSTED_AFTER:
            full += sleeper.unit(cheats=False)[1]
        before, story = sleeper.node(), [sleeper.unit(cheats=True)]
        while not story[-1][1]:
            story.append(sleeper.unit(cheats=True))
        return Caught(
            cheated=[unit for unit, _ in story], looked_at=[looked_at for _, looked_at in story], before=before,
            after=sleeper.node(), refused=refusal(sleeper.worker.call("POST", "/leases", {"request": "request-again"})),
            entries=sleeper.ledger(), units=hub.status().units,
        )  # fmt: skip


def test_first_full_audit_bans_a_sleeper_pulls_its_groups_and_voids_its_pending_credit(caught: Caught) -> None:
    assert caught.looked_at == [False] * (len(caught.cheated) - 1) + [True]
    assert len(caught.cheated) <= 60  # at p = 1/3 a hundredth of a billionth of all sleepers last longer
    assert caught.after.state is NodeState.BANNED
    assert caught.after.reason.startswith("sampling.seed")
    assert caught.refused == (403, "node.banned")
    [pulled] = caught.bodies("pulled")
    assert set(caught.cheated[:-1]) <= set(pulled["units"])
    assert len(pulled["units"]) == caught.after.accepted
    assert caught.units.get("accepted", 0) == 0
    assert caught.units["open"] == len(pulled["units"]) + 1
    assert caught.before.pending > 0
    assert (caught.after.pending, caught.after.credit) == (0, 0)
    assert len(caught.bodies("void")) == len(caught.bodies("pending")) == caught.after.accepted
    account = fold(caught.entries).by_node[caught.after.node]
    assert (account.credit, account.banned) == (0, True)


def test_most_trusted_sleeper_lasts_20_groups_on_average() -> None:
    """The hub's own draws, under 2,000 secrets: 20 groups on average until the first full audit, 90 at the 99th."""
    rules = make_config(Path(), settings={"audit": "reputation"}).rules
    node = NodeRow("n" * 32, "k" * 64, "worker", "sleeper", 0, streak=10_000, passed=10_000)
    assert full_audit_probability(rules, node) == 0.05

    def is_full(secret: bytes, group: int) -> bool:
        return depth_for(rules, node, audit_fraction(secret, f"{group:064x}")) == "full"

    secrets = [f"secret-{number}".encode() for number in range(2_000)]
    lasted = [next(group for group in range(1, 10_000) if is_full(secret, group)) for secret in secrets]
    assert 18 < statistics.mean(lasted) < 22
    assert statistics.quantiles(lasted, n=100)[98] < 100
