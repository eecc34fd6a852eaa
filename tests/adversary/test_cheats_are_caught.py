"""Every cheat against a real run: the bytes that it hands in are all that the validator sees of it, and they betray it.

One run serves all tests: the cheaters come one after the other, each alone until the hub has shut it out (so that its
work is surely asked for), and then one honest worker, who finishes the run.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from attackkit import Attacked

from shoal.errors import ShutOut
from shoal.ledger import fold
from shoal.protocol import LedgerEntry, NodeState, NodeView
from shoal.worker.cheats import CHEATS

HONEST = "worker-0"
CHEATERS = {"best-of": "worker-1", "copy": "worker-2", "stale": "worker-3"}
NEVER_RIGHT = ("best-of", "copy")  # the others are right until the policy changes


@pytest.fixture(scope="module")
def endings() -> dict[str, BaseException | None]:
    """What each cheater's process would have ended with."""
    return {}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, endings: dict[str, BaseException | None]) -> Iterator[Attacked]:
    attacked = Attacked(tmp_path_factory.mktemp("adversary") / "run")
    try:
        for cheat, name in CHEATERS.items():
            endings[cheat] = attacked.ending(attacked.start(name, cheat))
        assert attacked.ending(attacked.start(HONEST)) is None
        yield attacked
    finally:
        attacked.close()


def test_every_cheat_is_tried_here() -> None:
    assert set(CHEATERS) == set(CHEATS)


@pytest.mark.parametrize("cheat", CHEATERS)
def test_the_cheater_is_banned_for_one_of_its_reasons(
    run: Attacked, endings: dict[str, BaseException | None], cheat: str
) -> None:
    node = run.nodes()[CHEATERS[cheat]]
    assert node.state is NodeState.BANNED
    assert node.reason.partition(":")[0] in CHEATS[cheat].reasons
    assert isinstance(endings[cheat], ShutOut)
    assert node.reason in str(endings[cheat])


@pytest.mark.parametrize("cheat", CHEATERS)
def test_it_is_banned_by_the_first_certain_or_the_second_statistical_failure(run: Attacked, cheat: str) -> None:
    node = run.nodes()[CHEATERS[cheat]]
    seen: list[str] = []
    for entry in run.ledger():
        if entry.body.get("node") == node.node and entry.kind in ("rejected", "sanction"):
            seen.append(str(entry.body["severity"]) if entry.kind == "rejected" else "ban")
    before = seen[: seen.index("ban")]
    assert before[-1:] == ["certain"] or before.count("statistical") == 2
    assert "certain" not in before[:-1]


@pytest.mark.parametrize("cheat", CHEATERS)
def test_what_was_rejected_earned_nothing(run: Attacked, cheat: str) -> None:
    entries, node = run.ledger(), run.nodes()[CHEATERS[cheat]]
    rejected, paid = _submissions(entries, "rejected", node), _submissions(entries, "credit", node)
    assert rejected
    assert not rejected & paid
    assert (len(rejected), len(paid)) == (node.rejected, node.accepted)
    assert fold(entries).by_node[node.node].credit == node.credit


def _submissions(entries: list[LedgerEntry], kind: str, node: NodeView) -> set[str]:
    return {str(e.body["submission"]) for e in entries if e.kind == kind and e.body["node"] == node.node}


@pytest.mark.parametrize("cheat", NEVER_RIGHT)
def test_nothing_of_it_is_trained_on(run: Attacked, cheat: str) -> None:
    assert CHEATERS[cheat] in run.nodes()
    assert run.nodes()[CHEATERS[cheat]].node not in {group.node for group in run.trained()}


def test_a_stale_worker_is_right_until_the_policy_changes_and_then_at_once_wrong(run: Attacked) -> None:
    node = run.nodes()[CHEATERS["stale"]]
    assert node.accepted > 0
    assert {group.policy.version for group in run.trained() if group.node == node.node} == {0}


def test_a_banned_node_that_comes_again_is_shut_out_at_the_door(run: Attacked) -> None:
    """Honest this time, but with the same key."""
    outcome = run.ending(run.start(CHEATERS["copy"]))
    assert isinstance(outcome, ShutOut)
    assert str(outcome).startswith("the hub has banned this node: sampling.seed")


def test_the_honest_worker_is_unpunished_and_finishes_the_run(run: Attacked) -> None:
    node = run.nodes()[HONEST]
    assert node.state is NodeState.ACTIVE
    assert (node.rejected, node.inconclusive, node.strikes) == (0, 0, 0)
    assert node.credit > 0
    assert node.node in {group.node for group in run.trained()}
